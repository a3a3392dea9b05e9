"""Arguments in Python's and JSON's literals are read as Python reads them; a call with others is content."""

from __future__ import annotations

import ast
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenloom.frontend.forms.answer_forms.form import AnswerForm, CallForm
from tokenloom.frontend.forms.answer_forms.named import FORMS
from tokenloom.frontend.forms.parsers.literals import LiteralScanner, read_arguments
from tokenloom.frontend.forms.parsers.machine import AnswerMachine
from tokenloom.frontend.forms.parsers.parts import UnreadCall, whole_calls
from tokenloom.tests.frontend.forms.parsers.cuts import call_parser, parse, parts_of

(PYTHON, *_) = FORMS["pythonic"].calls
MARKED = CallForm(
    kind="literal", start="<c>", next="</c><c>", end="</c>", mid="{", assign=":", pair=",", close="}", quote='<|"|>'
)
UNREAD = ("b'x'", "f'x'", "1j", "1__0", "0x", "_1", "nan", "1e999", "2 + 3", "x", "1-2", "9" * 5000)
UNREAD += ("'a", "[1 2]", "{'a': 1, 2}", "{1: 2, 3}", "{'a': 1, 'a': 2}")
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3) | st.tuples(inner, inner),
    max_leaves=6,
)


def value(text: str, form: CallForm = PYTHON) -> Any:
    """Return the value that an argument's text is read as; the text itself as bytes if it is not read."""
    read = read_arguments(f"a{form.assign}{text}", form)
    if read is None:
        return text.encode()
    return json.loads(read)["a"]


@given(VALUES)
def test_values_are_read_as_python_and_json_write_them(given: object) -> None:
    written = json.dumps(given)
    for text in (repr(given), written, json.dumps(given, ensure_ascii=False)):
        assert json.dumps(value(text)) == written
        for behind in ("]", ", f(b=1)", ""):
            assert LiteralScanner(PYTHON).append(f"a={text}){behind}", is_last=True) == behind


@pytest.mark.parametrize(
    "text",
    [
        *("1_000", "0x1F", "0b11", "0o17", "-0X_ff", "+5", ".5", "5.", "1_0.5e-3", "01.5"),
        *("'a' 'b'", "'a' \"b\"\n  'c'", "''", "('a'\n'b')", "'a''b'"),
        *("'''it's\n\"x\" '''", '"""a, b) c"""', r"'\x41\101\u00e9\U0001F600\t\''", r"r'\d+\n'", "u'é'", r"R'\''"),
        *("(1, 2)", "(1,)", "()", "(1)", "[1, 2,]", "{'a': 1,}", "{'a': {'b': (1, [None])}}"),
    ],
)
def test_texts_are_read_as_python_reads_them(text: str) -> None:
    assert value(text) == json.loads(json.dumps(ast.literal_eval(f"({text})")))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{1, 2}", [1, 2]),
        ("{'a', \"b\"}", ["a", "b"]),
        ("{[1], {2}}", [[1], [2]]),
        ("007", 7),
        (r"'\d'", r"\d"),
        ("-08", -8),
        ("'it's, so'", "it's, so"),
        ("'echo 'a', 'b''", "echo 'a', 'b'"),
        ("'python -c \"print(f('x'))\"'", "python -c \"print(f('x'))\""),
        ("'it's so'", "it's so"),
        ("['it's', 'x' 'y']", ["it's", "x' 'y"]),
        ('"say "hi" now"', 'say "hi" now'),
        *((each, each.encode()) for each in UNREAD),
    ],
)
def test_other_texts_are_read_as_they_are_meant_or_not_at_all(text: str, expected: object) -> None:
    assert value(text) == expected


def test_a_form_with_marks_around_texts_reads_quotes_too() -> None:
    assert value('[<|"|>a\' "<|"|>,"b",{c:\'d\'}]', MARKED) == ["a' \"", "b", {"c": "d"}]


