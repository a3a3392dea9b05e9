"""Schemas in forms that write each argument by itself: counts, unions and patterns are exact, others are refused."""

from __future__ import annotations

import itertools
import re
from typing import Any

import jsonschema
import pytest

from tokenloom.core.features.grammar.compiler import Matcher
from tokenloom.core.features.grammar.schemas.pattern_branches import found_anywhere
from tokenloom.ipc.errors import RequestError
from tokenloom.ipc.params.calls_constraint import CallsConstraint
from tokenloom.tests.core.features.grammar.calls.test_call_rules import FORMS, literal, tagged
from tokenloom.tests.core.features.grammar.matching import COMPILER, TOKENIZER, record

Schema = dict[str, Any]
TEXT: Schema = {"type": "string"}
NAMED = {"a": TEXT, "b": TEXT, "c": TEXT}
KEYS = [keys for size in range(6) for keys in itertools.combinations("abcde", size)]
WORDS = ["".join(word) for size in range(5) for word in itertools.product("ab,", repeat=size)]


def matcher_of(form: str, schema: Schema) -> Matcher:
    return COMPILER.compile("calls", CallsConstraint(form=FORMS[form], tools={"f": schema}).to_text())


def takes(matcher: Matcher, text: str) -> bool:
    ids = [each for letter in text for each in TOKENIZER.encode(letter, add_special_tokens=False).ids]
    trial = matcher.copy().inner
    return trial.try_consume_tokens(ids) == len(ids) and trial.is_accepting()


def call(form: str, values: dict[str, str]) -> str:
    """Return a call of f with arguments as they are written."""
    if form == "python":
        return "[f(" + ", ".join(f"{key}={value}" for key, value in values.items()) + ")]"
    pairs = "".join(f"\n<parameter={key}>\n{value}\n</parameter>" for key, value in values.items())
    return f"<tool_call>\n<function=f>{pairs}\n</function>\n</tool_call>"


@pytest.mark.parametrize(("form", "quote"), [("python", "'"), ("tagged", '"')])
@pytest.mark.parametrize("others", [False, TEXT])
@pytest.mark.parametrize(("low", "high"), [(1, None), (2, 3), (0, 2), (3, None), (3, 3)])
def test_the_pairs_of_an_object_are_counted(
    form: str, quote: str, others: Schema | bool, low: int, high: int | None
) -> None:
    for required in ([], ["b"]):
        schema: Schema = {"type": "object", "properties": NAMED, "required": required, "additionalProperties": others}
        schema |= {"minProperties": low} | ({} if high is None else {"maxProperties": high})
        as_calls, as_values = matcher_of(form, schema), matcher_of(form, record(o=schema))
        for keys in KEYS:
            conforms = jsonschema.Draft202012Validator(schema).is_valid(dict.fromkeys(keys, "x"))
            text = "'x'" if form == "python" else "x"
            assert takes(as_calls, call(form, dict.fromkeys(keys, text))) == conforms, keys
            value = ", ".join(f"{quote}{key}{quote}: {quote}x{quote}" for key in keys)
            assert takes(as_values, call(form, {"o": f"{{{value}}}"})) == conforms, value


@pytest.mark.parametrize(("accepted", "quote"), [(tagged, ""), (literal, "'")])
def test_unions_are_served_though_they_are_long(accepted: Any, quote: str) -> None:
    def conform(schema: Schema, *texts: str) -> list[bool]:
        found: list[bool] = accepted(schema, *(f"{quote}{text}{quote}" for text in texts))
        return found

    constants = {"oneOf": [{"const": f"v{i}", "title": "one"} for i in range(100)]}
    assert conform(constants, "v0", "v99", "v100") == [True, True, False]
    both = {
        "allOf": [{"anyOf": [{"minimum": i} for i in range(9)]}, {"anyOf": [{"maximum": i} for i in range(10, 19)]}]
    }
    assert accepted(both | {"type": "integer"}, "0", "18", "19") == [True, True, False]
    choice = {"type": "object", "properties": {"k": {"enum": ["a", "b"]}, "x": {"type": "integer"}}, "required": ["k"]}
    choice |= {"if": {"properties": {"k": {"const": "a"}}}, "then": {"required": ["x"]}}
    values = ('{"k": "a", "x": 1}', '{"k": "a"}', '{"k": "b"}')
    assert accepted(choice, *(each.replace('"', quote or '"') for each in values)) == [True, False, True]
    password = {"type": "string", "pattern": r"^(?=.*[A-Z])(?=.*\d).{3,}$", "maxLength": 4}
    assert conform({"allOf": [password, {"maxLength": 9}]}, "aB3", "ab3", "aB34x") == [True, False, False]


@pytest.mark.parametrize(
    "pattern",
    [
        *("^(a$|b$)", "(^a|b$)", "(?:^|,)a(?:,|$)", "(^a)?b", "^$|^[ab]{3}$", "(^$)|(^[ab]{3}$)", "(a|$)b", "(|^)a"),
        *("^(?P<y>a$|b)", r"\Aab\Z", "(?:^a|(?:b|^,))a$", "(a*$|b)", "(a|^)(b|$)", "^(?:(?:a|b)$)|,,"),
        *("^^a$$", "(^)(a)($)"),
    ],
)
def test_anchors_in_groups_are_exact(pattern: str) -> None:
    expression = found_anywhere(pattern)
    found = [word for word in WORDS if re.fullmatch(expression, word)]
    assert found == [word for word in WORDS if re.search(pattern, word)]


MANY = {"anyOf": [{"type": "integer", "minimum": i} for i in range(1025)], "maximum": 9}
REFUSED: list[tuple[Schema, str]] = [
    ({"type": "string", "pattern": "(^a|b)+c"}, "pattern .* repeated, .* outside of the group"),
    ({"type": "string", "pattern": "((^a)|(,$))b?"}, "pattern .* between other texts, .* at an edge"),
    ({"type": "string", "pattern": "a^b"}, "no text matches the pattern"),
    ({"type": "string", "pattern": "(?i:^a)"}, "pattern .* changes flags"),
    ({"type": "string", "pattern": "(^a|b)" * 7}, "pattern .* too many branches"),
    ({"type": "string", "pattern": r"\bab"}, "at #/properties/a: lookarounds not supported"),
    ({"type": "string", "not": {"pattern": "x"}}, "at #/properties/a: this not is not served"),
    ({"enum": ["ab", "b"], "pattern": "^a"}, "enum, pattern together"),
    (MANY, "more than 1024 alternatives"),
    ({"type": "object", "additionalProperties": TEXT, "maxProperties": 3000}, "maxProperties 3000 beside 0 properties"),
]


@pytest.mark.parametrize("form", ["python", "tagged"])
@pytest.mark.parametrize(("schema", "why"), REFUSED)
def test_a_refusal_says_why_and_names_the_tool(form: str, schema: Schema, why: str) -> None:
    with pytest.raises(RequestError, match=f"{why}.* \\(of the tool 'f'\\)"):
        matcher_of(form, record(a=schema))
