"""Hermes, Qwen 2.5 and 3: <tool_call>{"name": …, "arguments": {…}}</tool_call>, any number of them."""

from __future__ import annotations

from .json_calls import CallObject
from .parts import CallEnd, Content, MarkedText, Part, content

OPENING, CLOSING = "<tool_call>", "</tool_call>"


class HermesParser:
    """Calls between markers; a last one counts without its closing marker. White space after a call is content only if
    other content follows it. What is between markers and no call is content."""

    def __init__(self) -> None:
        self._text = MarkedText()
        self._call: CallObject | None = None
        self._raw: str | None = None  # of a call that has ended, until the closing marker
        self._is_after_call = False
        self._space = ""  # since that call

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
                self._call = CallObject(OPENING) if marker else None
            parts += found
            if not is_done:
                return parts

    def finish(self) -> list[Part]:
        """A last call that is torn ends with its raw text."""
        if self._call is not None:
            torn = self._call.finish()
            return self._outside(torn[0].text) if isinstance(torn[0], Content) else torn
        held = self._text.take()
        return [CallEnd(self._raw + held)] if self._raw is not None else self._outside(held)

    def _read_call(self, call: CallObject) -> tuple[list[Part], bool]:
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
        """What is known to be content once this text has come."""
        if self._is_after_call:
            text, self._space = self._space + text, ""
            if not text.strip():
                self._space = text
                return []
            self._is_after_call = False
        return content(text)
