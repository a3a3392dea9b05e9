"""AnswerForm: how a model writes thoughts and calls, as data: texts that stand around names, keys and values.

A form is learned from a chat template, read from a checkpoint or named. Reading, streaming and grammars use the same
one. Its texts, called joints, are exact as the template renders them, except that white space in them matches any
white space or none, since models vary line breaks. {ID}, {INDEX} and {NAME} in a joint stand for a call's id, for its
place among the calls of the turn, from 0, and for its name once more. Knows no template and no text of an answer.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from ....ipc.params.call_form import CallForm, CallKind

__all__ = ["AnswerForm", "CallForm", "CallKind", "Reader"]

Reader: TypeAlias = Literal["machine", "llama", "harmony", "response_template"]


class AnswerForm(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How an answer is written: a thought or none, content, calls. `AnswerForm()` is content alone."""

    name: str = "none"  # of --tool-call-parser, or "learned"
    reader: Reader = "machine"
    thought: tuple[str, str] | None = None  # the texts that open and close a thought
    begins_inside: bool = False  # answers begin inside the thought, though no prompt opens it
    calls_end_thought: bool = True  # a call that begins inside a thought ends it; else it is part of the thought
    content_open: str = ""  # a header that may stand between a thought or the begin and the content
    turn_end: str = ""  # what the template writes behind an answer
    calls: tuple[CallForm, ...] = ()  # grammars write the first; all are read, where several are in use
    response_template: str = ""  # JSON, for the reader of that name

    @property
    def has_thoughts(self) -> bool:
        """Whether thoughts are told apart from content."""
        return self.thought is not None or self.reader in ("harmony", "response_template")

    def without_calls(self) -> AnswerForm:
        """Return the form of answers to requests without tools: calls are content."""
        without = msgspec.structs.replace(self, name="none", calls=())
        if self.reader == "llama":
            return msgspec.structs.replace(without, reader="machine")
        return without
