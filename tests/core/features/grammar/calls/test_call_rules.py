"""A constraint on calls accepts the calls of its tools in the model's own form, and no others."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from tokenloom.ipc.errors import RequestError
from tokenloom.ipc.params.call_form import CallForm
from tokenloom.ipc.params.calls_constraint import CallsConstraint
from tokenloom.ipc.params.structured_outputs import StructuredOutputsParams
from tokenloom.tests.core.features.grammar.matching import COMPILER, TOKENIZER

Schema = dict[str, Any]
WEATHER: Schema = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer", "minimum": 1, "maximum": 16},
        "unit": {"enum": ["celsius", "fahrenheit"]},
        "tags": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["city", "days"],
}
TOOLS: dict[str, Schema | None] = {"get_weather": WEATHER, "get": {"type": "object", "properties": {}}, "other": None}
OBJECT = CallForm(
    kind="object",
    start="<tool_call>\n",
    next="\n</tool_call>\n<tool_call>\n",
    end="\n</tool_call>",
    name_path=("name",),
    arguments_path=("arguments",),
)
JSON = CallForm(kind="json", start="[TOOL_CALLS]", next="[TOOL_CALLS]", end="", mid="[ARGS]")
TAGGED = CallForm(
    kind="tagged",
    start="<tool_call>\n<function=",
    first=">\n<parameter=",
    mid=">\n",
    pair="\n</parameter>\n<parameter=",
    next="\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=",
    end="\n</parameter>\n</function>\n</tool_call>",
    empty_next=">\n</function>\n</tool_call>\n<tool_call>\n<function=",
    empty_end=">\n</function>\n</tool_call>",
)
PYTHON = CallForm(kind="literal", start="[", next=", ", end="]", mid="(", assign="=", pair=", ", close=")", quote="'")
MARKED = CallForm(
    kind="literal",
    start="<|tool_call>call:",
    next="<tool_call|><|tool_call>call:",
    end="<tool_call|>",
    mid="{",
    assign=":",
    pair=",",
    close="}",
    quote='<|"|>',
    has_bare_keys=True,
)
FORMS = {"object": OBJECT, "json": JSON, "tagged": TAGGED, "python": PYTHON, "marked": MARKED}
ONE = {
    "object": '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo", "days": 3}}\n</tool_call>',
    "json": '[TOOL_CALLS]get_weather[ARGS]{"city": "Oslo", "days":3, "unit": "celsius"}',
    "tagged": "<tool_call>\n<function=get_weather>\n<parameter=city>\na </p or two\n</parameter>\n<parameter=days>\n"
    '12\n</parameter>\n<parameter=tags>\n["a"]\n</parameter>\n</function>\n</tool_call>',
    "python": r"[get_weather(city='O\'s', days=3, tags=['a', 'b'])]",
    "marked": '<|tool_call>call:get_weather{city:<|"|>Oslo "<|"|>,days:3,tags:[<|"|>a<|"|>]}<tool_call|>',
}
TWO = {
    "object": '<tool_call>\n{"name": "get", "arguments": {}}\n</tool_call>\n<tool_call>\n'
    '{"name": "other", "arguments": {"z": [1, {"a": null}]}}\n</tool_call>',
    "json": '[TOOL_CALLS]get[ARGS]{}[TOOL_CALLS]other[ARGS]{"a": {}}',
    "tagged": "<tool_call>\n<function=get>\n</function>\n</tool_call>\n<tool_call>\n<function=other>\n<parameter=q>\n"
    '{"a": [1]}\n</parameter>\n</function>\n</tool_call>',
    "python": "[get(), other(a={'x': None, 'y': [True, 1.5]})]",
    "marked": '<|tool_call>call:get{}<tool_call|><|tool_call>call:other{a:{x:<|"|>y<|"|>}}<tool_call|>',
}
WRONG = {
    "object": ['<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo", "days": 17}}\n</tool_call>'],
    "json": ['[TOOL_CALLS]get_weather[ARGS]{"days": 3, "city": "Oslo"}', "[TOOL_CALLS]got[ARGS]{}"],
    "tagged": [
        ONE["tagged"].replace("12", "0"),
        ONE["tagged"].replace("or two", "</parameter> or two"),
        ONE["tagged"].replace('"a"', '"</parameter>"'),
    ],
    "python": ["[get_weather(city='Oslo')]", "[get_weather(days=3, city='Oslo')]", "[get(a=1)]"],
    "marked": [ONE["marked"].replace("days:3", "days:99"), ONE["marked"].replace("city", "town")],
}


def accepts(constraint: CallsConstraint, text: str) -> bool:
    """Whether a text, one token for each character, conforms to a constraint."""
    matcher = COMPILER.compile("calls", constraint.to_text())
    ids = [each for letter in text for each in TOKENIZER.encode(letter, add_special_tokens=False).ids]
    return matcher.inner.try_consume_tokens(ids) == len(ids) and matcher.inner.is_accepting()


@pytest.mark.parametrize("name", FORMS)
def test_calls_in_the_form_are_accepted_and_others_are_not(name: str) -> None:
    constraint = CallsConstraint(form=FORMS[name], tools=TOOLS)
    assert accepts(constraint, ONE[name])
    assert accepts(constraint, TWO[name])
    for text in ("", "Hello", "Hello " + ONE[name], ONE[name] + "x", *WRONG[name]):
        assert not accepts(constraint, text), text


@pytest.mark.parametrize("name", FORMS)
def test_one_call_ends_the_answer(name: str) -> None:
    constraint = CallsConstraint(form=FORMS[name], tools=TOOLS, has_one_call=True)
    assert accepts(constraint, ONE[name])
    assert not accepts(constraint, TWO[name])


@pytest.mark.parametrize("name", ["object", "json", "tagged", "marked"])
def test_text_may_hold_anything_but_the_begin_of_a_call(name: str) -> None:
    constraint = CallsConstraint(form=FORMS[name], tools=TOOLS, has_text=True)
    for text in ("", "Hello", "Hello <tool", "a <b> [c]", ONE[name], "Hello " + ONE[name], "\n" + TWO[name]):
        assert accepts(constraint, text), text
    for wrong in WRONG[name]:
        assert not accepts(constraint, "Hello " + wrong), wrong


def test_text_goes_on_to_calls_of_each_form_and_holds_no_begin_of_any() -> None:
    short = CallForm(
        kind="tagged",
        start="<function=",
        first=">\n<parameter=",
        mid=">\n",
        pair="\n<parameter=",
        next="\n</function>\n<function=",
        end="\n</function>",
        empty_next=">\n</function>\n<function=",
        empty_end=">\n</function>",
    )
    ends = ("<parameter=", "</function>")
    constraint = CallsConstraint(form=TAGGED, others=(short,), value_ends=ends, tools=TOOLS, has_text=True)
    call = "<function=get_weather>\n<parameter=city>\nOslo{}\n<parameter=days>\n3\n</function>"
    for value in ("", " </p", "</function >"):
        assert accepts(constraint, "Hello <function =x " + call.format(value)), value
    assert accepts(constraint, "Hello " + ONE["tagged"])
    long = ONE["tagged"]
    wrong = (call.format(ends[1]), long.replace("or two", ends[0]), long.replace('"a"', f'"{ends[1]}"'))
    for text in ("<function=get_weather>", call.format("").replace("3", "99"), *wrong):
        assert not accepts(constraint, text), text
    marker = {"type": "array", "items": {"enum": ["</parameter>"]}}
    tools: dict[str, Schema | None] = {"f": {"type": "object", "properties": {"a": marker}, "required": ["a"]}}
    begin, end = "<tool_call>\n<function=f>\n<parameter=a>\n", "\n</parameter>\n</function>\n</tool_call>"
    constraint = CallsConstraint(form=TAGGED, tools=tools)
    assert accepts(constraint, f'{begin}["\\u003c/parameter>"]{end}')
    assert not accepts(constraint, f'{begin}["</parameter>"]{end}')


def test_white_space_in_a_marker_counts_as_any_or_none() -> None:
    form = msgspec.structs.replace(JSON, start='<function name="', next="", mid='">')
    constraint = CallsConstraint(form=form, tools=TOOLS, has_text=True)
    assert accepts(constraint, "Hello <function") and accepts(constraint, 'Hello <function name="get">{}')
    assert not accepts(constraint, 'Hello <function\n name="x') and not accepts(constraint, 'Hello <functionname="x')


def test_a_key_that_a_reader_would_cut_is_refused() -> None:
    for name in ("a>b", " a"):
        tools: dict[str, Schema | None] = {"f": {"type": "object", "properties": {name: {}}}}
        with pytest.raises(RequestError, match="cannot be written"):
            COMPILER.compile("calls", CallsConstraint(form=TAGGED, tools=tools).to_text())


@pytest.mark.parametrize("name", FORMS)
def test_a_thought_may_come_before_calls(name: str) -> None:
    constraint = CallsConstraint(form=FORMS[name], tools=TOOLS, thought=("<think>\n", "\n</think>\n\n"))
    assert accepts(constraint, ONE[name])
    assert accepts(constraint, f"<think>\nhm <b\n</think>\n\n{ONE[name]}")
    assert not accepts(constraint, f"<think>\nhm {ONE[name]}")


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("may_begin", [True, False])
def test_calls_begin_as_the_template_shows_it_unless_text_comes_before_them(name: str, *, may_begin: bool) -> None:
    constraint = CallsConstraint(form=FORMS[name], tools=TOOLS, may_begin_with_space=may_begin)
    assert accepts(constraint, ONE[name])
    assert accepts(constraint, f"\n\n{ONE[name]}") == may_begin


def tagged(schema: Schema, *values: str) -> list[bool]:
    """Return which of some values a form with tags accepts for the argument `a`."""
    tools: dict[str, Schema | None] = {"f": {"type": "object", "properties": {"a": schema}, "required": ["a"]}}
    begin, end = "<tool_call>\n<function=f>\n<parameter=a>\n", "\n</parameter>\n</function>\n</tool_call>"
    constraint = CallsConstraint(form=TAGGED, tools=tools)
    return [accepts(constraint, begin + value + end) for value in values]


def test_values_with_tags_conform_to_their_schemas() -> None:
    yes, no = True, False
    assert tagged({"type": "string"}, "", "x", '{"a": 1}', "17") == [yes] * 4
    assert tagged({"enum": ["red", "blue", 7, None]}, "red", "7", "null", "green", '"red"') == [yes, yes, yes, no, no]
    assert tagged({"type": "string", "pattern": "^a+$"}, "aa", "ab", "") == [yes, no, no]
    assert tagged({"type": "string", "pattern": "b|^c"}, "abc", "ca", "ac") == [yes, yes, no]
    assert tagged({"type": "string", "minLength": 2, "maxLength": 3}, "a", "ab", "abcd") == [no, yes, no]
    assert tagged({"type": "string", "format": "date"}, "2026-01-02", "2026-13-02") == [yes, no]
    assert tagged({"type": ["string", "null"]}, "null", "none") == [yes, yes]
    assert tagged({"type": "boolean"}, "true", "false", "1") == [yes, yes, no]
    assert tagged({"type": "number", "minimum": 0}, "0.5", "-0.5") == [yes, no]
    union = {"anyOf": [{"type": "integer", "minimum": 5}, {"type": "string"}]}
    assert tagged(union, "5", "x", "3") == [yes, yes, no]
    union = {"anyOf": [{"type": "object", "properties": {"b": {"type": "integer"}}}, {"type": "string"}]}
    assert tagged(union, '{"b": 1}', "x {", '{"b": "x"}') == [yes, yes, no]
    huge = {"type": "integer", "minimum": 9007199254740993}
    assert tagged(huge, "9007199254740993", "9007199254740992") == [yes, no]


def literal(schema: Schema, *values: str) -> list[bool]:
    """Return which of some values a form of Python's literals accepts for the argument `a`."""
    tools: dict[str, Schema | None] = {"f": {"type": "object", "properties": {"a": schema}, "required": ["a"]}}
    constraint = CallsConstraint(form=PYTHON, tools=tools)
    return [accepts(constraint, f"[f(a={value})]") for value in values]


