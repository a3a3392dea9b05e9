"""What can still be read from a frame that does not decode, so that its sender can be answered to the point."""

from __future__ import annotations

import msgspec

from .prompts import MAX_REQUEST_ID_CHARACTERS


def read_request_id(frame: bytes) -> str | None:
    """The id of a Submit with a bad field; None when the frame is something else, or no msgpack at all."""
    try:
        raw = msgspec.msgpack.decode(frame)
    except (msgspec.MsgspecError, ValueError, RecursionError, OverflowError):
        return None
    if not isinstance(raw, dict) or raw.get("type") != "submit":
        return None
    request_id = raw.get("request_id")
    is_usable = isinstance(request_id, str) and 0 < len(request_id) <= MAX_REQUEST_ID_CHARACTERS
    return request_id if is_usable else None
