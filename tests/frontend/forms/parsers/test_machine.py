"""One machine reads calls of all kinds, loses no word, and finds the same parts wherever the text is cut."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenloom.frontend.forms.answer_forms.form import AnswerForm, CallForm
from tokenloom.frontend.forms.parsers.machine import AnswerMachine
from tokenloom.frontend.forms.parsers.parts import CallBegin, Parser
from tokenloom.ipc.codec import JsonObject
from tokenloom.tests.frontend.forms.parsers.cuts import check_cuts, cut, parse, parts_of

SCHEMAS: dict[str, JsonObject] = {
    "add": {"properties": {"a": {"type": "integer"}, "s": {"type": "string"}, "o": {"type": "object"}}}
}
THOUGHT = ("<think>\n", "\n</think>\n\n")
OBJECT = CallForm(
    kind="object",
    start="\n<calls>\n",
    next="\n",
    end="\n</calls>",
    name_path=("function", "name"),
    arguments_path=("function", "arguments"),
    id_path=("id",),
)
KEYED = CallForm(kind="object", start="<|calls|>[", next=", ", end="]<|done|>")
JSON = CallForm(
    kind="json",
    start="<|section|><|call|>functions.",
    next="<|end|><|call|>functions.",
    end="<|end|><|section_end|>",
    mid=":{INDEX}<|args|>",
    id_text="functions.{NAME}:{INDEX}",
)
TAGGED = CallForm(
    kind="tagged",
    start="\n<call>",
    first="\n<key>",
    mid="</key>\n<value>",
    pair="</value>\n<key>",
    next="</value>\n</call>\n<call>",
    end="</value>\n</call>",
    empty_next="\n</call>\n<call>",
    empty_end="\n</call>",
)
TYPED = CallForm(
    kind="tagged",
    start='<invoke name="',
    first='">\n<p name="',
    mid_by_type={"string": '" string="true">', "other": '" string="false">'},
    pair='</p>\n<p name="',
    next='</p>\n</invoke>\n<invoke name="',
    end="</p>\n</invoke>",
    empty_next='">\n</invoke>\n<invoke name="',
    empty_end='">\n</invoke>',
)
LITERAL = CallForm(
    kind="literal",
    start="<|call>call:",
    next="<call|><|call>call:",
    end="<call|>",
    mid="{",
    assign=":",
    pair=",",
    close="}",
    quote='<|"|>',
)
FORMS = {
    "object": OBJECT,
    "keyed": KEYED,
    "json": JSON,
    "tagged": TAGGED,
    "typed": TYPED,
    "literal": LITERAL,
}
ANSWERS = {  # two calls, add(a=1, s="x <y>") and now(), as each form writes them
    "object": '\n<calls>\n{"id": "c1", "function": {"name": "add", "arguments": {"a": 1, "s": "x <y>"}}}\n'
    '{"id": "c2", "function": {"name": "now", "arguments": {}}}\n</calls>',
    "keyed": '<|calls|>[{"add": {"a": 1, "s": "x <y>"}}, {"now": {}}]<|done|>',
    "json": '<|section|><|call|>functions.add:0<|args|>{"a": 1, "s": "x <y>"}<|end|><|call|>functions.now:1<|args|>{}'
    "<|end|><|section_end|>",
    "tagged": "\n<call>add\n<key>a</key>\n<value>1</value>\n<key>s</key>\n<value>x <y></value>\n</call>\n"
    "<call>now\n</call>",
    "typed": '<invoke name="add">\n<p name="a" string="false">1</p>\n<p name="s" string="true">x <y></p>\n</invoke>\n'
    '<invoke name="now">\n</invoke>',
    "literal": '<|call>call:add{a:1,s:<|"|>x <y><|"|>}<call|><|call>call:now{}<call|>',
}
CALLS = [("add", {"a": 1, "s": "x <y>"}), ("now", {})]
PLACES = st.lists(st.integers(0, 10_000), max_size=8)


def new_machine(name: str, *, is_inside: bool = False) -> Parser:
    return AnswerMachine(AnswerForm(thought=THOUGHT, calls=(FORMS[name],)), SCHEMAS, is_inside_thought=is_inside)


@pytest.mark.parametrize("name", FORMS)
@given(places=PLACES)
def test_calls_behind_a_thought_and_content_are_read(name: str, places: Sequence[int]) -> None:
    text = f"<think>\nwhy\n</think>\n\nI look.{ANSWERS[name]}"
    assert parse(new_machine(name), cut(text, places)) == ("why", "I look.", CALLS)
    assert parse(new_machine(name), list(text)) == ("why", "I look.", CALLS)


@pytest.mark.parametrize("name", FORMS)
def test_white_space_in_joints_may_differ(name: str) -> None:
    text = ANSWERS[name].replace(">\n<", ">  \n\n<").replace("\n<", "<")
    assert parse(new_machine(name), [text])[1:] == ("", CALLS)


@pytest.mark.parametrize("name", FORMS)
@given(data=st.data())
def test_the_parts_of_a_text_are_the_same_wherever_it_is_cut(name: str, data: st.DataObject) -> None:
    answer = ANSWERS[name]
    edges = sorted(data.draw(st.lists(st.integers(0, len(answer)), min_size=2, max_size=2)))
    pieces = [answer, answer[: edges[0]], answer[edges[0] : edges[1]], answer[edges[1] :], "<think>", "</think>"]
    text = "".join(data.draw(st.lists(st.sampled_from([*pieces, "\n", " so ", "<", "{", '"', "]"]), max_size=8)))
    check_cuts(lambda: new_machine(name), text, data.draw(PLACES))
    check_cuts(lambda: new_machine(name), text, range(len(text)))


@pytest.mark.parametrize("name", FORMS)
def test_an_answer_that_is_cut_off_has_only_whole_calls(name: str) -> None:
    for edge in range(1, len(ANSWERS[name])):
        text = ANSWERS[name][:edge]
        _, content, calls = parse(new_machine(name), [text])
        assert calls == CALLS[: len(calls)], text
        assert calls or content.strip() == text.strip(), text


@pytest.mark.parametrize("name", FORMS)
def test_a_start_inside_a_thought_ends_the_thought(name: str) -> None:
    assert parse(new_machine(name, is_inside=True), [f"why{ANSWERS[name]}"]) == ("why", "", CALLS)


@pytest.mark.parametrize("name", FORMS)
def test_the_rest_of_an_end_may_be_missing(name: str) -> None:
    text = ANSWERS[name].removesuffix("<|section_end|>").removesuffix("<|done|>")
    assert parse(new_machine(name), [f"{text} Done."]) == ("", " Done.", CALLS)


def test_a_closer_without_a_thought_is_dropped_at_the_begin_alone() -> None:
    assert parse(new_machine("json"), ["</think>\n\nso </think>"]) == ("", "so </think>", [])


def test_a_call_keeps_the_id_that_the_model_wrote() -> None:
    ids = {"object": ["c1", "c2"], "json": ["functions.add:0", "functions.now:1"]}
    for name, expected in ids.items():
        parts = parts_of(new_machine(name), list(ANSWERS[name]))
        assert [part.id for part in parts if isinstance(part, CallBegin)] == expected


def test_joints_with_an_id_are_read() -> None:
    form = CallForm(
        kind="json", start="<|calls|><|id|>{ID}<|name|>", next="<|id|>{ID}<|name|>", end="<|end|>", mid="<|args|>"
    )
    text = '<|calls|><|id|>a_1<|name|>f<|args|>{}<|id|>b-2<|name|>g<|args|>{"x": 1}<|end|>'
    parts = parts_of(AnswerMachine(AnswerForm(calls=(form,)), {}), list(text))
    assert [(part.name, part.id) for part in parts if isinstance(part, CallBegin)] == [("f", "a_1"), ("g", "b-2")]


def test_a_value_may_be_a_cdata_section_and_hold_its_closer() -> None:
    text = "<call>add<key>s</key><value><![CDATA[a </value>\n b]]></value></call>"
    assert parse(new_machine("tagged"), list(text)) == ("", "", [("add", {"s": "a </value>\n b"})])


def test_values_are_typed_by_the_schema_and_may_be_python() -> None:
    text = "<call>add<key>s</key><value>12</value><key>o</key><value>{'b': [True, None]}</value></call>"
    assert parse(new_machine("tagged"), [text])[2] == [("add", {"s": "12", "o": {"b": [True, None]}})]


def test_content_may_follow_calls_and_a_header_before_it_is_dropped() -> None:
    form = AnswerForm(thought=("<|think|>", "<|end|>"), content_open="<|begin|><|content|>", calls=(JSON,))
    text = f"<|think|>why<|end|><|begin|><|content|>I look.{ANSWERS['json']} Done."
    assert parse(AnswerMachine(form, SCHEMAS), list(text)) == ("why", "I look. Done.", CALLS)


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ('a:{b:<|"|>x, }<|"|>,c:[1,true,null]}', {"a": {"b": "x, }", "c": [1, True, None]}}),
        ('<|"|>a<|"|>:-2.5', {"a": -2.5}),
    ],
)
def test_literals_are_nested(text: str, arguments: JsonObject) -> None:
    assert parse(new_machine("literal"), list(f"<|call>call:f{{{text}}}<call|>")) == ("", "", [("f", arguments)])


def test_texts_in_python_calls_may_hold_line_breaks_and_quotes() -> None:
    form = CallForm(
        kind="literal", start="<|c|>[", next=", ", end="]<|e|>", mid="(", assign="=", pair=", ", close=")", quote='"'
    )
    value = 'one\ntwo "three" \\n'
    text = '<|c|>[f(a="one\ntwo "three" \\\\n", b=[\'x\', 2])]<|e|>'
    parsed = parse(AnswerMachine(AnswerForm(calls=(form,)), {}), list(text))
    assert parsed == ("", "", [("f", {"a": value, "b": ["x", 2]})]), json.dumps(parsed)


def in_section(*calls: str) -> str:
    """Return calls of a turn, each between its own markers, in a section."""
    return "<|calls|>" + "".join(f"<|call|>{each}<|args|>{{}}<|end|>" for each in calls) + "<|/calls|>"


@pytest.mark.parametrize(
    ("calls", "names"),
    [
        (("no.0", "f:1"), ["f"]),
        (("no.0", "no.1", "f:2", "g:3"), ["f", "g"]),
        (("f:0", "no.1", "g:2"), ["f", "g"]),
        (("no.0",), []),
    ],
)
def test_a_call_that_fails_hides_no_further_one(calls: tuple[str, ...], names: list[str]) -> None:
    start, following, end = "<|calls|><|call|>", "<|end|><|call|>", "<|end|><|/calls|>"
    form = CallForm(kind="json", start=start, next=following, end=end, mid=":{INDEX}<|args|>")
    for pieces in ([in_section(*calls)], list(in_section(*calls))):
        _, content, found = parse(AnswerMachine(AnswerForm(calls=(form,)), {}), pieces)
        assert [name for name, _ in found] == names
        assert all(each in content for each in calls if each.startswith("no"))
