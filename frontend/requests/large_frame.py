"""Large frames of clients: what of them can hold up the loop is bounded before they are decoded.

Texts and token ids are copied as they are, however long. Lists and maps become one Python object each, so that their
numbers are bounded: the turns of a chat, the answers of a resumed request, the bytes of parameters and of what a chat
template gets beside texts.
"""

from __future__ import annotations

import msgspec

from ...ipc.errors import ProtocolError
from ...ipc.sampling_params import MAX_CHILDREN

LARGE_BYTES = 256 << 10  # smaller frames are decoded at once: 20 ms for the worst of them
MAX_TURNS = 1 << 16  # of a chat
MAX_PARAMS_BYTES = 1 << 20  # of everything that says how, not what

_NIL = msgspec.Raw(b"\xc0")


class _Turn(msgspec.Struct, frozen=True):
    more: msgspec.Raw = _NIL


class _Outline(msgspec.Struct, frozen=True):
    """The parts of any message that can hold many values, as they stand in the frame."""

    chat: msgspec.Raw = _NIL
    chat_form: msgspec.Raw = _NIL
    children: msgspec.Raw = _NIL
    params: msgspec.Raw = _NIL
    pooling: msgspec.Raw = _NIL


class _Name(msgspec.Struct, frozen=True):
    """What an answer to a message needs of it."""

    type: str | None = None
    request_id: str | None = None
    query_id: int | None = None


_outlines = msgspec.msgpack.Decoder(_Outline)
_turns = msgspec.msgpack.Decoder(list[_Turn] | None)
_names = msgspec.msgpack.Decoder(_Name)
_ERRORS = (msgspec.MsgspecError, ValueError, RecursionError, OverflowError)


def check_large_frame(frame: bytes) -> None:
    """ProtocolError for a frame of a client's that has too many values."""
    try:
        outline = _outlines.decode(frame)
    except _ERRORS as error:
        raise ProtocolError(f"malformed frame of {len(frame)} bytes: {error}") from None
    for name, raw, most in (("chat", outline.chat, MAX_TURNS), ("children", outline.children, MAX_CHILDREN)):
        num_items = _array_length(bytes(memoryview(raw)[:5]))
        if num_items > most:
            raise ProtocolError(f"{name} has {num_items} entries, at most {most} are taken")
    names = ("params", "pooling", "chat_form")
    sizes = {name: memoryview(getattr(outline, name)).nbytes for name in names}
    try:
        turns = _turns.decode(outline.chat) or ()
    except _ERRORS:  # which the decoder of the message puts in words
        turns = ()
    sizes["chat[…].more"] = sum(memoryview(turn.more).nbytes for turn in turns)
    for name, num_bytes in sizes.items():
        if num_bytes > MAX_PARAMS_BYTES:
            raise ProtocolError(f"{name} has {num_bytes} bytes, at most {MAX_PARAMS_BYTES} are taken")


def message_id(frame: bytes) -> str | int | None:
    """The id of a Submit or of a query that cannot be decoded; None when it is something else, or no msgpack at all."""
    try:
        name = _names.decode(frame)
    except _ERRORS:
        return None
    return name.request_id if name.type == "submit" else name.query_id


def _array_length(head: bytes) -> int:
    """Of the array that begins so (https://github.com/msgpack/msgpack/blob/master/spec.md); 0 for what is none."""
    first = head[0]
    if first & 0xF0 == 0x90:
        return first & 0x0F
    num_bytes = {0xDC: 2, 0xDD: 4}.get(first, 0)
    return int.from_bytes(head[1 : 1 + num_bytes], "big")