def test_literal_values_conform_to_their_schemas() -> None:
    yes, no = True, False
    assert literal({"type": "string"}, "''", r"'it\'s'", '"x"', "x") == [yes, yes, no, no]
    assert literal({"enum": ["red", 7, None, [1, "b"]]}, "'red'", "7", "None", "[1, 'b']", "'x'") == [yes] * 4 + [no]
    assert literal({"type": "string", "pattern": "^a+$"}, "'aa'", "'ab'") == [yes, no]
    assert literal({"type": "string", "maxLength": 2}, "'ab'", "'abc'") == [yes, no]
    assert literal({"type": "boolean"}, "True", "false", "1") == [yes, yes, no]
    node = {"$ref": "#/$defs/node"}
    tree: Schema = {"type": "object", "properties": {"kids": {"type": "array", "items": node}}, "required": ["kids"]}
    tools: dict[str, Schema | None] = {
        "f": {"type": "object", "properties": {"a": node}, "required": ["a"], "$defs": {"node": tree}}
    }
    constraint = CallsConstraint(form=PYTHON, tools=tools)
    assert accepts(constraint, "[f(a={'kids': [{'kids': []}]})]")
    assert not accepts(constraint, "[f(a={'kids': [1]})]")
    named = {"type": "object", "patternProperties": {"^x_": {"type": "integer"}}, "additionalProperties": False}
    assert literal(named, "{}", "{'x_1': 1}", "{'y': 1}", "{'x_1': 'a'}") == [yes, yes, no, no]


