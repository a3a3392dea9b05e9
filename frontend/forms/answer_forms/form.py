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

__all__ = ["AnswerForm", "CallForm", "CallKind", "Reader", "Spaces"]

Reader: TypeAlias = Literal["machine", "llama", "harmony", "response_template"]


class Spaces(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """White space that the chat template writes around the texts of an answer. It is part of none of them: a text that
    comes back with it would have it twice in the next prompt."""

    thought_open: str = ""  # behind the text that opens a thought
    prompted_thought: str = ""  # the same where a prompt opens the thought: what the prompt has not written
    thought_close: str = ""  # before the text that closes a thought
    behind_thought: str | None = None  # between a thought and content; None: not known, so all line breaks are dropped
    content: str = ""  # between a prompt and content
    calls: str = ""  # between content and calls


class AnswerForm(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How an answer is written: a thought or none, content, calls. `AnswerForm()` is content alone."""

    name: str = "none"  # of --tool-call-parser, or "learned"
    reader: Reader = "machine"
    thought: tuple[str, str] | None = None  # the texts that open and close a thought
    begins_inside: bool = False  # answers begin inside the thought, though no prompt opens it
    calls_end_thought: bool = True  # a call that begins inside a thought ends it; else it is part of the thought
    content_open: str = ""  # a header that may stand between a thought or the begin and the content
    turn_end: str = ""  # what the template writes behind an answer
    spaces: Spaces = Spaces()
    calls: tuple[CallForm, ...] = ()  # grammars write the first; all are read, where several are in use
    response_template: str = ""  # JSON, for the reader of that name

    @property
    def has_thoughts(self) -> bool:
        """Whether thoughts are told apart from content."""
        return self.thought is not None or self.reader in ("harmony", "response_template")

    def begins_in_thought(self, prompt: str) -> bool:
        """Return whether the answer to a prompt, of which `prompt` is the end, begins inside a thought.

        That is so if the prompt ends with the opening text (not if text follows it), or if the form's answers always
        begin inside a thought and the prompt does not end with the closing text."""
        if self.thought is None:
            return False
        opening, closing = self.thought
        text = prompt.rstrip()
        return text.endswith(opening) or (self.begins_inside and not text.endswith(closing))

    def may_open_thought(self, prompt: str) -> bool:
        """Return whether the model may open a thought at the begin of its answer to a prompt, of which `prompt` is the
        end: the prompt neither opens one, nor ends with the end of one, which turns thinking off."""
        if self.thought is None or not self.thought[0]:
            return False
        return not (self.begins_in_thought(prompt) or prompt.rstrip().endswith(self.thought))

    def continued(self) -> AnswerForm:
        """Return the form of answers that continue a text in the prompt: white space at their begin is the model's."""
        spaces = msgspec.structs.replace(self.spaces, content="", prompted_thought="")
        return msgspec.structs.replace(self, spaces=spaces)

    def without_calls(self) -> AnswerForm:
        """Return the form of answers to requests without tools: calls are content."""
        without = msgspec.structs.replace(self, name="none", calls=())
        if self.reader == "llama":
            return msgspec.structs.replace(without, reader="machine")
        return without
