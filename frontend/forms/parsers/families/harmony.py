"""Parser of gpt-oss's format: <|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>final<|message|>….

The analysis channel is reasoning, a message to=functions.NAME is a call of that function, everything else is content.
"""

from __future__ import annotations

import re

from ..markers import MarkerFinder
from ..parts import ArgumentsWriter, CallBegin, CallEnd, Content, Part, Thought, content

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
MAX_LEAD = 256  # characters of a recipient before the first channel
ENDS = ("<|end|>", "<|return|>", "<|call|>")
_CHANNEL = re.compile(re.escape(CHANNEL) + r"\s*(\w+)")
_LEAD = re.compile(r"\s*+(to=[\w.-]*+\s*+)?+")  # before the first channel: the prompt holds the begin of the header
_FUNCTION = re.compile(r"to=functions\.([\w.-]+)")
_TO = r"(?:to=([\w.-]++))?+\s*+"
_HEADER = re.compile(  # other text in a header is content
    rf"(?:<\|start\|>)?+\s*+(?:assistant)?+\s*+{_TO}(?:<\|channel\|>\s*+(?:analysis|commentary|final)?+)?+\s*+{_TO}"
    r"(?:<\|constrain\|>)?+\s*+(?:json|code)?+\s*+"
)


class HarmonyParser:
    """Parser of one answer. Text before the first header is content: JSON that a schema forces has no headers. A
    recipient there, `to=functions.NAME`, is part of the header."""

    markers = (START, CHANNEL, MESSAGE, "<|constrain|>", *ENDS)

    def __init__(self, *, has_calls: bool) -> None:
        """`has_calls`: if False, a call counts as content, or as reasoning in the analysis channel."""
        self._has_calls = has_calls
        self._outside, self._in_header = MarkerFinder(START, CHANNEL, *ENDS), MarkerFinder(MESSAGE, START, *ENDS)
        self._lead: str | None = ""  # the text so far, while it may be a recipient
        self._header: list[str] | None = None  # text of the header that is being read
        self._kind: type[Thought | Content] = Content
        self._arguments: ArgumentsWriter | None = None  # writer for the open call
        self._raw: list[str] = []  # texts of the open call

    def append(self, text: str) -> list[Part]:
        parts: list[Part] = []
        if self._lead is not None:
            text = self._without_lead(self._lead + text)
        while text:
            if self._header is not None:
                before, marker, text = self._in_header.feed(text)
                self._header.append(before)
                if marker:
                    header = "".join(self._header)
                    parts += self._begin(header) if marker == MESSAGE else _stray(header)
            else:
                before, marker, text = self._outside.feed(text)
                parts += self._text(before)
                if marker:
                    parts += self._end()
            if marker:
                self._header = [marker] if marker in (START, CHANNEL) else None
        return parts

    def finish(self) -> list[Part]:
        """Return the parts of the text that was held back, and end the open call."""
        if self._header is not None:
            return _stray("".join(self._header) + self._in_header.finish())
        if self._lead:
            return content(self._lead)
        return [*self._text(self._outside.finish()), *self._end()]

    def _without_lead(self, text: str) -> str:
        """Return the answer's first text without a recipient that a channel follows, which becomes the begin of a
        header; nothing while it may still be one."""
        lead = _LEAD.match(text)
        assert lead is not None, "the expression matches any text"
        rest = text[lead.end() :]
        awaited = CHANNEL if lead[1] else "to="
        is_short = len(text) <= MAX_LEAD
        self._lead = None
        if is_short and len(rest) < len(awaited) and awaited.startswith(rest):
            self._lead = text
            return ""
        if lead[1] and rest.startswith(CHANNEL):
            self._header = [lead[0], CHANNEL]
            return rest.removeprefix(CHANNEL)
        return text

    def _begin(self, header: str) -> list[Part]:
        function, channel, known = _FUNCTION.search(header), _CHANNEL.search(header), _HEADER.fullmatch(header)
        is_known = known is not None and None in known.groups()  # one recipient at most
        if function is not None and self._has_calls:
            self._arguments, self._raw = ArgumentsWriter(), [header if is_known else function[0], MESSAGE]
            return [*content("" if is_known else header.replace(function[0], "", 1)), CallBegin(function[1])]
        is_thought = channel is not None and channel[1] == "analysis"
        self._kind = Thought if is_thought else Content
        return content("" if is_known else header)

    def _text(self, text: str) -> list[Part]:
        if self._arguments is None:
            return [self._kind(text)] if text else []
        self._raw.append(text)
        return self._arguments.append(text)

    def _end(self) -> list[Part]:
        ended: list[Part] = []
        if self._arguments is not None:
            ended = [*self._arguments.finish(), CallEnd("".join(self._raw))]
        self._kind, self._arguments = Content, None
        return ended


def _stray(header: str) -> list[Part]:
    """Return a header that no message follows as content; nothing if it consists only of role, channel and type."""
    known = _HEADER.fullmatch(header)
    return content(header if known is None or known[1] or known[2] else "")
