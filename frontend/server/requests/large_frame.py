"""check_large_frame: bounds the cost of decoding a client's large frame in the event loop.

Texts and token ids of any length are cheap, because they are copied as bytes. Each list or map entry costs a Python
object, so their number is bounded: turns of a chat and their parts, answers of a resumed request, bytes of parameters
and of the other inputs of a chat template.
"""

from __future__ import annotations

import msgspec

from ....ipc.errors import ProtocolError
from ....ipc.params.sampling_params import MAX_CHILDREN

LARGE_BYTES = 256 << 10  # smaller frames are not checked: the worst takes 20 ms to decode
MAX_TURNS = 1 << 16  # of a chat; and parts of all its turns
MAX_PARAMS_BYTES = 1 << 20  # of each field besides prompt and chat texts

_NIL = msgspec.Raw(b"\xc0")


class _Turn(msgspec.Struct, frozen=True):
    content: msgspec.Raw = _NIL
    more: msgspec.Raw = _NIL


class _Outline(msgspec.Struct, frozen=True):
    """Those fields of a client's message that can hold many values, still encoded."""

    chat: msgspec.Raw = _NIL
    chat_form: msgspec.Raw = _NIL
    children: msgspec.Raw = _NIL
    media: msgspec.Raw = _NIL
    params: msgspec.Raw = _NIL
    pooling: msgspec.Raw = _NIL


class _Name(msgspec.Struct, frozen=True):
    """Type and id of a client's message, read from a malformed frame to reply with an error."""

    type: str | None = None
    request_id: str | None = None
    query_id: int | None = None


_outlines = msgspec.msgpack.Decoder(_Outline)
_turns = msgspec.msgpack.Decoder(list[_Turn] | None)
_names = msgspec.msgpack.Decoder(_Name)
_ERRORS = (msgspec.MsgspecError, ValueError, RecursionError, OverflowError)


def check_large_frame(frame: bytes | memoryview) -> None:
    """Raise ProtocolError if a client's frame is malformed, or a field has too many entries or bytes."""
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
    except _ERRORS:  # the decoder of the message will describe the error
        turns = ()
    _check_length("chat[…].content", sum(_array_length(turn.content) for turn in turns), MAX_TURNS)
    sizes["chat[…].more"] = sum(memoryview(turn.more).nbytes for turn in turns)
    for name, num_bytes in sizes.items():
        if num_bytes > MAX_PARAMS_BYTES:
            raise ProtocolError(f"{name} has {num_bytes} bytes, at most {MAX_PARAMS_BYTES} are accepted")


def message_id(frame: bytes | memoryview) -> str | int | None:
    """Read the id of a malformed Submit or query; None for any other message or invalid msgpack."""
    try:
        name = _names.decode(frame)
    except _ERRORS:
        return None
    return name.request_id if name.type == "submit" else name.query_id


def _check_length(name: str, num_items: int, most: int) -> None:
    if num_items > most:
        raise ProtocolError(f"{name} has {num_items} entries, at most {most} are accepted")


def _array_length(raw: msgspec.Raw) -> int:
    """Read an array's length from its first 5 bytes (https://github.com/msgpack/msgpack/blob/master/spec.md).

    0 if the value is not an array.
    """
    head = bytes(memoryview(raw)[:5])
    first = head[0]
    if first & 0xF0 == 0x90:
        return first & 0x0F
    num_bytes = {0xDC: 2, 0xDD: 4}.get(first, 0)
    return int.from_bytes(head[1 : 1 + num_bytes], "big")
