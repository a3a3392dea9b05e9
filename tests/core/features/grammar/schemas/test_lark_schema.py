"""Integers beyond 2^53 of a schema are served exactly, and change nothing around them."""

from __future__ import annotations

import itertools
import json
import random
import re
from typing import Any

import jsonschema
import pytest

from tokenloom.core.features.grammar.schemas.json_schema import adapted
from tokenloom.core.features.grammar.schemas.lark_schema import LarkSchema
from tokenloom.ipc.errors import RequestError
from tokenloom.tests.core.features.grammar.matching import (
    COMPILER,
    Schema,
    accepts_text,
    random_text,
    record,
)
from tokenloom.tests.support.today import seeds

EDGES = [2**53, 10**17, 2**63, 2**64, 10**19, 10**20, 10**30]
LARGE = 2**60 + 1  # to LARGE + 9: of these float64 holds none but two
INT64: Schema = {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}


def is_valid(schema: Schema, value: object) -> bool:
    return bool(jsonschema.Draft202012Validator(schema).is_valid(value))


@pytest.mark.parametrize("seed", seeds(16, 84))
def test_a_range_has_its_integers_and_no_other(seed: int) -> None:
    draw, kind = random.Random(seed), ("integer", "number")[seed % 2]
    ends = [draw.choice((1, -1)) * (draw.choice([*EDGES, 0]) + draw.randrange(-3, 4)) for _ in range(2)]
    low, high = min(ends), max(ends) + draw.choice([0, 0, 1, 12])
    schema: Schema = {"type": kind}
    schema |= draw.choice([{"minimum": low}, {"exclusiveMinimum": low - 1}, {"minimum": low}, {}])
    schema |= draw.choice([{"maximum": high}, {"exclusiveMaximum": high + 1}, {"maximum": high}, {}])
    near = [end + step for end in (low, high, -low, -high, 0) for step in range(-4, 5)]
    near += [draw.randrange(low, high + 1) for _ in range(10)]
    near += [sign * int(str(abs(end))[:length]) for end in (low, high) for length in (1, 2, 9) for sign in (1, -1)]
    near += [end * 10 for end in (low, high)] + [draw.randrange(-(10**32), 10**32) for _ in range(10)]
    for value in near:
        assert accepts_text(schema, str(value)) == is_valid(schema, value), (schema, value)
    assert not accepts_text(schema, f"0{abs(high)}") and not accepts_text(schema, f"-0{abs(low)}")
    for i in range(4):
        if text := random_text(schema, seed * 10 + i):
            assert is_valid(schema, json.loads(text)), (schema, text)


@pytest.mark.parametrize("value", [2**53 + 1, -(2**53) - 1, 1234567890123456789, 2**64 - 1, 2**64, 10**25 + 1, 10**200])
def test_an_id_is_written_exactly_wherever_a_schema_names_it(value: int) -> None:
    assert random_text({"const": value}, 0) == str(value)
    schema: Schema = {"enum": [1, "x", {"a": [value, None], "b c": {}}, [], [[value]]]}
    for each in schema["enum"]:
        assert accepts_text(schema, json.dumps(each, indent=1))
    for each in [
        value,
        [value],
        {"a": [value + 1, None], "b c": {}},
        {"a": [value, None]},
        [[value], 1],
        [[value + 1]],
    ]:
        assert not accepts_text(schema, json.dumps(each))
    typed = {"type": "integer", "enum": [value, value + 2, "x", 3]}
    assert [accepts_text(typed, json.dumps(each)) for each in (value, value + 1, value + 2, "x", 3)] == [1, 0, 1, 0, 1]
    assert accepts_text({"const": value, "enum": [value, 5]}, str(value))
    assert not accepts_text({"const": value, "enum": [value, 5]}, "5")


def test_numbers_between_large_integers_are_none_that_float64_lacks() -> None:
    schema: Schema = {"type": "number", "exclusiveMinimum": -2.5, "maximum": 2**60 + 1}
    texts = {"-2.5": False, "-2.25": True, "7.25": True, str(2**60 + 1): True, str(2**60 + 2): False}
    texts |= {"9007199254740991.5": True, "9007199254740993.5": False, f"{2**60 + 1}.0": False}
    assert {text: accepts_text(schema, text) for text in texts} == texts


