"""Answers written by hand are read by the form that is learned from the template of their model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.frontend.forms.parsers.cuts import PLACES, cut, joined
from tests.support.template_answers import ANSWERS
from tests.support.template_shapes import SHAPES, template_of
from tokenloom.frontend.forms.answer_forms.form import AnswerForm
from tokenloom.frontend.forms.parsers.names import new_parsers
from tokenloom.frontend.forms.parsers.parts import (
    Arguments,
    CallBegin,
    CallEnd,
    Content,
    Part,
    Thought,
    parsed,
    whole_calls,
)
from tokenloom.frontend.server.answer_forms.learn import learn
from tokenloom.frontend.server.answer_forms.renderings import Renderings
from tokenloom.frontend.server.answer_forms.spaces import learn_spaces
from tokenloom.frontend.server.answer_forms.thoughts import learn_thoughts
from tokenloom.frontend.server.text.chat_template import ChatTemplate
from tokenloom.ipc.messages.client import ChatForm

SCHEMAS: dict[str, Any] = {
    "weather": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    "clock": {"type": "object", "properties": {}},
}
WEATHER = ("weather", {"city": "Paris", "days": 3})
CLOCK: tuple[str, dict[str, Any]] = ("clock", {})
WILD = 'a <b> & "c" \\ é'
SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
THOUGHTS = [name for name, answer in ANSWERS.items() if answer.thought]


@cache
def learned(name: str) -> AnswerForm:
    template = ChatTemplate(template_of(name), SPECIAL_TOKENS)
    shown = Renderings(lambda messages, variables: template.render(messages, ChatForm(variables=variables)))
    form = learn(shown, learn_thoughts(shown, [("<think>", "</think>")]))
    return msgspec.structs.replace(form, spaces=learn_spaces(shown, form.thought))


def parts_of(name: str, pieces: Sequence[str], *, is_inside: bool = False) -> list[Part]:
    parsers = new_parsers(learned(name), SCHEMAS, is_inside_thought=is_inside)
    parts: list[Part] = []
    for position, piece in enumerate(pieces):
        found: list[Part] = [Content(piece)]
        for parser in parsers:
            read: list[Part] = []
            for part in found:
                read += parser.append(part.text) if isinstance(part, Content) else [part]
            found = [*read, *parser.finish()] if position == len(pieces) - 1 else read
        parts += found
    return parts


def read(name: str, text: str, *, is_inside: bool = False) -> tuple[str, str, list[tuple[str, Any]]]:
    """Return the thought, the content and the calls of an answer, texts without white space around them."""
    parts = parts_of(name, [text], is_inside=is_inside)
    content, calls = whole_calls(parts)
    thought = "".join(part.text for part in parts if isinstance(part, Thought))
    return thought.strip(), content.strip(), [(call.name, json.loads(call.arguments)) for call in calls]


@pytest.mark.parametrize("name", ANSWERS)
def test_one_call(name: str) -> None:
    assert read(name, ANSWERS[name].one) == ("", "", [WEATHER])


@pytest.mark.parametrize("name", [name for name, answer in ANSWERS.items() if answer.two])
def test_two_calls(name: str) -> None:
    assert read(name, ANSWERS[name].two) == ("", "", [WEATHER, CLOCK])


@pytest.mark.parametrize("name", [name for name, answer in ANSWERS.items() if answer.cut])
def test_last_closing_marker_may_be_missing(name: str) -> None:
    assert read(name, ANSWERS[name].cut) == ("", "", [WEATHER])


@pytest.mark.parametrize("name", ANSWERS)
def test_calls_end_in_a_stream_with_their_closing_text(name: str) -> None:
    """Not only at the answer's end: a client may act on a call as soon as it is whole."""
    text = ANSWERS[name].two or ANSWERS[name].one
    parsers = new_parsers(learned(name), SCHEMAS, is_inside_thought=False)
    parts = [part for letter in text.rstrip() for part in parsed(parsers, letter, is_last=False)]
    content, calls = whole_calls(parts)
    assert (content.strip(), len(calls)) == ("", sum(isinstance(part, CallBegin) for part in parts)), parts
    assert [call.name for call in calls] == ["weather", "clock"][: 1 + bool(ANSWERS[name].two)]
    assert not [part for part in parsed(parsers, "", is_last=True) if isinstance(part, Arguments | CallEnd)]


@pytest.mark.parametrize("name", ANSWERS)
def test_answer_that_ends_in_a_value_has_no_call(name: str) -> None:
    text = ANSWERS[name].one.partition("ris")[0]
    assert read(name, text) == ("", text.strip(), [])


@pytest.mark.parametrize("name", ANSWERS)
def test_white_space_may_differ(name: str) -> None:
    assert read(name, ANSWERS[name].loose) == ("", "", [WEATHER])


@pytest.mark.parametrize("name", ANSWERS)
def test_text_before_a_call_is_content(name: str) -> None:
    answer = ANSWERS[name]
    assert read(name, answer.said + answer.one) == ("", "I look.", [WEATHER])


@pytest.mark.parametrize("name", ANSWERS)
def test_text_behind_calls_is_content(name: str) -> None:
    answer = ANSWERS[name]
    assert read(name, f"{answer.two or answer.one}\nDone.") == ("", "Done.", [WEATHER, CLOCK][: 2 if answer.two else 1])


@pytest.mark.parametrize("name", THOUGHTS)
def test_thought_before_a_call(name: str) -> None:
    answer, is_inside = ANSWERS[name], SHAPES[name].has_prompt
    assert read(name, answer.thought + answer.one, is_inside=is_inside) == ("Hm.", "", [WEATHER])


@pytest.mark.parametrize("name", THOUGHTS)
def test_thought_and_text_before_a_call(name: str) -> None:
    answer, is_inside = ANSWERS[name], SHAPES[name].has_prompt
    text = answer.thought + answer.said + answer.one
    assert read(name, text, is_inside=is_inside) == ("Hm.", "I look.", [WEATHER])


@pytest.mark.parametrize("name", ANSWERS)
def test_value_that_looks_like_markup_is_a_text(name: str) -> None:
    raw = SHAPES[name].kind in ("tagged", "literal")
    written = ANSWERS[name].one.replace("Paris", WILD if raw else json.dumps(WILD, ensure_ascii=False)[1:-1])
    assert read(name, written) == ("", "", [("weather", {"city": WILD, "days": 3})])


@pytest.mark.parametrize("name", [name for name, shape in SHAPES.items() if shape.ids == "own" and name in ANSWERS])
def test_call_keeps_its_own_id(name: str) -> None:
    (begin,) = (part for part in parts_of(name, [ANSWERS[name].one]) if isinstance(part, CallBegin))
    assert begin.id == "abcDEF123"


@given(st.sampled_from(sorted(ANSWERS)), st.data(), PLACES)
def test_cuts_change_nothing(name: str, data: st.DataObject, places: list[int]) -> None:
    answer = ANSWERS[name]
    pieces = [answer.thought, answer.said, answer.one, answer.two, answer.cut, answer.loose, "Done. ", "<", "\n"]
    text = "".join(data.draw(st.lists(st.sampled_from(pieces), max_size=4)))
    is_inside = data.draw(st.booleans())
    whole = parts_of(name, [text], is_inside=is_inside)
    assert joined(parts_of(name, cut(text, places), is_inside=is_inside)) == joined(whole)
