"""The templates of the tests: each is in the table, and its form of earlier turns is the one read from it by hand."""

from __future__ import annotations

import contextlib

import pytest

from tests.support.template_shapes import FOLDER, SHAPES, template_of
from tokenloom.frontend.server.text.chat_template import ChatTemplate
from tokenloom.ipc.errors import RequestError
from tokenloom.ipc.messages.client import ChatForm, ChatMessage

SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
USER = ChatMessage("user", "Where?")


def test_table_has_every_template() -> None:
    files = sorted(path.relative_to(FOLDER).with_suffix("").as_posix() for path in FOLDER.rglob("*.jinja"))
    assert files == sorted(SHAPES)


@pytest.mark.parametrize("name", SHAPES)
def test_form_of_earlier_turns_is_as_the_table_says(name: str) -> None:
    template = ChatTemplate(template_of(name), SPECIAL_TOKENS)
    assert template._turn_shape(template._template, as_parts=False) == SHAPES[name].history


@pytest.mark.parametrize("name", SHAPES)
def test_prompts_open_a_thought_where_the_table_says_so(name: str) -> None:
    template = ChatTemplate(template_of(name), SPECIAL_TOKENS)
    prompts = []
    for variables in ({}, {"enable_thinking": True}, {"thinking": True}):
        with contextlib.suppress(RequestError):
            prompts.append("".join(template.render([USER], ChatForm(variables=variables)).split()))
    opening = (SHAPES[name].thought or ("\0",))[0]
    assert any(prompt.endswith(opening) for prompt in prompts) == SHAPES[name].has_prompt
