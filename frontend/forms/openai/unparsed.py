"""UnparsedFinder: whether an answer holds a call that was not read: a sign that the model writes another form.

Knows the marker that begins calls, and the parts of the answer. The text of an answer stays here: its shape, in which
letters are x and digits 0, is all that others get.
"""

from __future__ import annotations

import re
from typing import Literal, NamedTuple, TypeAlias

from ..parsers.parts import CallEnd, Content, Part, ToolUse, UnreadCall

Reason: TypeAlias = Literal["marker", "arguments", "cut"]
REASONS: tuple[Reason, ...] = ("marker", "arguments", "cut")
MAX_SHAPE = 60  # characters of a shape
_MARKER = re.compile(r"<[^\s<>=]{2,64}>?|\[[A-Z_]{3,64}\]")
_LETTER = re.compile(r"[^\W\d_]")
_DIGIT = re.compile(r"\d")


class UnparsedCall(NamedTuple):
    """A call that was not read. `reason`: `cut` if the answer did not end by itself, `arguments` if they are not a JSON
    object, `marker` if the content holds the marker without a call behind it. `shape`: of the text from there on."""

    reason: Reason
    marker: str
    shape: str


def telling_marker(start: str) -> str:
    """Return the marker at the begin of a text that calls begin with; empty if it has none, as `[` and `{"name": ` have
    not: they are common in content."""
    found = _MARKER.match(start.lstrip())
    if found is None:
        return ""
    return found[0]


class UnparsedFinder:
    """Finder of the first unread call of one answer. Keeps at most MAX_SHAPE characters more than a marker."""

    def __init__(self, marker: str) -> None:
        """`marker`: the text that begins calls; empty if none does."""
        self._marker = marker
        self._tail = ""  # end of the content so far, which may be a part of the marker; or the unread call's text
        self._reason: Reason | None = None

    def read(self, part: Part, use: ToolUse | None) -> None:
        """Read the next part. `use`: the call that it ends, if it is one that was read."""
        if isinstance(part, UnreadCall) and self._reason is None:
            self._reason = "arguments"
            self._tail = part.text[:MAX_SHAPE]
        elif isinstance(part, CallEnd) and use is None and self._reason is None:
            self._reason = "arguments"
            self._tail = part.raw[:MAX_SHAPE]
        elif isinstance(part, Content) and self._reason == "marker":
            self._tail += part.text[: MAX_SHAPE - len(self._tail)]
        elif isinstance(part, Content) and self._reason is None and self._marker:
            self._find(self._tail + part.text)
        elif self._reason is None:
            self._tail = ""  # another part ends the content

    def _find(self, text: str) -> None:
        """Look for the marker in `text`, the next content behind the tail of the content before it."""
        place = text.find(self._marker)
        if place >= 0:
            self._reason = "marker"
            self._tail = text[place : place + MAX_SHAPE]
        else:
            self._tail = text[max(0, len(text) - len(self._marker) + 1) :]

    def finish(self, *, is_whole: bool) -> UnparsedCall | None:
        """Return the call; None if there is none. `is_whole`: the answer ended by itself."""
        if self._reason is None:
            return None
        rest = self._tail.removeprefix(self._marker)
        shape = self._tail[: len(self._tail) - len(rest)] + _DIGIT.sub("0", _LETTER.sub("x", rest))
        if is_whole:
            return UnparsedCall(self._reason, self._marker, shape)
        return UnparsedCall("cut", self._marker, shape)
