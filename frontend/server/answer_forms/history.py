"""History: whether the prompt of a turn begins with the prompt and the answer of the turn before.

If it does, a prefix cache finds both. It does not if the template shows an answer otherwise once others follow it: some
drop the thoughts of earlier turns, or move the tools to the last question. Knows no server and no form of answers: an
answer counts as written in the text that the template shows at the end of a chat.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, TypeAlias

import msgspec

from ....ipc.codec import JsonObject
from ....ipc.errors import RequestError
from ....ipc.messages.client import ChatMessage
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
_TOOLS = [tool(_NAME, schema_of({"zh_key": VALUES["string"]}))]
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
    before: str  # the text before the difference
    generated: str  # the texts from the difference on
    next_prompt: str

    def __str__(self) -> str:
        return f"behind {self.before!r} was {self.generated!r}, the next prompt has {self.next_prompt!r}"


class Turn(NamedTuple):
    """The fate of an answer in the prompt of the next turn, with the difference if it is lost."""

    outcome: Outcome
    lost: LostPrefix | None = None


def check_history(render: Render) -> dict[str, Turn]:
    """Return the fate of each of ANSWERS. `render(messages, variables)` returns a template's text; RequestError if
    it refuses them. Takes up to 50 renderings."""
    history = _History(render)
    return {name: history.turn(name) for name in ANSWERS}


def first_difference(render: Render) -> LostPrefix | None:
    """Return the difference of the first of ANSWERS that the next prompt shows otherwise; None if there is none.
    `render`: see `check_history`."""
    turns = map(_History(render).turn, ANSWERS)
    return next((turn.lost for turn in turns if turn.lost is not None), None)


class _History:
    """Renderer of a template's conversations. Owns their texts: each is made once."""

    def __init__(self, render: Render) -> None:
        self._render = render
        self._texts: dict[str, str | RequestError] = {}

    def turn(self, name: str) -> Turn:
        """Return the fate of one of ANSWERS with the first variables for which it is shown and begins with the prompt;
        else with the first for which it begins so, or with none."""
        found: list[tuple[bool, Turn]] = []
        for variables in _SETTINGS["reasoning_content" in ANSWERS[name].more]:
            begins, turn = self._turn_with(name, variables)
            if begins and turn.outcome != "not shown":
                return turn
            found.append((begins, turn))
        return [*(turn for begins, turn in found if begins), found[0][1]][0]

    def _turn_with(self, name: str, variables: JsonObject) -> tuple[bool, Turn]:
        """Return whether the answer, as the template shows it, begins with the prompt, and its fate."""
        answer = ANSWERS[name]
        next_message = _USER
        if calls_of(answer):
            next_message = _RESULT
        try:
            prompt = self._text([_USER], variables | _PROMPT)
            generated = self._generated(prompt, answer, variables)
            next_prompt = self._text([_USER, answer, next_message], variables | _PROMPT)
        except RequestError:
            return False, Turn("not shown")
        begins = generated.startswith(prompt)
        if not all(each in generated for each in _sentinels(answer, begins=begins)):
            return begins, Turn("not shown")
        expected = prompt
        if begins:
            expected = generated
        if next_prompt.startswith(expected):
            return begins, Turn("found")
        place = len(common_prefix(expected, next_prompt))
        end = place + NUM_SHOWN
        lost = LostPrefix(
            answer=name,
            before=expected[max(0, place - NUM_SHOWN // 2) : place],
            generated=expected[place:end],
            next_prompt=next_prompt[place:end],
        )
        return begins, Turn("lost", lost)

    def _generated(self, prompt: str, answer: ChatMessage, variables: JsonObject) -> str:
        """Return the prompt with the answer behind it, without the end of the turn, as the template shows it last."""
        ended = variables | _ENDED
        text = self._text([_USER, answer], ended)
        if self._text([_USER], ended) == prompt:  # the template may begin a turn in any case
            text = text.removesuffix(common_suffix(text, prompt))
        end = self._text([_USER, _PLAIN], ended).rpartition(_CONTENT)[2]
        return text.removesuffix(end).rstrip()

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


def _sentinels(answer: ChatMessage, *, begins: bool) -> list[str]:
    """Return the texts by which an answer is shown. `begins`: it begins with the prompt. If it does not, the template
    may leave out its thought."""
    texts = [answer.text, _VALUE * bool(calls_of(answer)), _THOUGHT * (begins and "reasoning_content" in answer.more)]
    return list(filter(None, texts))
