"""Parse Mistral: [TOOL_CALLS] before a list of {"name": …, "arguments": {…}}, before name{…} or name[ARGS]{…}."""

from __future__ import annotations

import re

from .json_calls import CallListReader, JsonScanner
from .parts import Arguments, CallBegin, CallEnd, MarkedText, Part, content

MARKER = "[TOOL_CALLS]"
_NAME = re.compile(r"\s*([\w.-]+)\s*(?:\[CALL_ID\]\s*[\w-]*\s*)?(?:\[ARGS\]\s*)?(?=\{)")


class MistralParser:
    """Parser of one answer. Text after a call is content, and so is a marker without a call."""

    def __init__(self) -> None:
        self._text = MarkedText()
        self._is_marked = False
        self._list: CallListReader | None = None
        self._arguments: JsonScanner | None = None
        self._raw: list[str] = []  # texts of the open call

    def append(self, text: str) -> list[Part]:
        self._text.held += text
        parts: list[Part] = []
        while True:
            if self._list is not None:
                found, is_done = self._read_list(self._list)
            elif self._arguments is not None:
                found, is_done = self._read_arguments(self._arguments)
            elif self._is_marked:
                found, is_done = self._read_name()
            else:
                before, marker = self._text.until(MARKER)
                found, is_done = content(before), bool(marker)
                self._is_marked = bool(marker)
            parts += found
            if not is_done:
                return parts

    def finish(self) -> list[Part]:
        if self._list is not None:
            return self._list.finish()
        if self._arguments is not None:
            return [CallEnd(MARKER + "".join(self._raw))]
        return content(MARKER * self._is_marked + self._text.take())

    def _read_name(self) -> tuple[list[Part], bool]:
        held = self._text.held
        if held.lstrip().startswith("["):
            before, _, self._text.held = held.partition("[")
            self._list = CallListReader(", \n\t", f"{MARKER}{before}[")
        elif (name := _NAME.match(held)) is not None:
            self._text.held, self._arguments, self._raw = held[name.end() :], JsonScanner(), [name[0]]
            return [CallBegin(name[1])], True
        elif "{" in held or "\n" in held.strip():
            self._is_marked = False
            return content(MARKER), True
        return [], self._list is not None

    def _read_list(self, calls: CallListReader) -> tuple[list[Part], bool]:
        parts = calls.append(self._text.take())
        if calls.is_over:
            self._list, self._is_marked, self._text.held = None, False, calls.rest
            if not calls.rest.startswith("]"):  # an item of the list is not a call
                return [*parts, *content(calls.before)], True
            self._text.held = calls.rest[1:]
        return parts, calls.is_over

    def _read_arguments(self, arguments: JsonScanner) -> tuple[list[Part], bool]:
        text = self._text.take()
        end = arguments.append(text)
        parts: list[Part] = [Arguments(text[:end])] if end else []
        self._raw.append(text[:end])
        if not arguments.is_over:
            return parts, False
        self._text.held, self._arguments, self._is_marked = text[end:], None, False
        return [*parts, CallEnd(MARKER + "".join(self._raw))], True
