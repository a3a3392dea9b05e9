"""Limits on large frames of clients, which bound the time that the event loop takes to decode one.

Texts and token ids of any length are cheap, because they are copied as bytes. Each entry of a list or map costs a
Python object, so `check_large_frame` limits the entries: the turns of a chat and their parts, the answers of a resumed
request, and the bytes of parameters, media and the other inputs of a chat template.
"""

from __future__ import annotations

import msgspec

from ....ipc.errors import ProtocolError
from ....ipc.params.sampling_params import MAX_CHILDREN

LARGE_BYTES = 256 << 10  # smaller frames are not checked: the slowest takes 20 ms to decode
MAX_TURNS = 1 << 16  # largest number of turns of a chat, and of parts in all its turns together
MAX_PARAMS_BYTES = 1 << 20  # largest size of each other field with entries

_NIL = msgspec.Raw(b"\xc0")


class _Turn(msgspec.Struct, frozen=True):
    content: msgspec.Raw = _NIL
    more: msgspec.Raw = _NIL


class _Outline(msgspec.Struct, frozen=True):
    """The fields of a client's message that can hold many values, not decoded further."""

    chat: msgspec.Raw = _NIL
    chat_form: msgspec.Raw = _NIL
    children: msgspec.Raw = _NIL
    media: msgspec.Raw = _NIL
    params: msgspec.Raw = _NIL
    pooling: msgspec.Raw = _NIL


class _Name(msgspec.Struct, frozen=True):
    """Type and id of a client's message. They can be read even if the rest of the message is invalid."""

    type: str | None = None
    request_id: str | None = None
    query_id: int | None = None


_outlines = msgspec.msgpack.Decoder(_Outline)
_turns = msgspec.msgpack.Decoder(list[_Turn] | None)
_names = msgspec.msgpack.Decoder(_Name)
_ERRORS = (msgspec.MsgspecError, ValueError, RecursionError, OverflowError)


def check_large_frame(frame: bytes | memoryview) -> None:
    """Raise ProtocolError if a client's frame is not a valid msgpack map, or a field has too many entries or bytes."""
    try:
        outline = _outlines.decode(frame)
    except _ERRORS as error:
        raise ProtocolError(f"malformed frame of {len(frame)} bytes: {error}") from None
    _check_length("chat", _array_length(outline.chat), MAX_TURNS)
    _check_length("children", _array_length(outline.children), MAX_CHILDREN)
    names = ("params", "pooling", "chat_form", "media")
    sizes = {name: memoryview(getattr(outline, name)).nbytes for name in names}
    try:
        turns = _turns.decode(outline.chat) or ()
    except _ERRORS:  # decoding the whole message will describe the error
        turns = ()
    _check_length("chat[…].content", sum(_array_length(turn.content) for turn in turns), MAX_TURNS)
    sizes["chat[…].more"] = sum(memoryview(turn.more).nbytes for turn in turns)
    for name, num_bytes in sizes.items():
        if num_bytes > MAX_PARAMS_BYTES:
            raise ProtocolError(f"{name} has {num_bytes} bytes, at most {MAX_PARAMS_BYTES} are accepted")


def message_id(frame: bytes | memoryview) -> str | int | None:
    """Return the request id of a Submit or the query id of a query, even if its other fields are invalid; None for
    other messages and invalid msgpack."""
    try:
        name = _names.decode(frame)
    except _ERRORS:
        return None
    return name.request_id if name.type == "submit" else name.query_id


def _check_length(name: str, num_items: int, most: int) -> None:
    if num_items > most:
        raise ProtocolError(f"{name} has {num_items} entries, at most {most} are accepted")


def _array_length(raw: msgspec.Raw) -> int:
    """Return the length of an encoded array, read from its first 5 bytes; 0 if the value is not an array.

    Format: https://github.com/msgpack/msgpack/blob/master/spec.md
    """
    head = bytes(memoryview(raw)[:5])
    first = head[0]
    if first & 0xF0 == 0x90:
        return first & 0x0F
    num_bytes = {0xDC: 2, 0xDD: 4}.get(first, 0)
    return int.from_bytes(head[1 : 1 + num_bytes], "big")
