"""Parse Hermes, Qwen 2.5 and 3: any number of <tool_call>{"name": …, "arguments": {…}}</tool_call>."""

from __future__ import annotations

from ...text.markers import MarkerFinder
from .json_calls import CallReader
from .parts import BlankFilter, CallEnd, Part, content

OPENING, CLOSING = "<tool_call>", "</tool_call>"


class HermesParser:
    """Parser of one answer. The last call may lack its closing marker. Text between markers is content unless it begins
    with a call. White space after a call is content only if other content follows."""

    def __init__(self) -> None:
        self._opening, self._closing = MarkerFinder(OPENING), MarkerFinder(CLOSING)
        self._call: CallReader | None = None
        self._raw: str | None = None  # text of a complete call before its closing marker
        self._blanks = BlankFilter(keeps_first=True)

    def append(self, text: str) -> list[Part]:
        parts: list[Part] = []
        while text:
            if self._call is not None:
                found, text = self._read_call(self._call, text)
            elif self._raw is not None:
                found, text = self._read_end(self._raw, text)
            else:
                before, marker, text = self._opening.feed(text)
                found = content(before)
                self._call = CallReader(OPENING) if marker else None
            parts += self._blanks.read(found)
        return parts

    def finish(self) -> list[Part]:
        """Return the held text. An incomplete call ends with its raw text, or is content if its name is incomplete."""
        if self._call is not None:
            return self._blanks.read(self._call.finish())
        if self._raw is not None:
            return [CallEnd(self._raw + self._closing.finish())]
        return self._blanks.read(content(self._opening.finish()))

    def _read_call(self, call: CallReader, text: str) -> tuple[list[Part], str]:
        """Return the parts of the open call and the text after it; hold its CallEnd until the closing marker."""
        parts = call.append(text)
        if not call.is_over:
            return parts, ""
        self._call = None
        if not call.is_call:
            return content(OPENING), call.rest
        *parts, end = parts
        assert isinstance(end, CallEnd)
        self._raw = end.raw
        return parts, call.rest

    def _read_end(self, raw: str, text: str) -> tuple[list[Part], str]:
        before, marker, rest = self._closing.feed(text)
        self._raw = raw + before + marker
        if not marker:
            return [], ""
        ended: list[Part] = [CallEnd(self._raw)]
        self._raw = None
        return ended, rest