@pytest.mark.parametrize(
    ("text", "unread"),
    [("[f(a=x), f(a=1)]", ["[f(a=x)"]), ("[f(), f('x')]", ["[f(), f('x')]"]), ("[g(a=x)]", []), ("so [f(x)]", [])],
)
def test_a_call_that_is_not_read_is_content_and_known_as_such(text: str, unread: list[str]) -> None:
    for pieces in ([text], list(text)):
        parts = parts_of(call_parser("pythonic", {"f": {}}), pieces)
        assert [part.text for part in parts if isinstance(part, UnreadCall)] == unread
        assert parse(call_parser("pythonic", {"f": {}}), pieces) == ("", text, [])


@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize("wrong", ["f(a=b'z')", "f(a=1e999)", "f(x y)"])
def test_calls_beside_one_that_is_not_read_are_calls(wrong: str, place: int) -> None:
    calls = ["f(a=1)", "f(a=2)"]
    calls.insert(place, wrong)
    text = "I look.\n<function_calls>\n" + "\n".join(calls) + "\n</function_calls>"
    for pieces in ([text], list(text)):
        parts = parts_of(call_parser("olmo3", {"f": {}}), pieces)
        (unread,) = (part.text for part in parts if isinstance(part, UnreadCall))
        assert wrong in unread
        said, read = whole_calls(parts)
        assert said == f"I look.\n{unread}" and [use.arguments for use in read] == ['{"a": 1}', '{"a": 2}']


def test_a_value_that_is_left_out_is_an_empty_text_where_texts_have_marks() -> None:
    assert read_arguments("a:,b:7", MARKED) == '{"a": "", "b": 7}'
    assert read_arguments("a:{b:},c:", MARKED) == '{"a": {"b": ""}, "c": ""}'
    assert read_arguments("a=, b=7", PYTHON) is None


RAW = CallForm(
    kind="literal", start="<|c|>[", next=", ", end="]<|e|>", mid="(", pair=", ", assign="=", close=")", quote="'"
)


@pytest.mark.parametrize(
    ("calls", "expected"),
    [
        ("f(a='sed -n '3,5p' x')", [{"a": "sed -n '3,5p' x"}]),
        ("f(a='print(g('x'))', b=['y', 'z'])", [{"a": "print(g('x'))", "b": ["y", "z"]}]),
        ("f(a='g('x'), h('y')', b='1'), f(a='('2')')", [{"a": "g('x'), h('y')", "b": "1"}, {"a": "('2')"}]),
        ("f(a=\"print(g(x, s='\\,'))\"), f()", [{"a": "print(g(x, s='\\,'))"}, {}]),
        ("f(a='cd x && p -c \"q(s='\\,'))\"')", [{"a": "cd x && p -c \"q(s='\\,'))\""}]),
        ("f(a='x',), f(a='y')", [{"a": "x"}, {"a": "y"}]),
    ],
)
@pytest.mark.parametrize("end", ["]<|e|>", "<|e|>", "]"])
def test_a_text_ends_before_the_next_argument_or_the_end_of_its_call(
    calls: str, expected: list[object], end: str
) -> None:
    text = f"<|c|>[{calls}{end}"
    for pieces in ([text], list(text)):
        machine = AnswerMachine(AnswerForm(calls=(RAW,)), {})
        assert parse(machine, pieces) == ("", "", [("f", each) for each in expected]), pieces


@pytest.mark.parametrize("behind", ["", " \n", " and so on"])
def test_a_text_of_a_call_without_an_end_ends_before_a_bracket(behind: str) -> None:
    for pieces in ([f"<|c|>[f(a='x', b=['y'], c='it's'){behind}"], list(f"<|c|>[f(a='x', b=['y'], c='it's'){behind}")):
        _, content, calls = parse(AnswerMachine(AnswerForm(calls=(RAW,)), {}), pieces)
        assert (content.strip(), calls) == (behind.strip(), [("f", {"a": "x", "b": ["y"], "c": "it's"})])
