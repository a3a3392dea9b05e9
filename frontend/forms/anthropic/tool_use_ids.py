"""Ids of tool_use blocks, which hold no other characters than Anthropic's API takes: letters, digits, _ and -.

A call's own id, which the model wrote, stands in such an id and is found in it when the conversation comes back, so
that the next prompt has the text that the model generated.
"""

from __future__ import annotations

import re

from ..parsers.parts import CallBegin

_PREFIX = "toolu_"
_OWN = f"{_PREFIX}own_"  # before an id that the model wrote
_REFUSED = re.compile(rb"[^A-Za-z0-9_]")
_WRITTEN = re.compile(rb"-([0-9A-F]{2})")


def tool_use_id(call: CallBegin) -> str:
    """Return the id of a call's block. Bytes that the API refuses, and -, become - and two digits (base 16)."""
    if not call.has_own_id:
        return _PREFIX + call.id.removeprefix("call_")
    return _OWN + _REFUSED.sub(lambda found: b"-%02X" % found[0][0], call.id.encode()).decode()


def id_of_call(given: str | None) -> str | None:
    """Return the id that the model wrote, if `given` is a tool_use_id of one; else `given`."""
    if given is None or not given.startswith(_OWN):
        return given
    written = given.removeprefix(_OWN).encode()
    return _WRITTEN.sub(lambda found: bytes([int(found[1], 16)]), written).decode(errors="replace")