@pytest.mark.parametrize("form", [OBJECT, JSON])
def test_numbers_in_json_are_within_float64(form: CallForm) -> None:
    counted = {"type": "object", "additionalProperties": {"type": "number"}, "minProperties": 1}
    free = {"type": "object", "properties": {"a": {}, "b": {"type": "array"}, "c": counted}, "required": ["a"]}
    union: Schema = {"anyOf": [{"type": "number"}, {"type": "string"}]}
    tools: dict[str, Schema | None] = {
        "number": {"type": "object", "properties": {"a": {"type": "number"}}},
        "union": {"type": "object", "properties": {"a": union}},
        "free": free,
        "other": None,
    }
    constraint = CallsConstraint(form=form, tools=tools)

    def takes(name: str, arguments: str) -> bool:
        written = f'{{"name": "{name}", "arguments": {arguments}}}'
        text = f"{form.start}{name}{form.mid}{arguments}{form.end}" if form is JSON else form.start + written + form.end
        return accepts(constraint, text)

    shapes = {
        "number": ['{"a": N}'],
        "union": ['{"a": N}'],
        "free": ['{"a": N}', '{"a": [1, {"x": N}]}', '{"a": null, "b": ["x", N]}'],
        "other": ['{"a": N}', '{"a": {"b": [N]}}'],
    }
    for name, each in [(name, each) for name, some in shapes.items() for each in some]:
        for number in ("1e5", "-2.5E-7", "17"):
            assert takes(name, each.replace("N", number)), (name, each, number)
        for number in ("308e2086171020", "1e999", "5e309"):
            assert not takes(name, each.replace("N", number)), (name, each, number)
    assert takes("free", '{"a": "x", "c": {"k": 2.5}}')
    assert not takes("free", '{"a": "x", "c": {"k": 1e999}}')
    assert not takes("free", '{"a": "x", "c": {}}')
    assert not takes("number", '{"b": 1}')


