"""What an API's client gets of an answer and sends back is rendered as the model wrote it, in every form of template.

Learned form → parts → each API → next prompt. Answers that a template itself shows otherwise in the next turn are left
out: tests/frontend/server/answer_forms/test_history.py lists them.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tokenloom.frontend.server.answer_forms.choose import choose
from tokenloom.frontend.server.answer_forms.history import ANSWERS, TOOL, check_history
from tokenloom.frontend.server.text.chat_template import ChatTemplate
from tokenloom.ipc.codec import JsonObject
from tokenloom.ipc.messages.client import ChatForm, ChatMessage
from tokenloom.tests.support.answer_chain import WAYS, Scene
from tokenloom.tests.support.template_shapes import SHAPES, template_of

SPACES = {"line": "{}\n", "empty line": "{}\n\n", "blank": "{} ", "line and blank before": "\n {}"}
SPACED = {  # answers with white space at the edges of their content, as far as the template keeps it
    f"{name}, {space}": ChatMessage("assistant", form.format(answer.text), answer.more)
    for name, answer in ANSWERS.items()
    for space, form in SPACES.items()
    if answer.text
}
NEVER_FOUND = {"object/json_list", "object/call_ids", "json/code_fence", "thoughts/in_the_prompt"} | {
    *("odd/repeated_instruction", "odd/recipient_in_prompt", "odd/own_variable")
}


@pytest.mark.parametrize("name", sorted(SHAPES.keys() - NEVER_FOUND))
def test_an_answer_that_comes_back_through_an_api_is_rendered_as_it_was_written(name: str) -> None:
    template = ChatTemplate(template_of(name), {"bos_token": "<s>", "eos_token": "</s>"})

    def render(messages: Sequence[ChatMessage], variables: JsonObject) -> str:
        return template.render(messages, ChatForm(variables=variables))

    form = choose(render, template.source).form
    turns = {each: turn for each, turn in check_history(render, form, ANSWERS | SPACED).items() if turn.text}
    spaced = {each: turn for each, turn in turns.items() if each in SPACED and turn.outcome == "lost"}
    assert not {each for each in spaced if turns[each.partition(",")[0]].outcome == "found"}, spaced
    found = {each: turn for each, turn in turns.items() if turn.outcome == "found"}
    assert found
    for each, turn in found.items():
        scene = Scene(
            form=form,
            text=turn.text,
            is_inside_thought=form.begins_in_thought(turn.prompt),
            function=TOOL["function"],
            variables=turn.variables,
        )
        for way, next_chat in WAYS.items():
            chat = next_chat(scene)
            prompt = template.render(chat.turns, chat.form)
            assert prompt.startswith(turn.prompt + turn.text), f"{each}, {way}"
