"""The message that a chat's client gets of an answer, in OpenAI's form."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ...parsers.parts import Part, whole_calls


def message_of(parts: Iterable[Part], *, is_forced: bool) -> dict[str, Any]:
    """Return the message of a whole answer, without its thought. `is_forced`: a constraint allows only calls. Content
    of white space alone is null beside calls."""
    content, calls = whole_calls(parts)
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if (calls or is_forced) and not content.strip():
        message["content"] = None
    if calls:
        message["tool_calls"] = [call.to_json() for call in calls]
    return message