def test_a_keyword_that_is_not_served_is_refused_in_json() -> None:
    bad = {"type": "object", "properties": {"a": {}}, "not": {"required": ["a"], "minProperties": 2}}
    with pytest.raises(RequestError):
        COMPILER.compile("calls", CallsConstraint(form=OBJECT, tools={"f": bad}).to_text())


def test_an_object_is_written_in_the_shape_of_its_template() -> None:
    shape = '{"id": "x1", "type": "function", "function": {"arguments": "{\\"a\\": 1}", "name": "f"}}'
    paths = {"name_path": ("function", "name"), "arguments_path": ("function", "arguments"), "id_path": ("id",)}
    form = CallForm(kind="object", start="[", next=", ", end="]", shape=shape, id_pattern="[a-z]{3}", **paths)
    constraint = CallsConstraint(form=form, tools=TOOLS)
    text = '[{"id": "abc", "type": "function", "function": {"arguments": {}, "name": "get"}}]'
    assert accepts(constraint, text)
    assert not accepts(constraint, text.replace("abc", "abcd"))
    assert not accepts(constraint, text.replace("get", "got"))
    form = CallForm(kind="object", start="[", next=", ", end="]", shape='{\n  "f": {"a": "f"}\n}')
    assert accepts(CallsConstraint(form=form, tools=TOOLS), '[{\n  "get": {}\n}]')
    with pytest.raises(RequestError, match="is no call"):
        form = CallForm(kind="object", start="[", next=", ", end="]", shape="{}")
        COMPILER.compile("calls", CallsConstraint(form=form, tools=TOOLS).to_text())


