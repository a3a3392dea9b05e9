"""AnswerText: the text of one answer of a chat → reasoning, content and tool calls, as it comes.

Models mark their thoughts with <think>…</think>; with some the template has opened the first marker already. Text that
may be the beginning of a marker is held back until it is decided.
"""

from __future__ import annotations

import msgspec

from ....ipc.messages.client import Delta
from .tools import ForcedParser, ParserName, ToolParser, ToolUse, held_back, new_parser

OPENING, CLOSING = "<think>", "</think>"


class ReasoningSplitter:
    """What the model thought and what it says: `append` and `finish` return (reasoning, content)."""

    def __init__(self, *, is_open: bool) -> None:
        """`is_open`: the prompt ends inside a thought."""
        self._is_open = is_open
        self._is_over = False  # the thought has ended: the rest is content
        self._held = ""
        self._at_start = not is_open

    def append(self, text: str) -> tuple[str, str]:
        if self._is_over:
            return "", text
        self._held += text
        if self._at_start:
            begun = self._held.lstrip()  # white space before the opening marker is no content
            if begun.startswith(OPENING):
                self._held = begun.removeprefix(OPENING)
                self._at_start, self._is_open = False, True
            elif OPENING.startswith(begun):
                return "", ""
            else:
                self._is_over = True
                held, self._held = self._held, ""
                return "", held
        return self._think()

    def finish(self) -> tuple[str, str]:
        held, self._held = self._held, ""
        return (held, "") if self._is_open else ("", held)

    def _think(self) -> tuple[str, str]:
        reasoning, marker, content = self._held.partition(CLOSING)
        if marker:
            self._is_open, self._is_over, self._held = False, True, ""
            return reasoning, content.lstrip("\n")
        num_held = held_back(self._held, CLOSING)
        reasoning, self._held = self._held[: len(self._held) - num_held], self._held[len(self._held) - num_held :]
        return reasoning, ""


def has_markers(template: str) -> bool:
    return CLOSING in template or OPENING in template


def ends_inside(prompt: str) -> bool:
    """Whether a prompt leaves a thought open."""
    return prompt.rfind(OPENING) > prompt.rfind(CLOSING)


class AnswerStyle(msgspec.Struct, frozen=True, kw_only=True):
    """How the answers of a request are to be read."""

    tool_parser: ParserName
    is_forced: bool  # a schema makes the answer calls and nothing else
    forced_name: str | None
    has_reasoning: bool
    is_inside_thought: bool  # as the prompt ends
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
        self._splitter = ReasoningSplitter(is_open=style.is_inside_thought) if style.has_reasoning else None
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
