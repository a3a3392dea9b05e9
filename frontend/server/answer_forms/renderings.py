"""Renderings: a chat template's texts of answers, as they stand behind the user's turn.

System text and tools before the user's turn are left out. Each distinct rendering is made once. A
rendering that is too slow or too long ends the learning: the template is hostile.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from typing import TypeAlias

from ....ipc.codec import JsonObject
from ....ipc.errors import RequestError
from ....ipc.messages.client import ChatMessage
from .probe import CONTENT, KEYS, NAMES, THOUGHT, USER, ProbeAnswer, ProbeCall, tools
from .whole_markers import common_prefix, common_suffix

Render: TypeAlias = Callable[[Sequence[ChatMessage], JsonObject], str]
MAX_RENDER_S = 2.0
MAX_CHARACTERS = 1 << 20
NO_VARIABLES: JsonObject = {}
SETTINGS: tuple[JsonObject, ...] = (  # variables by which templates switch thoughts
    NO_VARIABLES,
    {"enable_thinking": True},
    {"thinking": True},
    {"enable_thinking": False},
    {"thinking": False},
)
_USERS_TURN = ProbeAnswer().messages()[:1]
_TOOLS: JsonObject = {"tools": tools()}
_NO_ANSWER: JsonObject = _TOOLS | {"add_generation_prompt": False}
_CALL = ProbeCall(NAMES[0], {KEYS[0]: CONTENT})


class HostileTemplate(Exception):
    """A rendering of a probe took too long or is too large. The message says which."""


class Renderings:
    """Renderer of probes by one template. Owns the texts that it has made."""

    def __init__(self, render: Render) -> None:
        """`render(messages, variables)` returns a template's text; RequestError if it refuses them. HostileTemplate as
        the other methods."""
        self._render = render
        self._texts: dict[str, str] = {}
        self.refusal = ""  # why the template refused the last answer that it refused
        self.has_named_ids = False  # the template shows the ids of calls, but not their names
        self.header = ""  # the begin of turns of all kinds, and of prompts, before the answer
        self.turn_end = ""  # the end of a plain turn, behind the content
        self._behind_turn = ""  # a prompt's begin, where the template ignores add_generation_prompt
        self._calls_end = ""  # end of a turn with calls, where content stands behind the calls
        self._thought = ""  # expression for an empty thought at the begin of a turn
        self._find_header()
        self.has_named_ids = not self.shows(_CALL.name, ProbeAnswer(calls=(_CALL,)))

    @property
    def num_renders(self) -> int:
        return len(self._texts)

    def prompt(self, variables: JsonObject = NO_VARIABLES) -> str:
        """Return the text of a prompt behind the user's turn; empty if the template refuses it."""
        return self._based(self._text(_USERS_TURN, variables | _TOOLS), variables)

    def answer(self, answer: ProbeAnswer, variables: JsonObject = NO_VARIABLES) -> str:
        """Return the text of an answer behind the header, as the template shows it, with the end of its turn. Empty if
        the template refuses the answer."""
        text = self._turns(answer, answer.messages(has_named_ids=self.has_named_ids), variables)
        return self._based(text, variables).removeprefix(self.header)

    def text_of(self, answer: ProbeAnswer, variables: JsonObject = NO_VARIABLES, *, is_one_turn: bool = True) -> str:
        """Return the text of an answer as a model writes it: without the end of its turn and, if `is_one_turn`, as one
        turn even if the template makes two of it. Empty if the template refuses the answer."""
        text = self.answer(answer, variables).removesuffix(self._behind_turn)
        if answer.calls:
            text = text.removesuffix(self._calls_end)
        end = self.turn_end.strip()
        begin = self.header[len(common_prefix(self.header, self.turn_end)) :].strip()
        if end and text.rstrip().endswith(end):
            text = text.rstrip().removesuffix(end)
        else:
            text = text[: len(text) - len(common_suffix(text, self.turn_end))]
        if end and begin and is_one_turn:
            return re.sub(rf"(?<!{THOUGHT}){re.escape(end)}\s*{re.escape(begin)}\s*{self._thought}", "", text)
        return text

    def shows(self, sentinel: str, answer: ProbeAnswer, variables: JsonObject = NO_VARIABLES) -> bool:
        """Return whether the template's text of an answer holds `sentinel`."""
        return sentinel in self.answer(answer, variables)

    def takes_ids(self, answer: ProbeAnswer, ids: tuple[str, ...], variables: JsonObject) -> bool:
        """Return whether the template shows an answer whose calls have these ids, with all of them: where it refuses
        them, others may stand in their place."""
        text = self._turns(answer, answer.messages(ids=ids), variables)
        return all(each in text for each in ids)

    def whole_text(self, messages: Sequence[ChatMessage], variables: JsonObject) -> str:
        """Return a template's text of any messages, with all that stands before the user's turn. It is not kept.
        RequestError if the template refuses them."""
        start = time.process_time()
        try:
            text = self._render(messages, variables)
        finally:
            if (taken_s := time.process_time() - start) > MAX_RENDER_S:
                why = f"the chat template takes {taken_s:.1f} s for a probe, more than {MAX_RENDER_S:g} s"
                raise HostileTemplate(why)
        if len(text) > MAX_CHARACTERS:
            raise HostileTemplate(f"the chat template writes {len(text)} characters for a probe")
        return text

    def shorten_header(self, marker: str) -> None:
        """Take `marker` from the end of the header: it begins the answer."""
        self.header = self.header[: self.header.rindex(marker)]

    def know_thought(self, opening: str, closing: str) -> None:
        """Set the texts around thoughts: where the template makes two turns of an answer, an empty thought may begin
        the second one, and a model that writes both as one turn writes none there."""
        self._thought = rf"(?:{re.escape(opening)}\s*{re.escape(closing)}\s*)?"

    def _find_header(self) -> None:
        before, _, after = self.answer(ProbeAnswer(content=CONTENT)).rpartition(CONTENT)
        if not before:
            return
        texts = list(filter(None, map(self.prompt, SETTINGS)))
        for answer in (ProbeAnswer(calls=(_CALL,)), ProbeAnswer(thought=CONTENT, calls=(_CALL,))):
            begin, content, _ = self.answer(answer).partition(CONTENT)
            if content:
                texts.append(begin)
        self.header = common_prefix(before, *texts)
        rest = before[len(self.header) :]
        prompted = self.prompt()[len(self.header) :]
        if rest and prompted.endswith(rest) and not prompted.startswith(rest):
            self.header = before  # a prompt repeats an instruction that earlier answers lack
        self.turn_end = after.partition(self.header or "\0")[0]
        self._behind_turn = after.removeprefix(self.turn_end)
        before, _, after = self.answer(ProbeAnswer(content=THOUGHT, calls=(_CALL,))).rpartition(THOUGHT)
        if _CALL.name in before and self.answer(ProbeAnswer(calls=(_CALL,))).endswith(after):
            self._calls_end = after

    def _based(self, text: str, variables: JsonObject) -> str:
        """Return a text behind the user's turn, with the end that the turn has without the variables."""
        if not variables:
            return text
        varied = self._text(_USERS_TURN, variables | _NO_ANSWER)
        if not text.startswith(varied):
            return text
        return self._text(_USERS_TURN, _NO_ANSWER) + text.removeprefix(varied)

    def _turns(self, answer: ProbeAnswer, messages: list[ChatMessage], variables: JsonObject) -> str:
        """Return the text of a conversation with an answer, with tools of its types and without a prompt behind it."""
        return self._text(messages, variables | {"tools": tools(answer), "add_generation_prompt": False})

    def _text(self, messages: list[ChatMessage], variables: JsonObject) -> str:
        """Return a template's text behind the user's turn; empty if it refuses the messages."""
        key = repr((messages, variables))
        if key not in self._texts:
            self._texts[key] = self._rendered(messages, variables)
        return self._texts[key]

    def _rendered(self, messages: list[ChatMessage], variables: JsonObject) -> str:
        text = ""
        try:
            text = self.whole_text(messages, variables)
        except RequestError as error:
            self.refusal = str(error)
        return "".join(text.rpartition(USER)[1:]).removeprefix(USER)
