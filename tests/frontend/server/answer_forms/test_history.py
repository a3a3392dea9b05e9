"""What a template makes of an answer in the next prompt is as its source says, and the first difference is named."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tokenloom.frontend.forms.answer_forms.form import AnswerForm
from tokenloom.frontend.server.answer_forms.choose import choose
from tokenloom.frontend.server.answer_forms.history import ANSWERS, Turn, check_history
from tokenloom.frontend.server.text.chat_template import ChatTemplate
from tokenloom.ipc.codec import JsonObject
from tokenloom.ipc.messages.client import ChatForm, ChatMessage
from tokenloom.tests.support.template_shapes import SHAPES, template_of

SIGNS = {"found": "+", "lost": "-", "not shown": "."}
WITHOUT_THOUGHTS, SPLIT_WITHOUT_THOUGHTS, THOUGHTS_ALONE_LOST = "++.+.", "+-.+.", "..-.-"
OTHERWISE = {  # by reading the templates; the others find each of ANSWERS
    "object/hermes_thoughts": "++++-",  # the next question drops earlier thoughts
    "json/place_and_thoughts": "++++-",  # likewise, in the last turn too
    "object/hermes": WITHOUT_THOUGHTS,
    "object/name_as_key": WITHOUT_THOUGHTS,
    "object/calls_as_turn": WITHOUT_THOUGHTS,
    "object/single_call": WITHOUT_THOUGHTS,
    "json/place_in_name": WITHOUT_THOUGHTS,
    "json/function_tag": WITHOUT_THOUGHTS,
    "tagged/lines": WITHOUT_THOUGHTS,
    "literal/lines": WITHOUT_THOUGHTS,
    "odd/recipient_in_prompt": "--.-.",  # its form is unknown, so that the recipient is content
    "odd/printed_messages": "++++.",
    "object/line_breaks_between": SPLIT_WITHOUT_THOUGHTS,
    "object/signatures": SPLIT_WITHOUT_THOUGHTS,
    "json/marker_and_id": SPLIT_WITHOUT_THOUGHTS,
    "odd/bare_object": WITHOUT_THOUGHTS,  # behind text an object is text
    "object/indented_ids": "+-+++",  # text beside calls becomes a turn of its own
    "object/thought_before_calls": "+-+--",  # the prompt holds an empty thought, which turns without calls do not have
    "tagged/invokes": "..+.+",  # each prompt opens a thought, so that no answer is without one
    "literal/quoted_by_marker": "--+--",  # without thoughts the prompt has an empty one, and no turn has it
    "object/list_with_ids": "..-.+",  # the prompt opens a thought; calls are shown without it
    "object/json_list": THOUGHTS_ALONE_LOST,  # the prompt opens a thought, and no turn shows it
    "json/code_fence": THOUGHTS_ALONE_LOST,
    "thoughts/in_the_prompt": THOUGHTS_ALONE_LOST,
    "odd/repeated_instruction": "-----",  # the prompt repeats an instruction that no turn shows
    "object/call_ids": "-----",  # the tools move to the last question
    "thoughts/shown_without_calls": "...++",
    "thoughts/tools_without_calls": "...+-",
    "thoughts/no_tools": "...+.",
    "odd/own_variable": ".....",
}


def history(name: str) -> dict[str, Turn]:
    """The fates of ANSWERS, read by the form that is chosen for a template."""
    template = ChatTemplate(template_of(name), {"bos_token": "<s>", "eos_token": "</s>"})

    def render(messages: Sequence[ChatMessage], variables: JsonObject) -> str:
        return template.render(messages, ChatForm(variables=variables))

    def keeps_text() -> bool:
        return template.keeps_text(template.source)

    choice = choose(render, template.source, keeps_text=keeps_text)
    turns = check_history(render, choice.form, keeps_text=keeps_text)
    assert choice.lost_prefix == next((turn.lost for turn in turns.values() if turn.lost), None)
    return turns


def outcomes(turns: dict[str, Turn]) -> str:
    assert list(turns) == list(ANSWERS)
    return "".join(SIGNS[turn.outcome] for turn in turns.values())


@pytest.mark.parametrize("name", SHAPES)
def test_an_answer_is_found_lost_or_not_shown_as_the_table_says(name: str) -> None:
    assert outcomes(history(name)) == OTHERWISE.get(name, "+++++")


def test_the_first_difference_is_named() -> None:
    lost = history("object/hermes_thoughts")["thought and text"].lost
    assert lost is not None and lost.answer == "thought and text"
    assert lost.before.endswith("assistant\n") and lost.generated.startswith("<think>\nZhthought")
    assert lost.next_prompt.startswith("Zhcontent") and lost.variables == {}
    assert "\n" not in str(lost)


def test_a_template_is_rendered_a_bounded_number_of_times() -> None:
    count = 0

    def render(messages: Sequence[ChatMessage], variables: JsonObject) -> str:
        nonlocal count
        count += 1
        return f"{count}: " + "".join(f"{each.text}{each.more}" for each in messages)

    check_history(render, AnswerForm())
    assert 5 < count <= 50
