"""The input of a custom tool is text, however the model's JSON for it is written and cut."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenloom.frontend.forms.parsers.custom import InputText
from tokenloom.frontend.forms.parsers.parts import CallBegin, CallEnd, CustomBegin, CustomInput, Part
from tokenloom.tests.frontend.forms.parsers.cuts import cut, joined, read_deltas


def said(pieces: list[str]) -> str:
    reader = InputText()
    return "".join(map(reader.append, pieces)) + reader.finish()


@given(st.text(), st.booleans(), st.lists(st.integers(0, 200), max_size=8))
def test_an_input_is_the_text_that_json_reads(text: str, is_ascii: bool, places: list[int]) -> None:
    written = json.dumps({"input": text}, ensure_ascii=is_ascii)
    assert said(cut(written, places)) == text


@pytest.mark.parametrize(
    ("written", "text"),
    [
        (r'{"input": "\d+\q"}', "d+q"),
        (r'{"input": "a\ud83dz\udc00"}', "a\ufffdz\ufffd"),
        (r'{"input": "\ud83d\n"}', "\ufffd\n"),
        ('{"input": "to', "to"),
        ('{"input": "to\\', "to"),
        ('{"query": "to"}', '{"query": "to"}'),
        ('{"input": 5}', '{"input": 5}'),
        ("", ""),
    ],
)
def test_no_text_of_a_model_fails(written: str, text: str) -> None:
    assert said([written]) == said(list(written)) == text


def parts_of(pieces: list[str], **style: object) -> list[Part]:
    return [part for parts in read_deltas(pieces, **style) for part in parts]


ANSWER = (
    '<tool_call>{"name": "c", "arguments": {"input": "a\\n\\"b\\""}}</tool_call>'
    '<tool_call>{"name": "f", "arguments": {"input": "x"}}</tool_call>'
)


@given(st.lists(st.integers(0, 200), max_size=8))
def test_calls_of_custom_tools_are_told_from_those_of_functions(places: list[int]) -> None:
    found = joined(parts_of(cut(ANSWER, places), custom_names=frozenset("c")))
    inputs = "".join(text for kind, text in found if kind == "CustomInput")
    kinds = [each for each in found if each[0] not in ("CustomInput", "Content")]
    assert inputs == 'a\n"b"'
    assert kinds == [
        *(("CustomBegin", "c"), ("CallEnd", "")),
        *(("CallBegin", "f"), ("Arguments", '{"input": "x"}'), ("CallEnd", "")),
    ]


def test_a_forced_input_with_a_grammar_is_the_whole_answer() -> None:
    style = {"is_forced": True, "is_text": True, "forced_name": "c", "custom_names": frozenset("c")}
    begin, *inputs, end = parts_of(['{"in', 'put": 1}'], **style)
    assert isinstance(begin, CustomBegin) and isinstance(begin, CallBegin) and isinstance(end, CallEnd)
    assert inputs == [CustomInput('{"in'), CustomInput('put": 1}')]