def test_a_large_float_bounds_as_its_digits_and_as_its_power_of_2() -> None:
    schema: Schema = {"type": "integer", "minimum": 1e23, "maximum": 1e30}  # which are 2^23 below, and 2^54 above
    for value in (10**23, 10**30):
        step = 1 if value < 10**29 else -1
        assert [accepts_text(schema, str(value + step * i)) for i in (-1, 0, 1)] == [False, True, True]


@pytest.mark.parametrize("types", ["integer", ["integer", "null"]])
def test_an_exclusive_bound_is_exclusive_beside_other_types(types: object) -> None:
    for bound in (2**60, 2**60 + 1):
        schema: Schema = {"type": types, "exclusiveMaximum": bound, "exclusiveMinimum": -bound}
        for value in (bound, bound - 1, -bound, 1 - bound):
            assert accepts_text(schema, str(value)) == (abs(value) < bound)


@pytest.mark.parametrize(
    "around",
    [
        {"type": "object", "properties": {"id": "HERE", "x": True}, "required": ["id"], "minProperties": 1},
        {"type": "object", "properties": {"id": {"type": "integer", "multipleOf": 1, "allOf": ["HERE"]}}},
        {"$id": "https://example.com/a", "properties": {"id": {"$id": "b", "anyOf": ["HERE"]}}, "type": "object"},
    ],
)
def test_where_numbers_cannot_be_exact_bounds_move_and_ids_are_refused_by_name(around: Schema) -> None:
    def schema_of(part: Schema) -> Schema:
        return json.loads(json.dumps(around).replace('"HERE"', json.dumps(part)))

    for i in range(8):
        text = random_text(schema_of(INT64), i)
        assert not text or is_valid(schema_of(INT64), json.loads(text))
    assert accepts_text(schema_of(INT64), '{"id": 1234567890123456789}')
    where = r"json at #/.*id.*: 1234567890123456789 cannot be kept exact .*: write it .* or make it a text"
    with pytest.raises(RequestError, match=where):
        COMPILER.compile("json", json.dumps(schema_of({"const": 1234567890123456789})))


def test_what_else_is_wrong_is_said_as_of_small_numbers() -> None:
    bad: list[Schema] = [
        record(b={"type": "string", "contentEncoding": "x", "not": {"minLength": 3}}),
        record(b={"type": "intger"}),
        record(b={"$ref": "#/$defs/none"}),
        record(b={"oneOf": [{"type": "integer"}, {"type": "integer"}]}),
        record(b={"type": "integer", "minimum": "9"}),
        record(b={"type": "integer"}) | {"required": 5},
    ]
    for schema in bad:
        reasons = []
        for first in ({"type": "integer"}, INT64):
            with pytest.raises(RequestError) as caught:
                COMPILER.compile("json", json.dumps(schema | {"properties": {"a": first} | schema["properties"]}))
            reasons.append(str(caught.value))
        assert reasons[0] == reasons[1]


@pytest.mark.parametrize("number", [INT64, {"const": 7}])
def test_compact_texts_have_white_space_in_their_strings_alone(number: Schema) -> None:
    schema = record(id=number, names={"type": "array", "items": {"const": "x y"}})
    assert accepts_text(schema, '{"id":7,"names":["x y","x y"]}', "compact_json")
    for text in ('{"id": 7,"names":[]}', '{"id":7,"names":["x y", "x y"]}'):
        assert accepts_text(schema, text) and not accepts_text(schema, text, "compact_json")


def _size(schema: Schema) -> int:
    text = LarkSchema(adapted(schema), {}).text()
    assert text is not None
    return len(text)


def test_the_grammar_grows_with_the_schema() -> None:
    def large(num: int) -> Schema:
        target = record(**{f"q{i}": {"type": "string"} for i in range(50)})
        named = {f"p{i}": {"items": {"$ref": "#/$defs/x"}, "maxItems": i + 1} for i in range(num)}
        return record(id=INT64, **named) | {"$defs": {"x": target}}

    target_size = len(json.dumps(large(0)))
    assert _size(large(40)) < 2.2 * _size(large(20)) < 40 * target_size
    assert _size({"enum": [2**60 + 1 + i for i in range(2000)]}) < 2.2 * _size(
        {"enum": list(range(2**60, 2**60 + 1000))}
    )


