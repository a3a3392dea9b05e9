"""History: whether the prompt of a turn begins with the prompt and the answer of the turn before.

If it does, a prefix cache finds both. It does not if the template shows an answer otherwise once others follow it: some
drop the thoughts of earlier turns, or move the tools to the last question. Knows no server and no form of answers: an
answer counts as written in the text that the template shows at the end of a chat.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, TypeAlias

from ....ipc.codec import JsonObject
from ....ipc.errors import RequestError
from ....ipc.messages.client import ChatMessage
from ..text.calls import calls_of
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
_SCHEMA: JsonObject = {  # with all fields, which some templates need
    "type": "object",
    "properties": {"zh_key": {"type": "string", "description": "text"}},
    "required": ["zh_key"],
    "additionalProperties": False,
    "description": "arguments",
}
_TOOLS = [{"type": "function", "function": {"name": _NAME, "description": "a function", "parameters": _SCHEMA}}]
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


class Turn(NamedTuple):
    """The fate of an answer in the prompt of the next turn. If it is lost, the texts from the first difference on,
    and the one before it."""

    outcome: Outcome
    before: str = ""
    wrote: str = ""
    shows: str = ""

    def __str__(self) -> str:
        if self.outcome != "lost":
            return self.outcome
        return f"behind {self.before!r} was {self.wrote!r}, the next prompt has {self.shows!r}"


def check_history(render: Render) -> dict[str, Turn]:
    """Return the fate of each of ANSWERS. `render(messages, variables)` returns a template's text; RequestError if
    it refuses them. Takes up to 3 renderings an answer and setting, 45 in all."""
    return {name: _turn(render, answer) for name, answer in ANSWERS.items()}


def first_difference(render: Render) -> str:
    """Return a line about the first of ANSWERS that the next prompt shows otherwise; empty if there is none."""
    for name, turn in check_history(render).items():
        if turn.outcome == "lost":
            return f"{name}: {turn}"
    return ""


def _turn(render: Render, answer: ChatMessage) -> Turn:
    """Return the fate of an answer with the first variables for which it is shown and begins with the prompt; else
    with the first for which it begins so, or with none."""
    found = [_turn_with(render, answer, variables) for variables in _SETTINGS["reasoning_content" in answer.more]]
    begun = [turn for begins, turn in found if begins]
    shown = [turn for turn in begun if turn.outcome != "not shown"]
    return [*shown, *begun, found[0][1]][0]


def _turn_with(render: Render, answer: ChatMessage, variables: JsonObject) -> tuple[bool, Turn]:
    """Return whether the answer, as the template shows it, begins with the prompt, and its fate."""
    next_message = _USER
    if calls_of(answer):
        next_message = _RESULT
    try:
        prompt = render([_USER], variables | _PROMPT)
        generated = _generated(render, prompt, answer, variables)
        next_prompt = render([_USER, answer, next_message], variables | _PROMPT)
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
    before = expected[max(0, place - NUM_SHOWN // 2) : place]
    return begins, Turn("lost", before, expected[place:end], next_prompt[place:end])


def _sentinels(answer: ChatMessage, *, begins: bool) -> list[str]:
    """Return the texts by which an answer is shown. `begins`: it begins with the prompt. If it does not, the template
    may leave out its thought."""
    texts = [answer.text, _VALUE * bool(calls_of(answer)), _THOUGHT * (begins and "reasoning_content" in answer.more)]
    return list(filter(None, texts))


def _generated(render: Render, prompt: str, answer: ChatMessage, variables: JsonObject) -> str:
    """Return the prompt with the answer behind it, without the end of the turn, as the template shows it last."""
    ended = variables | _ENDED
    text = render([_USER, answer], ended)
    if render([_USER], ended) == prompt:  # the template may begin a turn in any case
        text = text.removesuffix(common_suffix(text, prompt))
    end = render([_USER, _PLAIN], ended).rpartition(_CONTENT)[2]
    return text.removesuffix(end).rstrip()
