"""Parse gpt-oss: <|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>final<|message|>….

The analysis channel is thought, a message to=functions.NAME is a call of that function, everything else is content.
"""

from __future__ import annotations

import re

from ...text.markers import MarkerFinder
from .parts import Arguments, CallBegin, CallEnd, Content, Part, Thought

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
ENDS = ("<|end|>", "<|return|>", "<|call|>")
_CHANNEL = re.compile(re.escape(CHANNEL) + r"\s*(\w+)")
_FUNCTION = re.compile(r"to=functions\.([\w.-]+)")


class HarmonyParser:
    """Parser of one answer. Text before the first header is content: a schema's JSON comes without channels."""

    def __init__(self, *, has_calls: bool) -> None:
        """`has_calls`: if False, calls are content, or thoughts in the analysis channel."""
        self._has_calls = has_calls
        self._outside, self._in_header = MarkerFinder(START, CHANNEL, *ENDS), MarkerFinder(MESSAGE)
        self._header: str | None = None  # text of the header that is being read
        self._kind: type[Thought | Content | Arguments] = Content
        self._raw: list[str] = []  # texts of the open call

    def append(self, text: str) -> list[Part]:
        parts: list[Part] = []
        while text:
            if self._header is not None:
                before, marker, text = self._in_header.feed(text)
                self._header += before
                if marker:
                    parts += self._begin(self._header)
                    self._header = None
            else:
                before, marker, text = self._outside.feed(text)
                parts += [self._kind(before)] if before else []
                if self._kind is Arguments:
                    self._raw.append(before)
                if marker:
                    parts += self._end()
                    self._header = None if marker in ENDS else marker
        return parts

    def finish(self) -> list[Part]:
        """Return the held text and end the open call. An incomplete header is dropped."""
        held = self._outside.finish() if self._header is None else ""
        parts: list[Part] = [self._kind(held)] if held else []
        return [*parts, *self._end()]

    def _begin(self, header: str) -> list[Part]:
        function, channel = _FUNCTION.search(header), _CHANNEL.search(header)
        if function is not None and self._has_calls:
            self._kind, self._raw = Arguments, [header, MESSAGE]
            return [CallBegin(function[1])]
        is_thought = channel is not None and channel[1] == "analysis"
        self._kind = Thought if is_thought else Content
        return []

    def _end(self) -> list[Part]:
        ended: list[Part] = [CallEnd("".join(self._raw))] if self._kind is Arguments else []
        self._kind = Content
        return ended