@pytest.mark.parametrize("keyword", ["minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum"])
@pytest.mark.parametrize("sign", [1, -1])
def test_bounds_of_very_many_digits_take_no_work(keyword: str, sign: int) -> None:
    for num_digits in (101, 1000, 4000):
        text = LarkSchema({"type": "integer", keyword: sign * (10**num_digits - 1)}, {}).text()
        assert text is None or len(text) < 12_000  # of 100 digits; an expression of 4,000 digits has 16 MB
    with pytest.raises(RequestError, match="out of range"):
        COMPILER.compile("json", f'{{"type": "integer", "{keyword}": {"9" * 100_000}}}')


def test_references_may_lead_to_each_other_many_times() -> None:
    chain = {f"d{i}": record(x={"$ref": f"#/$defs/d{i + 1}"}) for i in range(300)} | {"d300": INT64}
    COMPILER.compile("json", json.dumps({"$ref": "#/$defs/d0", "$defs": chain}))
    tree = {"type": "object", "properties": {"id": INT64, "next": {"$ref": "#"}, "all": {"items": {"$ref": "#"}}}}
    assert accepts_text(tree, json.dumps({"id": 1, "next": {"id": 2**63 - 1, "all": [{"next": {}}]}}))
    assert not accepts_text(tree, json.dumps({"id": 1, "next": {"id": 2**63}}))


def _leaf(draw: random.Random) -> Schema:
    return draw.choice(
        [
            {"type": "integer", "minimum": 0, "maximum": 9},
            {"type": "integer", "exclusiveMinimum": 1, "exclusiveMaximum": 5, "title": "n"},
            {"enum": [3, "x", None]},
            {"const": 7},
            {"type": ["integer", "null"], "minimum": 2, "maximum": 4},
            {
                "anyOf": [
                    {"const": 4},
                    {"type": "string", "enum": ["x", "yz"]},
                    {"type": "array", "items": {"const": 1}},
                ]
            },
            {"oneOf": [{"type": "integer", "minimum": 6, "maximum": 9}, {"type": "null"}]},
        ]
    )


def _schema(draw: random.Random, depth: int) -> Any:
    def inner() -> Any:
        return _schema(draw, depth - 1)

    def part() -> Any:
        return draw.choice([inner, inner, lambda: {"enum": ["x", "y z"]}, lambda: draw.choice([True, False, {}])])()

    kinds = ["object", "object", "array", "tuple", "map", "ref", "any", "leaf", "joined", "joined"]
    kind = draw.choice(kinds) if depth else "leaf"
    if kind == "object":
        names = draw.sample(["a", "b", 'c"\\ ', "é\n", "key"], draw.randrange(5))
        schema: Schema = {"type": "object", "properties": {name: part() for name in names}}
        schema["required"] = draw.sample(names, draw.randrange(len(names) + 1))
        return schema | draw.choice([{}, {}, {"additionalProperties": part()}, {"title": "t"}])
    if kind == "array":
        low = draw.randrange(3)
        high = draw.choice([{}, {"maxItems": low + draw.randrange(3)}])
        return {"type": draw.choice(["array", ["array", "null"]]), "items": inner(), "minItems": low} | high
    if kind == "tuple":
        parts = [part() for _ in range(draw.randrange(1, 4))]
        more = draw.choice([{}, {"items": inner()}, {"items": False}, {"maxItems": 2}])
        return {"type": "array", "prefixItems": parts, "minItems": draw.randrange(len(parts) + 1)} | more
    if kind == "map":
        return {"type": "object", "additionalProperties": inner()}
    if kind == "ref":
        return {"$ref": draw.choice(["#/$defs/one", "#/$defs/list"])}
    if kind == "joined":
        return draw.choice(
            [
                lambda: {"allOf": [record(a=part()), {"$ref": "#/$defs/one"}]},
                lambda: {"$ref": "#/$defs/one", "properties": {"a": part(), "b": part()}, "title": "t"},
                lambda: {"allOf": [record(a=part(), c=True), {"properties": {"a": {}, "d": part()}}], "type": "object"},
                lambda: {"type": "object", "anyOf": [record(a=inner()), record(c=part())], "properties": {"d": part()}},
                lambda: (
                    record(k={"enum": ["x", "y"]})
                    | {
                        "if": {"properties": {"k": {"const": "x"}}},
                        "then": record(a=inner()),
                        "else": {"required": ["c"]},
                    }
                ),
                lambda: {"type": "object", "properties": {"a": part(), "c": part()}, "dependentRequired": {"a": ["c"]}},
                lambda: {"type": "integer", "anyOf": [{"const": 4}, {"minimum": 6, "maximum": 8}]},
                lambda: {"allOf": [{"type": "number", "minimum": 3}, {"type": "integer", "maximum": 5}], "minimum": 2},
                lambda: {
                    "type": ["array", "integer"],
                    "anyOf": [{"items": inner(), "maxItems": 2}],
                    "maximum": 3,
                    "minimum": 1,
                },
            ]
        )()
    if kind == "any":
        return {draw.choice(["anyOf", "allOf"]): [inner()]} if draw.random() < 0.3 else {"anyOf": [inner(), part()]}
    return _leaf(draw)


