"""Parse Hermes, Qwen 2.5 and 3: any number of <tool_call>{"name": …, "arguments": {…}}</tool_call>."""

from __future__ import annotations

from .json_calls import CallReader
from .parts import CallEnd, Content, MarkedText, Part, content

OPENING, CLOSING = "<tool_call>", "</tool_call>"


class HermesParser:
    """Parser of one answer. The last call may lack its closing marker. Text between markers is content unless it is a
    call. White space after a call is content only if other content follows."""

    def __init__(self) -> None:
        self._text = MarkedText()
        self._call: CallReader | None = None
        self._raw: str | None = None  # text of a complete call before its closing marker
        self._is_after_call = False
        self._space = ""  # white space after the call

    def append(self, text: str) -> list[Part]:
        self._text.held += text
        parts: list[Part] = []
        while True:
            if self._call is not None:
                found, is_done = self._read_call(self._call)
            elif self._raw is not None:
                found, is_done = self._read_end(self._raw)
            else:
                before, marker = self._text.until(OPENING)
                found, is_done = self._outside(before), bool(marker)
                self._call = CallReader(OPENING) if marker else None
            parts += found
            if not is_done:
                return parts

    def finish(self) -> list[Part]:
        """Return the held text. An incomplete call ends with its raw text, or is content if its name is incomplete."""
        if self._call is not None:
            parts = self._call.finish()
            return self._outside(parts[0].text) if isinstance(parts[0], Content) else parts
        held = self._text.take()
        return [CallEnd(self._raw + held)] if self._raw is not None else self._outside(held)

    def _read_call(self, call: CallReader) -> tuple[list[Part], bool]:
        parts = call.append(self._text.take())
        if not call.is_over:
            return parts, False
        self._text.held, self._call = call.rest, None
        if not call.is_call:
            return self._outside(OPENING), True
        *parts, end = parts
        assert isinstance(end, CallEnd)
        self._raw = end.raw
        return parts, True

    def _read_end(self, raw: str) -> tuple[list[Part], bool]:
        before, marker = self._text.until(CLOSING)
        self._raw = raw + before + marker
        if not marker:
            return [], False
        ended: list[Part] = [CallEnd(self._raw)]
        self._raw, self._is_after_call, self._space = None, True, ""
        return ended, True

    def _outside(self, text: str) -> list[Part]:
        """Return the content of text outside calls; hold back white space after a call."""
        if self._is_after_call:
            text, self._space = self._space + text, ""
            if not text.strip():
                self._space = text
                return []
            self._is_after_call = False
        return content(text)
