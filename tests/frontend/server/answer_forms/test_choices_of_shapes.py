"""The form that is chosen for each template is the one that was read from it by hand, or none for the reason it has."""

from __future__ import annotations

from functools import cache

import pytest

from tests.support.template_shapes import SHAPES, template_of
from tokenloom.frontend.server.answer_forms.choose import Choice, choose
from tokenloom.frontend.server.answer_forms.probe import PROBES
from tokenloom.frontend.server.text.chat_template import ChatTemplate
from tokenloom.ipc.messages.client import ChatForm

FORMED = [name for name, shape in SHAPES.items() if shape.kind]


@cache
def choice_of(name: str) -> Choice:
    template = ChatTemplate(template_of(name), {"bos_token": "<s>", "eos_token": "</s>"})
    return choose(lambda messages, variables: template.render(messages, ChatForm(variables=variables)), template.source)


def squeezed(text: str) -> str:
    return "".join(text.split())


@pytest.mark.parametrize("name", FORMED)
def test_every_probe_that_is_shown_returns(name: str) -> None:
    choice = choice_of(name)
    assert choice.origin == "learned"
    assert [each.probe for each in choice.different] == ["nested values"] * SHAPES[name].has_minor
    assert choice.num_shown >= len(PROBES) - 1


@pytest.mark.parametrize("name", SHAPES)
def test_thought_is_the_pair_of_the_table(name: str) -> None:
    expected, found = SHAPES[name].thought, choice_of(name).form.thought
    if choice_of(name).form.reader == "harmony":
        return
    assert (found is None) == (expected is None)
    if found is not None and expected is not None:
        assert squeezed(found[0]).endswith(expected[0])
        assert squeezed(found[1]).startswith(expected[1])


@pytest.mark.parametrize("name", FORMED)
def test_ids_are_those_of_the_table(name: str) -> None:
    calls = choice_of(name).form.calls[0]
    is_own = "{ID}" in f"{calls.start}{calls.mid}{calls.first}" or bool(calls.id_path)
    assert is_own == (SHAPES[name].ids == "own")
    assert bool(calls.id_text) == (SHAPES[name].ids == "place")


@pytest.mark.parametrize("name", [name for name, shape in SHAPES.items() if shape.why])
def test_unknown_form_has_its_reason(name: str) -> None:
    choice = choice_of(name)
    assert choice.origin in ("unknown", "sign")
    assert SHAPES[name].why in choice.why