def _enlarged(part: Any) -> Any:
    """The schema with LARGE added to each integer but counts."""
    if isinstance(part, dict):
        return {key: value if key in ("minItems", "maxItems") else _enlarged(value) for key, value in part.items()}
    if isinstance(part, list):
        return [_enlarged(each) for each in part]
    return part + LARGE if isinstance(part, int) and not isinstance(part, bool) else part


def _with_numbers_plus(step: int, text: str) -> str:
    return re.sub(r"\d+", lambda found: str(int(found[0]) + step), text)


def compare_with_small_numbers(seed: int, num_texts: int) -> int:
    """Texts of a random schema, and damaged ones, conform to it just as those with larger numbers conform to the same
    schema with larger numbers. Returns how many texts were compared."""
    draw = random.Random(seed)
    small = {
        **_schema(draw, 3),
        "$defs": {"one": record(b=_leaf(draw)), "list": {"type": "array", "items": _leaf(draw)}},
    }
    large, num_compared = _enlarged(small), 0
    try:
        COMPILER.compile("json", json.dumps(small))
    except RequestError as error:
        with pytest.raises(RequestError):
            COMPILER.compile("json", json.dumps(large))
        assert "nsatisfiable" in str(error), (error, small)
        return 0
    try:
        COMPILER.compile("json", json.dumps(large))
    except RequestError as error:
        assert "cannot be kept exact" in str(error), (error, small)
        return 0
    for i in range(num_texts):
        text = random_text(small, seed * 100 + i)
        if not text or re.search(r"\d[.eE\d]|-\d|\"[^\"]*\d", text):  # of other parts, as keys and any values
            continue
        num_compared += 1
        assert accepts_text(large, _with_numbers_plus(LARGE, text)), (small, text)
        at = draw.randrange(len(text))
        for bad in (text[:at] + draw.choice(' ,"}]{[1ax') + text[at:], text[:at] + text[at + 1 :]):
            if not re.search(r"\d[.eE\d]|-\d|\"[^\"]*\d", bad):
                assert accepts_text(large, _with_numbers_plus(LARGE, bad)) == accepts_text(small, bad), (small, bad)
    for i in range(num_texts):
        text = random_text(large, seed * 100 + i)
        if text and all(int(each) >= LARGE for each in re.findall(r"\d+", text)):
            num_compared += 1
            assert accepts_text(small, _with_numbers_plus(-LARGE, text)), (small, text)
            assert is_valid(adapted(large), json.loads(text)), (small, text)
    return num_compared


@pytest.mark.parametrize("seed", seeds(4, 36))
def test_around_large_numbers_texts_are_those_around_small_ones(seed: int) -> None:
    schemas, num_compared = itertools.count(100 * seed), 0
    while num_compared < 12:
        num_compared += compare_with_small_numbers(next(schemas), 4)
