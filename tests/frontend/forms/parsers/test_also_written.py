"""Calls are read also as models write them beside the form that their templates show."""

from __future__ import annotations

import json

import msgspec
import pytest

from tokenloom.frontend.forms.answer_forms.form import AnswerForm, CallForm
from tokenloom.frontend.forms.answer_forms.named import FORMS, with_also_written
from tokenloom.frontend.forms.parsers.names import new_parsers
from tokenloom.frontend.forms.parsers.parts import whole_calls

TEXTS = {"f": {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "integer"}}}}
CODER = FORMS["qwen3_coder"].calls[0]
KIMI = CallForm(
    kind="json",
    start="<|tool_calls_section_begin|>\n<|tool_call_begin|>functions.",
    next="<|tool_call_end|>\n<|tool_call_begin|>functions.",
    end="<|tool_call_end|>\n<|tool_calls_section_end|>",
    mid=":{INDEX}<|tool_call_argument_begin|>",
)
VALUE = "<parameter=a>\nx\n</parameter>\n<parameter=b>\n7\n</parameter>\n"


GEMMA = CallForm(
    kind="literal",
    start="<|tool_call>call:",
    next="<tool_call|><|tool_call>call:",
    end="<tool_call|>",
    mid="{",
    close="}",
    assign=":",
    pair=",",
    quote='<|"|>',
    has_bare_keys=True,
)


def read(form: CallForm, text: str) -> tuple[str, list[tuple[str, object]]]:
    """Return the content and the calls of an answer, whose template shows `form`."""
    (parser,) = new_parsers(with_also_written(AnswerForm(calls=(form,))), TEXTS, is_inside_thought=False)
    content, calls = whole_calls([*parser.append(text), *parser.finish()])
    return content.strip(), [(call.name, json.loads(call.arguments)) for call in calls]


@pytest.mark.parametrize(
    "text",
    [
        f"<tool_call>\n<function=f>\n{VALUE}</function>\n</tool_call>",
        f"<function=f>\n{VALUE}</function>",
        f"<function=f>\n{VALUE}</function>\n</tool_call>",
        "<tool_call>\n<function=f>\n<parameter=a>\nx\n<parameter=b>\n7\n</function>\n</tool_call>",
    ],
    ids=["as shown", "without the outer tags", "without the outer begin", "without the ends of values"],
)
def test_tagged_call_is_read_without_some_of_its_tags(text: str) -> None:
    content, calls = read(CODER, f"I look. {text}")
    assert calls == [("f", {"a": "x", "b": 7})]
    assert content.removesuffix("</tool_call>").strip() == "I look."


DSML = CallForm(
    kind="tagged",
    start='<｜DSML｜tool_calls>\n<｜DSML｜invoke name="',
    next='</｜DSML｜parameter>\n</｜DSML｜invoke>\n<｜DSML｜invoke name="',
    end="</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>",
    mid='" string="true">',
    first='">\n<｜DSML｜parameter name="',
    pair='</｜DSML｜parameter>\n<｜DSML｜parameter name="',
    mid_by_type={"string": '" string="true">', "other": '" string="false">'},
    empty_next='">\n</｜DSML｜invoke>\n<｜DSML｜invoke name="',
    empty_end='">\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>',
)
INVOKED = (
    '<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="a" string="true">x</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="b" string="false">7</｜DSML｜parameter>\n</｜DSML｜invoke>'
)
EMPTY = '<｜DSML｜invoke name="g">\n</｜DSML｜invoke>'


@pytest.mark.parametrize("begin", ["<｜DSML｜tool_calls>\n", ""])
@pytest.mark.parametrize("end", ["\n</｜DSML｜tool_calls>", ""])
@pytest.mark.parametrize("more", ["", f"\n{EMPTY}", f"\n\n{INVOKED}"])
def test_tagged_calls_are_read_without_the_tags_around_them(begin: str, end: str, more: str) -> None:
    content, calls = read(DSML, f"I look.\n\n{begin}{INVOKED}{more}{end}")
    first: tuple[str, object] = ("f", {"a": "x", "b": 7})
    assert calls == [first, *([("g", {})] if EMPTY in more else [first] if more else [])]
    assert content == "I look."


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [("b", "42", 42), ("b", "[1]", [1]), ("b", "many", "many"), ("a", "42", "42"), ("other", "42", "42")],
)
def test_a_value_that_is_named_a_text_is_none_where_the_schema_has_no_texts(key: str, text: str, value: object) -> None:
    parameter = f'<｜DSML｜parameter name="{key}" string="true">{text}</｜DSML｜parameter>'
    _, calls = read(DSML, f'{DSML.start}f">\n{parameter}\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>')
    assert calls == [("f", {key: value})]


def test_a_tag_in_prose_begins_no_call() -> None:
    text = 'Write <｜DSML｜invoke name="f" and </｜DSML｜invoke> around it.'
    assert read(DSML, text) == (text, [])


@pytest.mark.parametrize("prefixes", [("call", "call"), ("", ""), ("", "call"), ("call", "")])
def test_name_is_read_behind_a_colon_alone(prefixes: tuple[str, str]) -> None:
    first, second = prefixes
    text = f'<|tool_call>{first}:f{{a:<|"|>x<|"|>}}<tool_call|><|tool_call>{second}:f{{b:7}}<tool_call|>'
    assert read(GEMMA, text) == ("", [("f", {"a": "x"}), ("f", {"b": 7})])


@pytest.mark.parametrize("prefix", ["functions.", ""])
@pytest.mark.parametrize("has_ids", [True, False])
def test_the_id_of_a_name_without_the_word_before_it_is_as_the_model_wrote_it(prefix: str, *, has_ids: bool) -> None:
    form = msgspec.structs.replace(KIMI, id_text="functions.{NAME}:{INDEX}" * has_ids)
    text = (
        f"<|tool_calls_section_begin|><|tool_call_begin|>{prefix}f:3<|tool_call_argument_begin|>{{}}<|tool_call_end|>"
    )
    (parser,) = new_parsers(with_also_written(AnswerForm(calls=(form,))), TEXTS, is_inside_thought=False)
    _, (call,) = whole_calls([*parser.append(text), *parser.finish()])
    assert call.id == f"{prefix}f:3" if has_ids else call.id.startswith("call_")


@pytest.mark.parametrize("prefix", ["functions.", ""])
def test_name_is_read_without_the_word_before_it(prefix: str) -> None:
    text = (
        f'<|tool_calls_section_begin|><|tool_call_begin|>{prefix}f:0<|tool_call_argument_begin|>{{"a": "x"}}'
        f'<|tool_call_end|><|tool_call_begin|>{prefix}f:1<|tool_call_argument_begin|>{{"b": 7}}'
        "<|tool_call_end|><|tool_calls_section_end|>"
    )
    assert read(KIMI, text) == ("", [("f", {"a": "x"}), ("f", {"b": 7})])


def test_form_of_no_known_family_stays_as_it_is() -> None:
    form = AnswerForm(calls=(msgspec.structs.replace(CODER, start="<call>"),))
    assert with_also_written(form) == form
