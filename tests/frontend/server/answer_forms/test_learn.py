"""Forms learned from chat templates are those that were read from the templates by hand."""

from __future__ import annotations

import time

import msgspec
import pytest

from tests.core.features.grammar.matching import COMPILER, TOKENIZER
from tests.support.template_shapes import SHAPES, template_of
from tokenloom.frontend.forms.answer_forms.form import AnswerForm, CallForm
from tokenloom.frontend.forms.answer_forms.grammar import forced_calls
from tokenloom.frontend.server.answer_forms import renderings
from tokenloom.frontend.server.answer_forms.learn import UnknownForm, learn
from tokenloom.frontend.server.answer_forms.probe import NAMES, THOUGHT, ProbeAnswer, ProbeCall, schemas
from tokenloom.frontend.server.answer_forms.renderings import SETTINGS, HostileTemplate, Renderings
from tokenloom.frontend.server.answer_forms.thoughts import learn_thoughts
from tokenloom.frontend.server.text.chat_template import ChatTemplate
from tokenloom.ipc.messages.client import ChatForm

SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
MAX_RENDERS = 150
LEARNED = [name for name, shape in SHAPES.items() if shape.kind]
UNKNOWN = ["odd/bare_object", "odd/recipient_in_prompt", "odd/own_variable", "odd/printed_messages"]


def renderings_of(source: str) -> Renderings:
    template = ChatTemplate(source, SPECIAL_TOKENS)
    return Renderings(lambda messages, variables: template.render(messages, ChatForm(variables=variables)))


def learned(name: str) -> AnswerForm:
    shown = renderings_of(template_of(name))
    return learn(shown, learn_thoughts(shown))


def squeezed(text: str) -> str:
    return "".join(text.split())


@pytest.mark.parametrize("name", LEARNED)
def test_form_of_calls_is_the_one_read_by_hand(name: str) -> None:
    calls = learned(name).calls[0]
    assert calls.kind == SHAPES[name].kind
    assert squeezed(calls.start).endswith(SHAPES[name].begin)


@pytest.mark.parametrize("name", LEARNED)
def test_learning_takes_few_renderings(name: str) -> None:
    shown = renderings_of(template_of(name))
    learn(shown, learn_thoughts(shown))
    assert shown.num_renders <= MAX_RENDERS


@pytest.mark.parametrize("name", ["json/marker_and_id", "object/call_ids"])
def test_ids_of_a_template_that_refuses_others_have_nine_characters(name: str) -> None:
    calls = learned(name).calls[0]
    assert calls.id_path or "{ID}" in calls.mid
    assert calls.id_pattern == "[A-Za-z0-9]{9}"


def test_a_template_that_takes_any_id_leaves_the_pattern() -> None:
    source = template_of("object/call_ids").replace("or call.id | length != 9 ", "")
    shown = renderings_of(source)
    assert (
        learn(shown, learn_thoughts(shown)).calls[0].id_pattern
        == CallForm(kind="json", start="", next="", end="").id_pattern
    )


@pytest.mark.parametrize("name", UNKNOWN)
def test_calls_without_a_marker_of_their_own_have_no_form(name: str) -> None:
    with pytest.raises(UnknownForm):
        learned(name)


@pytest.mark.parametrize(
    ("name", "headers"),
    [("json/headers_between", "<|end|><|begin|>assistant"), ("tagged/recipients", "<|eom|><|start|>assistant ")],
)
def test_headers_between_content_and_calls_are_part_of_a_second_start(name: str, headers: str) -> None:
    alone, behind_content = learned(name).calls
    assert behind_content == msgspec.structs.replace(alone, start=headers + alone.start)


@pytest.mark.parametrize("name", [name for name in LEARNED if SHAPES[name].thought])
def test_forced_calls_admit_the_white_space_that_the_template_shows_before_a_thought(name: str) -> None:
    shown = renderings_of(template_of(name))
    form = learn(shown, learn_thoughts(shown, [("<think>", "</think>")]))
    texts = (shown.text_of(ProbeAnswer(thought=THOUGHT, calls=(ProbeCall(NAMES[0], {}),)), each) for each in SETTINGS)
    begin = next((each for each in texts if THOUGHT in each), "").partition(THOUGHT)[0]
    params = forced_calls(form, schemas(), has_one_call=False, may_think=True)

    def num_accepted(text: str) -> int:
        ids = [each for letter in text for each in TOKENIZER.encode(letter, add_special_tokens=False).ids]
        return COMPILER.compile(params.kind, params.text).inner.try_consume_tokens(ids)

    assert form.thought is not None
    space = begin[: len(begin) - len(begin.lstrip())]
    begun = f"{space}{form.thought[0]}Hm."
    assert num_accepted(begun) == len(begun), begin
    assert num_accepted("\n" * 9) < 9, "white space is bounded"


def test_joint_counts_calls_as_the_template_does() -> None:
    calls = learned("tagged/typed_and_counted").calls[0]
    assert "{NUMBER}" in calls.first or "{INDEX}" in calls.first
    assert len(calls.mid_by_type) > 2


@pytest.mark.parametrize("name", [name for name in LEARNED if not name.startswith("odd")])
def test_nothing_stands_between_calls_where_a_turn_shows_one(name: str) -> None:
    assert (learned(name).calls[0].next == "") == (SHAPES[name].most_calls == 1)


def test_text_of_an_object_that_counts_calls_is_a_place() -> None:
    shape = learned("object/indented_ids").calls[0].shape
    assert shape.startswith('{"tool_call_id": "{INDEX}", "tool_name": "')


def test_template_that_writes_without_end_is_hostile() -> None:
    source = "{% for a in range(1000) %}{{ 'x' * 2000 }}{% endfor %}{{ messages[0].content }}"
    with pytest.raises(HostileTemplate, match="characters"):
        renderings_of(source)


def test_slow_template_is_hostile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(renderings, "MAX_RENDER_S", 0.0)
    started = time.process_time()
    with pytest.raises(HostileTemplate, match="more than 0 s"):
        renderings_of("{{ messages[0].content }}")
    assert time.process_time() - started < 60
