"""Llama 3 and 4: the whole answer is {"name": …, "parameters": {…}}, more of them after a semicolon."""

from __future__ import annotations

from .json_calls import CallList
from .parts import Part, content

PYTHON_TAG = "<|python_tag|>"


class LlamaParser:
    """The answer is calls if it begins as JSON does, and what comes after them is content; else all of it is."""

    def __init__(self) -> None:
        self._held = ""
        self._calls: CallList | None = None
        self._is_content = False

    def append(self, text: str) -> list[Part]:
        if self._is_content:
            return content(text)
        if self._calls is None:
            self._held += text
            begun = self._held.lstrip()
            if PYTHON_TAG.startswith(begun[: len(PYTHON_TAG)]):
                begun = begun.removeprefix(PYTHON_TAG).lstrip() if begun.startswith(PYTHON_TAG) else ""
            if not begun:
                return []
            self._calls, text = CallList("; \n\t", self._held[: len(self._held) - len(begun)]), begun
        parts = self._calls.append(text)
        self._is_content = self._calls.is_over
        return [*parts, *content(self._calls.before + self._calls.rest)] if self._is_content else parts

    def finish(self) -> list[Part]:
        if self._is_content:
            return []
        return content(self._held) if self._calls is None else self._calls.finish()