def test_a_name_before_the_head_of_a_call_is_the_name_of_the_call() -> None:
    form = CallForm(kind="json", start="to={NAME}: ", next=";to={NAME}: ", end=".", mid=" ")
    constraint = CallsConstraint(form=form, tools=TOOLS)
    assert accepts(constraint, "to=get: get {};to=other: other {}.")
    assert not accepts(constraint, "to=get: other {}.")


def test_places_of_calls_are_numbers() -> None:
    form = CallForm(kind="json", start="<c {INDEX}>", next="</c><c {INDEX}>", end="</c>", mid=":")
    constraint = CallsConstraint(form=form, tools=TOOLS)
    assert accepts(constraint, "<c 0>get:{}</c><c 1>get:{}</c>")
    assert not accepts(constraint, "<c x>get:{}</c>")


@pytest.mark.parametrize(
    "text", ["", "null", "{}", '{"form": 1, "tools": {}}', "[" * 5000, '{"form": {"kind": "object"}, "tools": {}}']
)
def test_other_texts_are_no_constraint(text: str) -> None:
    with pytest.raises(RequestError):
        COMPILER.compile("calls", text)


def test_a_schema_without_values_is_refused_with_the_name_of_its_tool() -> None:
    bad = {"type": "object", "properties": {"a": {"type": "string", "pattern": "(^a)+b"}}, "required": ["a"]}
    with pytest.raises(RequestError, match="of the tool 'f'"):
        COMPILER.compile("calls", CallsConstraint(form=TAGGED, tools={"f": bad}).to_text())
    with pytest.raises(RequestError):
        COMPILER.compile("calls", CallsConstraint(form=TAGGED, tools={}).to_text())


def test_requests_cannot_give_the_text_of_a_constraint() -> None:
    text = CallsConstraint(form=OBJECT, tools=TOOLS).to_text()
    assert StructuredOutputsParams(calls=text).kind == "calls"
    with pytest.raises(RequestError, match="made by the engine"):
        StructuredOutputsParams.of({"calls": text})
    with pytest.raises(RequestError, match="nested"):
        StructuredOutputsParams(calls=json.dumps({"tools": "x"})[:-1] + ', "a": ' + "[" * 200)
