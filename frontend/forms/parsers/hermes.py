"""Parser of tool calls of Hermes, Qwen 2.5 and 3: <tool_call>{"name": …, "arguments": {…}}</tool_call>, any number."""

from __future__ import annotations

from .json_calls import CallReader
from .markers import MarkerFinder
from .parts import BlankFilter, CallEnd, Part, content

OPENING, CLOSING = "<tool_call>", "</tool_call>"


class HermesParser:
    """Parser of one answer. A call may lack its closing marker: it also ends at the next call, with or without an
    opening marker, and at other text. Text between markers is content unless it starts with a call. White space after a
    call is content only if other content follows."""

    markers = (OPENING, CLOSING)

    def __init__(self) -> None:
        self._outside = MarkerFinder(OPENING)
        self._call: CallReader | None = None
        self._end: CallEnd | None = None  # end of a complete call, held until its closing marker
        self._gap: list[str] = []  # white space after that call
        self._held = ""  # text after that white space that may be the start of a marker
        self._blanks = BlankFilter(keeps_first=True)

    def append(self, text: str) -> list[Part]:
        parts: list[Part] = []
        while text:
            if self._call is not None:
                found, text = self._read_call(self._call, text)
            elif self._end is not None:
                found, text = self._read_end(self._end, text)
            else:
                before, marker, text = self._outside.feed(text)
                found = content(before)
                self._call = CallReader(OPENING) if marker == OPENING else None
                self._outside = MarkerFinder(OPENING) if marker else self._outside
            parts += self._blanks.read(found)
        return parts

    def finish(self) -> list[Part]:
        """Return the parts of the text that was held back. An incomplete call gets a CallEnd, or is content unless its
        name and then the start of its arguments were read."""
        if self._call is not None:
            found = self._call.finish()
        elif self._end is not None:
            found = [self._end, *content("".join(self._gap) + self._held)]
        else:
            found = content(self._outside.finish())
        return self._blanks.read(found)

    def _read_call(self, call: CallReader, text: str) -> tuple[list[Part], str]:
        """Return the parts of the open call, and the text after it. Its CallEnd is held until the closing marker."""
        parts = call.append(text)
        if not call.is_over:
            return parts, ""
        self._call = None
        if not call.is_call:
            return content(call.before), call.rest
        *parts, end = parts
        assert isinstance(end, CallEnd)
        self._end, self._gap, self._held = end, [], ""
        return parts, call.rest

    def _read_end(self, end: CallEnd, text: str) -> tuple[list[Part], str]:
        """Look for the closing marker after a complete call. Return the CallEnd and the text after the marker; [] and
        "" while the marker may still come."""
        text = self._held + text
        begun = text.lstrip()
        self._gap.append(text[: len(text) - len(begun)])
        self._held = begun
        if any(marker.startswith(begun) and marker != begun for marker in (CLOSING, OPENING)):
            return [], ""
        self._end, gap = None, "".join(self._gap)
        if begun.startswith(CLOSING):
            return [CallEnd(end.raw + gap + CLOSING)], begun[len(CLOSING) :]
        self._outside = MarkerFinder(OPENING, CLOSING)  # text until either marker belongs to this call
        if begun.startswith("{"):
            self._call = CallReader(gap)
            return [end], begun
        return [end, *content(gap)], begun
