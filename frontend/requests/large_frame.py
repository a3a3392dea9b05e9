"""check_large_frame: bounds the cost of decoding a client's large frame in the event loop.

Texts and token ids of any length are cheap, because they are copied as bytes. Each list or map entry costs a Python
object, so their number is bounded: turns of a chat, answers of a resumed request, bytes of parameters and of the other
inputs of a chat template.
"""

from __future__ import annotations

import msgspec

from ...ipc.errors import ProtocolError
from ...ipc.sampling_params import MAX_CHILDREN

LARGE_BYTES = 256 << 10  # smaller frames are not checked: the worst takes 20 ms to decode
MAX_TURNS = 1 << 16  # of a chat
MAX_PARAMS_BYTES = 1 << 20  # of each field besides prompt and chat texts

_NIL = msgspec.Raw(b"\xc0")


class _Turn(msgspec.Struct, frozen=True):
    more: msgspec.Raw = _NIL


class _Outline(msgspec.Struct, frozen=True):
    """The still encoded fields of any message that can hold many values."""

    chat: msgspec.Raw = _NIL
    chat_form: msgspec.Raw = _NIL
    children: msgspec.Raw = _NIL
    params: msgspec.Raw = _NIL
    pooling: msgspec.Raw = _NIL


class _Name(msgspec.Struct, frozen=True):
    """The fields by which a message is answered."""

    type: str | None = None
    request_id: str | None = None
    query_id: int | None = None


_outlines = msgspec.msgpack.Decoder(_Outline)
_turns = msgspec.msgpack.Decoder(list[_Turn] | None)
_names = msgspec.msgpack.Decoder(_Name)
_ERRORS = (msgspec.MsgspecError, ValueError, RecursionError, OverflowError)


def check_large_frame(frame: bytes) -> None:
    """Raise ProtocolError if a client's frame has too many values."""
    try:
        outline = _outlines.decode(frame)
    except _ERRORS as error:
        raise ProtocolError(f"malformed frame of {len(frame)} bytes: {error}") from None
    for name, raw, most in (("chat", outline.chat, MAX_TURNS), ("children", outline.children, MAX_CHILDREN)):
        num_items = _array_length(bytes(memoryview(raw)[:5]))
        if num_items > most:
            raise ProtocolError(f"{name} has {num_items} entries, at most {most} are accepted")
    names = ("params", "pooling", "chat_form")
    sizes = {name: memoryview(getattr(outline, name)).nbytes for name in names}
    try:
        turns = _turns.decode(outline.chat) or ()
    except _ERRORS:  # the decoder of the message will describe the error
        turns = ()
    sizes["chat[…].more"] = sum(memoryview(turn.more).nbytes for turn in turns)
    for name, num_bytes in sizes.items():
        if num_bytes > MAX_PARAMS_BYTES:
            raise ProtocolError(f"{name} has {num_bytes} bytes, at most {MAX_PARAMS_BYTES} are accepted")


def message_id(frame: bytes) -> str | int | None:
    """Return the id of a Submit or query that cannot be decoded, None for any other message or invalid msgpack."""
    try:
        name = _names.decode(frame)
    except _ERRORS:
        return None
    return name.request_id if name.type == "submit" else name.query_id


def _array_length(head: bytes) -> int:
    """Read an array's length from its first 5 bytes (https://github.com/msgpack/msgpack/blob/master/spec.md).

    0 if the value is not an array.
    """
    first = head[0]
    if first & 0xF0 == 0x90:
        return first & 0x0F
    num_bytes = {0xDC: 2, 0xDD: 4}.get(first, 0)
    return int.from_bytes(head[1 : 1 + num_bytes], "big")
