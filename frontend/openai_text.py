"""AnswerText: the text of one answer of a chat → reasoning, content and tool calls, as it comes."""

from __future__ import annotations

import msgspec

from ..ipc.messages import Delta
from .openai_reasoning import ReasoningSplitter, ends_inside
from .openai_tools import ForcedParser, ParserName, ToolParser, ToolUse, new_parser


class AnswerStyle(msgspec.Struct, frozen=True, kw_only=True):
    """How the answers of a request are to be read."""

    tool_parser: ParserName
    is_forced: bool  # a schema makes the answer calls and nothing else
    forced_name: str | None
    has_reasoning: bool
    prompt: str
    max_calls: int | None  # 1 without parallel calls: what comes after the first is dropped


class Piece(msgspec.Struct, frozen=True):
    """What some text brought."""

    reasoning: str = ""
    content: str = ""
    calls: tuple[ToolUse, ...] = ()

    def joined(self, other: Piece) -> Piece:
        return Piece(self.reasoning + other.reasoning, self.content + other.content, self.calls + other.calls)


class AnswerText:
    """Text → (splitter) → (tool parser) → pieces, whose order is that of the text."""

    def __init__(self, style: AnswerStyle) -> None:
        self._splitter = ReasoningSplitter(is_open=ends_inside(style.prompt)) if style.has_reasoning else None
        self._tools: ToolParser | None = (
            ForcedParser(style.forced_name) if style.is_forced else new_parser(style.tool_parser)
        )
        self._max_calls = style.max_calls
        self.num_calls = 0

    @property
    def is_plain(self) -> bool:
        """Whether all text is content as it comes."""
        return self._splitter is None and self._tools is None

    def read(self, delta: Delta) -> Piece:
        """All that a delta brings; with the last one, what was held back too."""
        piece = self.append(delta.text)
        return piece if delta.finish_reason is None else piece.joined(self.finish())

    def append(self, text: str) -> Piece:
        if self.is_plain:
            return Piece("", text)
        reasoning, content = ("", text) if self._splitter is None else self._splitter.append(text)
        return self._parse(reasoning, content)

    def finish(self) -> Piece:
        reasoning, content = ("", "") if self._splitter is None else self._splitter.finish()
        piece = self._parse(reasoning, content)
        if self._tools is None:
            return piece
        content, calls = self._tools.finish()
        return piece.joined(Piece("", content, self._admit(calls)))

    def _parse(self, reasoning: str, content: str) -> Piece:
        if self._tools is None or not content:
            return Piece(reasoning, content)
        content, calls = self._tools.append(content)
        return Piece(reasoning, content, self._admit(calls))

    def _admit(self, calls: list[ToolUse]) -> tuple[ToolUse, ...]:
        room = len(calls) if self._max_calls is None else max(0, self._max_calls - self.num_calls)
        self.num_calls += len(calls[:room])
        return tuple(calls[:room])

    def finish_reason(self, delta: Delta) -> str | None:
        return "tool_calls" if self.num_calls and delta.finish_reason == "stop" else delta.finish_reason
