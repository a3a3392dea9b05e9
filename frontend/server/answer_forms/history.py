"""History: whether the prompt of a turn begins with the prompt and the answer of the turn before.

If it does, a prefix cache finds both. It does not if the template shows an answer otherwise once others follow it: some
drop the thoughts of earlier turns, or move the tools to the last question. Nor does it if the form of answers does not
return what was written. Knows no server: an answer counts as written in the text that the template shows at the end of
a chat, and comes back as the form's parsers read it. There are three exceptions: text and calls are written as one
turn, though the template may make two of them; a thought is written, though the template may leave it out; and where
the prompt opens a thought, no answer comes without one.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Literal, NamedTuple, TypeAlias

import msgspec

from ....ipc.codec import JsonObject
from ....ipc.errors import RequestError
from ....ipc.messages.client import ChatMessage
from ....ipc.params.call_form import first_marker
from ...forms.answer_forms.form import AnswerForm
from ...forms.parsers.names import new_parsers
from ...forms.parsers.parts import Thought, parsed, whole_calls
from ..text.calls import calls_of
from .probe import VALUES, schema_of, tool
from .whole_markers import common_prefix, common_suffix

Render: TypeAlias = Callable[[Sequence[ChatMessage], JsonObject], str]
Outcome: TypeAlias = Literal["found", "lost", "not shown"]
NUM_SHOWN = 40  # characters of a difference that are kept, and half as many before it
_USER = ChatMessage("user", "Zhquestion")
_CONTENT = "Zhcontent"
_THOUGHT = "Zhthought"
_VALUE = "Zhvalue"
_ID = "zhId00001"
_NAME = "zh_name"
_SCHEMA = schema_of({"zh_key": VALUES["string"]})
TOOL = tool(_NAME, _SCHEMA)
_TOOLS = [TOOL]
_PROMPT: JsonObject = {"tools": _TOOLS, "add_generation_prompt": True}
_ENDED: JsonObject = {"tools": _TOOLS, "add_generation_prompt": False}
_CALLS: JsonObject = {
    "tool_calls": [
        {"id": _ID, "type": "function", "function": {"name": _NAME, "arguments": f'{{"zh_key": "{_VALUE}"}}'}}
    ]
}
_RESULT = ChatMessage("tool", "Zhresult", {"tool_call_id": _ID})
_THINKS: JsonObject = {"reasoning_content": _THOUGHT}
_PLAIN = ChatMessage("assistant", _CONTENT)
ANSWERS = {
    "call": ChatMessage("assistant", None, _CALLS),
    "call and content": ChatMessage("assistant", _CONTENT, _CALLS),
    "thought and call": ChatMessage("assistant", None, _CALLS | _THINKS),
    "text": _PLAIN,
    "thought and text": ChatMessage("assistant", _CONTENT, _THINKS),
}
_SETTINGS: dict[bool, tuple[JsonObject, ...]] = {  # variables, by whether the answer has a thought
    True: ({}, {"enable_thinking": True}, {"thinking": True}, {"reasoning_effort": "high"}),
    False: ({}, {"enable_thinking": False}, {"thinking": False}),
}


class LostPrefix(msgspec.Struct, frozen=True, kw_only=True):
    """The first difference between an answer, as it was generated, and its place in the prompt of the next turn."""

    answer: str  # one of ANSWERS
    variables: JsonObject = {}  # of the template, with which the answer is written so
    before: str  # the text before the difference
    generated: str  # the texts from the difference on
    next_prompt: str

    def __str__(self) -> str:
        return f"behind {self.before!r} was {self.generated!r}, the next prompt has {self.next_prompt!r}"


class Turn(NamedTuple):
    """The fate of an answer in the prompt of the next turn, with the difference if it is lost."""

    outcome: Outcome
    variables: JsonObject  # of the template
    prompt: str = ""
    text: str = ""  # of the answer; "" if the template does not show it behind the prompt
    lost: LostPrefix | None = None

    def compared(self, name: str, next_prompt: str) -> Turn:
        """Return the turn with its fate in `next_prompt`, which is to begin with its prompt and text. `name`: of the
        answer."""
        expected = self.prompt + self.text
        if next_prompt.startswith(expected):
            return self._replace(outcome="found")
        place = len(common_prefix(expected, next_prompt))
        end = place + NUM_SHOWN
        lost = LostPrefix(
            answer=name,
            variables=self.variables,
            before=expected[max(0, place - NUM_SHOWN // 2) : place],
            generated=expected[place:end],
            next_prompt=next_prompt[place:end],
        )
        return self._replace(outcome="lost", lost=lost)


def check_history(
    render: Render,
    form: AnswerForm,
    answers: Mapping[str, ChatMessage] = MappingProxyType(ANSWERS),
    keeps_text: Callable[[], bool] = lambda: True,
) -> dict[str, Turn]:
    """Return the fate of each of the answers, read by a form. `render(messages, variables)` returns a template's text;
    RequestError if it refuses them. `keeps_text()`: whether the template shows text beside calls; otherwise `render`
    gives it the text as a turn of its own. Takes up to 50 renderings for ANSWERS."""
    history = _History(render, form, keeps_text)
    return {name: history.turn(name, answer) for name, answer in answers.items()}


def first_difference(render: Render, form: AnswerForm, keeps_text: Callable[[], bool]) -> LostPrefix | None:
    """Return the difference of the first of ANSWERS that the next prompt shows otherwise; None if there is none.
    `render`, `form`, `keeps_text`: see `check_history`."""
    history = _History(render, form, keeps_text)
    turns = itertools.starmap(history.turn, ANSWERS.items())
    return next((turn.lost for turn in turns if turn.lost is not None), None)


class _History:
    """Renderer of a template's conversations. Owns their texts: each is made once."""

    def __init__(self, render: Render, form: AnswerForm, keeps_text: Callable[[], bool]) -> None:
        self._render = render
        self._form = form
        self._keeps_text = keeps_text
        self._texts: dict[str, str | RequestError] = {}

    def turn(self, name: str, answer: ChatMessage) -> Turn:
        """Return the fate of an answer with the first variables for which it is shown and begins with the prompt; else
        of a thought that is never shown, with the first variables for which it is written; else with the first for
        which the answer begins so, or with none."""
        found: list[Turn] = []
        has_thought = _has_thought(answer)
        settings = [each for each in _SETTINGS[has_thought] if not has_thought or self._takes_thought(each)]
        for variables in settings:
            turn = self._turn_with(name, answer, variables)
            if turn is None:
                continue
            if turn.text and turn.outcome != "not shown":
                return turn
            found.append(turn)
        lost = (self._lost_thought(name, answer, variables) for variables in settings if has_thought)
        unshown = next(filter(None, lost), None)
        if unshown is not None:
            return unshown
        return [*(turn for turn in found if turn.text), *found, Turn("not shown", {})][0]

    def _turn_with(self, name: str, answer: ChatMessage, variables: JsonObject) -> Turn | None:
        """Return the fate of an answer with some variables; None for one without a thought if the prompt opens one,
        which the template does not close in the answer."""
        try:
            prompt = self._text([_USER], variables | _PROMPT)
            generated = self._generated(prompt, answer, variables)
            turn = Turn("not shown", variables, prompt)
            read = answer
            if generated.startswith(prompt):
                turn = turn._replace(text=generated.removeprefix(prompt))
                read = self._read(prompt, turn.text)
            if not _has_thought(answer) and self._leaves_thought_open(turn):
                return None
            next_prompt = self._next_prompt(answer, read, variables)
        except RequestError:
            return Turn("not shown", variables)
        thought = _THOUGHT * (bool(turn.text) and _has_thought(answer))  # else the template may leave it out
        if not all(each in generated for each in (*_texts(answer), thought)):
            return turn
        return turn.compared(name, next_prompt)

    def _lost_thought(self, name: str, answer: ChatMessage, variables: JsonObject) -> Turn | None:
        """Return the fate of an answer of which the next prompt shows all but the thought; None if it is otherwise, or
        if the texts around thoughts are not known."""
        if self._form.thought is None:
            return None
        try:
            prompt = self._text([_USER], variables | _PROMPT)
            next_prompt = self._next_prompt(answer, answer, variables)
        except RequestError:
            return None
        if _THOUGHT in next_prompt or not all(each in next_prompt for each in _texts(answer)):
            return None
        opening = self._form.thought[0] * (not self._opens_thought(prompt))
        lost = Turn("lost", variables, prompt, f"{opening}{_THOUGHT}").compared(name, next_prompt)
        return lost._replace(text="")

    def _takes_thought(self, variables: JsonObject) -> bool:
        """Return whether a prompt leaves room for a thought: it closes none, unless all prompts end as if they did."""
        return not self._closes_thought(variables) or all(map(self._closes_thought, _SETTINGS[True]))

    def _closes_thought(self, variables: JsonObject) -> bool:
        try:
            prompt = self._text([_USER], variables | _PROMPT)
        except RequestError:
            return False
        return self._form.thought is not None and prompt.rstrip().endswith(self._form.thought[1])

    def _opens_thought(self, prompt: str) -> bool:
        thought = self._form.thought
        return thought is not None and bool(thought[0]) and prompt.rstrip().endswith(thought[0])

    def _leaves_thought_open(self, turn: Turn) -> bool:
        """Return whether the prompt opens a thought, and the answer behind it does not close it."""
        thought = self._form.thought
        return thought is not None and self._opens_thought(turn.prompt) and first_marker(thought[1]) not in turn.text

    def _next_prompt(self, answer: ChatMessage, read: ChatMessage, variables: JsonObject) -> str:
        """Return the prompt behind `answer`, which comes back as `read`."""
        next_message = _USER
        if calls_of(answer):
            next_message = _RESULT
        return self._text([_USER, read, next_message], variables | _PROMPT)

    def _read(self, prompt: str, text: str) -> ChatMessage:
        """Return an answer as the form's parsers read it."""
        is_inside = self._form.begins_in_thought(prompt)
        parts = parsed(new_parsers(self._form, {_NAME: _SCHEMA}, is_inside_thought=is_inside), text, is_last=True)
        content, calls = whole_calls(parts)
        more: JsonObject = {}
        if thought := "".join(part.text for part in parts if isinstance(part, Thought)):
            more["reasoning_content"] = thought
        if calls:
            more["tool_calls"] = [call.to_json() for call in calls]
        return ChatMessage("assistant", content or None, more)

    def _generated(self, prompt: str, answer: ChatMessage, variables: JsonObject) -> str:
        """Return the prompt with the answer behind it, without the end of the turn, as the template shows it last."""
        end = self._ended(prompt, _PLAIN, variables).rpartition(_CONTENT)[2]
        text = self._ended(prompt, answer, variables)
        text = text.removesuffix(common_suffix(text, end)).rstrip()
        if not answer.text or not calls_of(answer) or self._keeps_text():
            return text
        before, content, behind = text.rpartition(answer.text.strip())
        if self._form.thought is not None and behind.startswith(self._form.thought[1]):
            return text  # the model writes what makes two turns: it does so behind a thought, too
        called = self._generated(prompt, ANSWERS["call"], variables)
        return before + content + called.removeprefix(prompt)

    def _ended(self, prompt: str, answer: ChatMessage, variables: JsonObject) -> str:
        """Return the text of a chat that ends with an answer."""
        ended = variables | _ENDED
        text = self._text([_USER, answer], ended)
        if self._text([_USER], ended) == prompt:  # the template may begin a turn in any case
            return text.removesuffix(common_suffix(text, prompt))
        return text

    def _text(self, messages: list[ChatMessage], variables: JsonObject) -> str:
        """Return a template's text; RequestError if it refuses the messages."""
        key = repr((messages, variables))
        if key not in self._texts:
            try:
                self._texts[key] = self._render(messages, variables)
            except RequestError as error:
                self._texts[key] = error
        text = self._texts[key]
        if isinstance(text, RequestError):
            raise text
        return text


def _has_thought(answer: ChatMessage) -> bool:
    return "reasoning_content" in answer.more


def _texts(answer: ChatMessage) -> list[str]:
    """Return the texts by which an answer is shown, but for its thought."""
    return [answer.text.strip(), _VALUE * bool(calls_of(answer))]
