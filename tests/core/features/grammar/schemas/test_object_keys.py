"""Beside patterns of keys, exactly the objects that jsonschema accepts conform, whatever their numbers are."""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from tokenloom.core.features.grammar.compiler import Matcher
from tokenloom.ipc.errors import RequestError
from tokenloom.ipc.params.calls_constraint import CallsConstraint
from tokenloom.tests.core.features.grammar.calls.test_call_rules import OBJECT, PYTHON, TAGGED
from tokenloom.tests.core.features.grammar.matching import COMPILER, TOKENIZER, Schema, answer
from tokenloom.tests.support.today import seeds

LARGE = 2**60 + 1  # which float64 rounds
PATTERNS = ("^a", "b$", "^[cd]+$", "^.1")
VALUES: list[Schema | bool] = [
    {"type": "number"},
    {"type": "integer"},
    {"type": "string"},
    {"const": LARGE},
    {"type": "integer", "minimum": LARGE},
    {"type": ["number", "null"], "maximum": 1e300},
    True,
    {},
]
WRITTEN = [1, -2.5, LARGE, LARGE - 1, 12345678901234567890123, "x", None]  # values of the objects that are tried
NAMES = ("a", "x", "cd")  # that a schema may name
OTHERS = ("a2", "qb", "cc", "e1", "ab", "é")
REFUSED = "not disjoint|cannot be kept exact|no text conforms|(?i:unsatisfiable)"  # why some schemas are not served


def random_schema(draw: random.Random) -> Schema:
    named = draw.sample(NAMES, draw.randrange(3))
    patterns = draw.sample(PATTERNS, draw.randrange(1, 3))
    schema: Schema = {
        "type": "object",
        "properties": {name: draw.choice(VALUES) for name in named},
        "patternProperties": {pattern: draw.choice(VALUES) for pattern in patterns},
        "required": draw.sample(NAMES, draw.randrange(2)),
    }
    if draw.random() < 0.7:
        schema["additionalProperties"] = draw.choice([False, *VALUES])
    return schema


def is_valid(schema: Schema, value: object) -> bool:
    if "additionalProperties" not in schema:  # only the keys that it names, requires or has a pattern for
        properties = dict.fromkeys(schema["required"], True) | schema["properties"]
        schema = schema | {"properties": properties, "additionalProperties": False}
    return bool(jsonschema.Draft202012Validator(schema).is_valid(value))


def matched_once(schema: Schema, name: str) -> bool:
    """Whether a name that the schema does not have matches one pattern at most: others are left out."""
    return sum(map(jsonschema_matches, schema["patternProperties"], itertools.repeat(name))) <= 1


def jsonschema_matches(pattern: str, name: str) -> bool:
    return not jsonschema.Draft202012Validator({"patternProperties": {pattern: False}}).is_valid({name: 1})


def objects(schema: Schema, draw: random.Random) -> list[dict[str, Any]]:
    """Objects with the names of a schema in its order, those that it only requires behind them, then others."""
    named = [*dict.fromkeys((*schema["properties"], *schema["required"]))]
    others = [name for name in (*NAMES, *OTHERS) if name not in named and matched_once(schema, name)]
    found: list[dict[str, Any]] = []
    for _ in range(60):
        keys = [name for name in named if draw.random() < 0.8]
        keys += draw.sample(others, min(len(others), draw.randrange(3)))
        found.append({key: draw.choice(WRITTEN) for key in keys})
    return found


def takes(matcher: Matcher, text: str) -> bool:
    ids = [each for letter in text for each in TOKENIZER.encode(letter, add_special_tokens=False).ids]
    trial = matcher.copy().inner
    return trial.try_consume_tokens(ids) == len(ids) and trial.is_accepting()


def object_call(value: dict[str, Any]) -> str:
    written = json.dumps(value, ensure_ascii=False)
    return f'<tool_call>\n{{"name": "f", "arguments": {written}}}\n</tool_call>'


def tagged_call(value: dict[str, Any]) -> str:
    pairs = "".join(f"\n<parameter={key}>\n{_bare(each)}\n</parameter>" for key, each in value.items())
    return f"<tool_call>\n<function=f>{pairs}\n</function>\n</tool_call>"


def _bare(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def readings(value: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The objects for which a tagged call may stand: a text has no quotes there."""
    for ways in itertools.product(*((each, _bare(each)) for each in value.values())):
        yield dict(zip(value, ways, strict=True))


def python_call(value: dict[str, Any]) -> str:
    return "[f(" + ", ".join(f"{key}={each!r}" for key, each in value.items()) + ")]"


CALLS = {"object": (OBJECT, object_call), "tagged": (TAGGED, tagged_call), "python": (PYTHON, python_call)}


@pytest.mark.parametrize("seed", seeds(6, 60))
def test_objects_conform_beside_patterns_as_jsonschema_says(seed: int) -> None:
    draw = random.Random(seed)
    num_valid = num_invalid = 0
    while num_valid < 20 or num_invalid < 20:
        schema = random_schema(draw)
        try:
            matcher = COMPILER.compile("json", json.dumps(schema))
        except RequestError as error:
            assert re.search(REFUSED, str(error)), (schema, error)
            continue
        for value in objects(schema, draw):
            expected = is_valid(schema, value)
            num_valid += expected
            num_invalid += not expected
            assert takes(matcher, json.dumps(value, ensure_ascii=False)) == expected, (schema, value)
        if (found := answer(schema, seed)) is not None:
            assert is_valid(schema, found), (schema, found)


@pytest.mark.parametrize("form", CALLS)
@pytest.mark.parametrize("seed", seeds(2, 20))
def test_arguments_conform_beside_patterns_as_jsonschema_says(form: str, seed: int) -> None:
    draw = random.Random(seed)
    call_form, written = CALLS[form]
    num_valid = num_invalid = 0
    while num_valid < 20 or num_invalid < 20:
        schema = random_schema(draw)
        try:
            text = CallsConstraint(form=call_form, tools={"f": schema}).to_text()
            matcher = COMPILER.compile("calls", text)
        except RequestError:
            continue
        for value in objects(schema, draw):
            if form != "object" and "é" in value:  # no name of an argument
                continue
            expected = any(is_valid(schema, each) for each in (readings(value) if form == "tagged" else [value]))
            num_valid += expected
            num_invalid += not expected
            assert takes(matcher, written(value)) == expected, (schema, value)
