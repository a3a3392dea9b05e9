"""Parser of tool calls of Llama 3 and 4: an answer with calls starts with {"name": …, "parameters": {…}}, with or
without <|python_tag|> before it.

Further calls are separated by semicolons or white space. Any other text is content.
"""

from __future__ import annotations

from ..json_calls import CallListReader
from ..markers import split_marker
from ..parts import Part, content

PYTHON_TAG = "<|python_tag|>"


class LlamaParser:
    """Parser of one answer. It has calls only if it starts with one; the text after the calls is content."""

    markers = (PYTHON_TAG,)

    def __init__(self) -> None:
        self._held = ""
        self._calls: CallListReader | None = None
        self._is_content = False

    def append(self, text: str) -> list[Part]:
        if self._is_content:
            return content(text)
        if self._calls is None:
            self._held += text
            split = split_marker(self._held, PYTHON_TAG)
            if split is None or not (begun := split[1].lstrip()):
                return []
            self._calls, text = CallListReader("; \n\t", self._held[: len(self._held) - len(begun)]), begun
        parts = self._calls.append(text)
        self._is_content = self._calls.is_over
        return [*parts, *content(self._calls.before + self._calls.rest)] if self._is_content else parts

    def finish(self) -> list[Part]:
        if self._is_content:
            return []
        return content(self._held) if self._calls is None else self._calls.finish()
