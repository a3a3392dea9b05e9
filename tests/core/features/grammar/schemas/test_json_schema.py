"""Whatever a grammar made of a schema lets through conforms to the schema, as an independent validator has it."""

from __future__ import annotations

import decimal
import itertools
import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pydantic
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLTokenizer

from tokenloom.core.features.grammar.schemas.json_schema import adapted
from tokenloom.core.features.grammar.schemas.look_ahead import without_look_ahead
from tokenloom.ipc.errors import RequestError
from tokenloom.tests.core.features.grammar.matching import (
    COMPILER,
    TOKENIZER,
    Schema,
    accepts,
    allowed,
    answer,
    record,
)

DIGIT: Schema = {"type": "integer", "minimum": 0, "maximum": 9}
WORD: Schema = {"type": "string", "maxLength": 4}
XY: Schema = {"enum": ["x", "y"]}


LEAVES = st.sampled_from(
    [
        DIGIT,
        WORD,
        XY,
        {"type": "boolean"},
        {"const": 3},
        {"type": "string", "maxLength": 4, "format": "password"},
        {"type": "integer", "format": "int32", "minimum": 0, "maximum": 5},
        {"type": "string", "pattern": r"^(?!^[-+.]*$)[+-]?0*\d{0,2}\.?\d{0,2}$"},
        {"type": "string", "pattern": r"^(?=.*[ab])(?=.*\d)[a-d1-3]{2,3}$"},
        {"type": "string", "pattern": r"^(?!.*[xy])[w-z]{1,3}$"},
        {"enum": [1, 2, True, "a"], "not": {"enum": [1, "a"]}},
        {"type": ["integer", "null"], "minimum": 0, "maximum": 9, "not": {"type": "null"}},
        {"type": "array", "items": XY, "uniqueItems": True},
        {"type": "array", "items": {"type": "boolean"}, "uniqueItems": True, "minItems": 1},
        {"$ref": "#/$defs/point"},
    ]
)
X_NEEDS_B = record(k=XY) | {"if": {"properties": {"k": {"const": "x"}}}, "then": {"required": ["b"]}}
DEFINITIONS = {"point": record(px=DIGIT, py=DIGIT), "named": record(name=WORD), "keys": XY}


def _object(parts: dict[str, Schema], required: list[str], more: Schema) -> Schema:
    return {"type": "object", "properties": parts, "required": [each for each in required if each in parts]} | more


def nested(children: st.SearchStrategy[Schema]) -> st.SearchStrategy[Schema]:
    keys = st.sampled_from(["a", "b", "k"])
    objects = st.builds(
        _object,
        st.dictionaries(keys, children, max_size=3),
        st.lists(keys, max_size=2),
        st.sampled_from(
            [
                {},
                {"dependentRequired": {"a": ["b"]}},
                {"dependentSchemas": {"a": {"properties": {"z": DIGIT}, "required": ["z"]}}},
                {"if": {"required": ["a"]}, "then": {"required": ["b"]}},
                {"if": {"properties": {"k": {"const": "x"}}}, "then": {"required": ["b"]}, "else": {"required": ["a"]}},
                {"not": {"required": ["k"]}},
                {"allOf": [{"$ref": "#/$defs/named"}]},
                {"anyOf": [{"$ref": "#/$defs/named"}, record(other=DIGIT)]},
                {"unevaluatedProperties": False, "allOf": [{"$ref": "#/$defs/point"}]},
                {"minProperties": 1, "maxProperties": 4},
                {"patternProperties": {"^[kz]$": {"type": "integer", "maximum": 9, "minimum": 0}}},
                {"patternProperties": {"^[ab]": {"$ref": "#/$defs/point"}, "^[k]": XY}},
            ]
        ),
    )
    arrays = st.builds(
        lambda items, wanted, more: {"type": "array", "items": items, "maxItems": 3} | wanted | more,
        children,
        st.sampled_from([{}, {"contains": {"type": "integer"}}, {"contains": DIGIT, "minContains": 2}]),
        st.sampled_from([{}, {"minItems": 1}]),
    )
    maps = st.builds(
        lambda values, names: {
            "type": "object",
            "additionalProperties": values,
            "propertyNames": names,
            "maxProperties": 2,
        },
        children,
        st.sampled_from([XY, {"$ref": "#/$defs/keys"}, {"pattern": "^[ab]{2}$"}, {"minLength": 1, "maxLength": 2}, {}]),
    )
    choices = st.builds(lambda parts: {"anyOf": parts}, st.lists(children, min_size=1, max_size=2))
    tuples = st.builds(
        lambda parts: {"type": "array", "prefixItems": parts, "minItems": len(parts)},
        st.lists(children, min_size=1, max_size=2),
    )
    return st.one_of(objects, arrays, maps, choices, tuples)


@settings(max_examples=60, deadline=None)
@given(st.recursive(LEAVES, nested, max_leaves=6), st.integers(0, 2**32))
def test_every_answer_conforms(schema: Schema, seed: int) -> None:
    schema = schema | {"$defs": DEFINITIONS}
    try:
        values = [answer(schema, seed + i) for i in range(4)]
    except RequestError as error:  # contradictions and keywords without a replacement are refused
        assert re.search("nsatisfiable|no text|Unimplemented|only supported", str(error)), error
        return
    for value in values:
        if value is not None:
            jsonschema.Draft202012Validator(schema).validate(value)


VALUES: list[tuple[Schema, object, object]] = [  # a schema, a valid answer, an invalid one
    # objects and tuples are closed unless they say otherwise
    (record(a=DIGIT), {"a": 1}, {"a": 1, "b": 2}),
    ({"type": "object", "properties": {}}, {}, {"a": 1}),
    (record(a={"type": "object", "properties": {"b": DIGIT}}), {"a": {"b": 1}}, {"a": {"c": 1}}),
    ({"type": "object", "required": ["a"]}, {"a": [1]}, {"a": 1, "b": 1}),
    ({"allOf": [record(a=DIGIT), record(b=DIGIT)]}, {"a": 1, "b": 2}, {"a": 1, "b": 2, "c": 3}),
    ({"anyOf": [record(a=DIGIT), record(b=DIGIT)]}, {"b": 2}, {"a": 1, "b": 2}),
    (record(a=DIGIT) | {"anyOf": [record(b=DIGIT), record(c=DIGIT)]}, {"a": 1, "c": 2}, {"a": 1, "c": 2, "d": 1}),
    ({"$ref": "#/$defs/p", "$defs": {"p": record(x=DIGIT)}}, {"x": 1}, {"x": 1, "y": 1}),
    (
        {"allOf": [{"$ref": "#/$defs/p"}], "properties": {"y": DIGIT}, "$defs": {"p": record(x=DIGIT)}},
        {"y": 2, "x": 1},
        {"y": 2, "x": 1, "z": 1},
    ),
    ({"type": "array", "prefixItems": [DIGIT, DIGIT]}, [1, 2], [1, 2, 3]),
    ({"patternProperties": {"^k": DIGIT}, "type": "object"}, {"k1": 1}, {"x": 1}),
    (
        record(a=record(b=DIGIT)) | {"patternProperties": {"^a": record(c=XY)}},
        {"a": {"b": 1, "c": "x"}},
        {"a": {"b": 1}},
    ),
    (
        record(a=record(b=DIGIT)) | {"patternProperties": {"^a": record(c=XY)}},
        {"a": {"b": 1, "c": "x"}, "a2": {"c": "y"}},
        {"a": {"b": 1, "c": "x", "d": 2}},
    ),
    (
        record(a=DIGIT) | {"allOf": [{"properties": {"b": DIGIT}}], "unevaluatedProperties": WORD},
        {"a": 1, "b": 2, "c": "d"},
        {"a": 1, "c": 2},
    ),
    # keywords that the library lacks
    ({"type": "array", "items": XY, "uniqueItems": True}, ["y", "x"], ["x", "x"]),
    ({"type": "object", "propertyNames": XY, "additionalProperties": DIGIT}, {"y": 1}, {"z": 1}),
    (
        {"type": "object", "propertyNames": {"format": "date"}, "additionalProperties": DIGIT},
        {"2026-02-28": 1},
        {"x": 1},
    ),
    (
        {"type": "object", "propertyNames": {"format": "date-time"}, "additionalProperties": DIGIT},
        {"2026-02-28T23:59:00Z": 1},
        {"2026-02-28": 1},
    ),
    (record(a=WORD) | {"dependentRequired": {"a": ["b"]}}, {"a": "", "b": 0}, {"a": ""}),
    (X_NEEDS_B, {"k": "x", "b": 1}, {"k": "x"}),
    (X_NEEDS_B, {"k": "y"}, {"k": "z"}),
    ({"type": "array", "items": {"type": ["integer", "string"]}, "contains": {"const": 3}}, [3, "a"], ["a"]),
    ({"enum": ["a", "b"], "not": {"const": "a"}}, "b", "a"),
    ({"enum": [1, 2], "not": {"const": 1.0}}, 2, 1),
    ({"enum": [1, True], "not": {"const": 1}}, True, 1),
    ({"type": ["string", "null"], "not": {"type": "null"}}, "b", None),
    ({"type": "integer", "nullable": True}, None, "a"),
    ({"type": "integer", "nullable": False}, 1, None),
]


@pytest.mark.parametrize(("schema", "good", "bad"), VALUES)
def test_a_schema_accepts_its_values_and_is_closed_unless_it_says_otherwise(
    schema: Schema, good: object, bad: object
) -> None:
    assert accepts(schema, good)
    assert not accepts(schema, bad)


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({"type": "object"}, {"a": 1}),
        ({}, {"a": 1}),
        (record(a={"type": "object"}), {"a": {"b": 1}}),
        (record(a=DIGIT) | {"additionalProperties": True}, {"a": 1, "b": 2}),
        (record(a=DIGIT) | {"unevaluatedProperties": True}, {"a": 1, "b": 2}),
        (record(a=DIGIT) | {"minProperties": 2}, {"a": 1, "b": 2}),
        ({"type": "array"}, [1, {"a": 1}]),
        ({"type": "array", "prefixItems": [DIGIT], "minItems": 2}, [1, 2]),
    ],
)
def test_what_says_otherwise_or_nothing_stays_open(schema: Schema, value: object) -> None:
    assert accepts(schema, value)


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"items": {"not": {"pattern": "a"}}}, 'at #/items: Unimplemented keys: ["not"]'),
        ({"type": "array", "contains": {}, "maxContains": 2}, "maxContains"),
        ({"type": "object", "propertyNames": {"not": {"const": "a"}}}, "propertyNames"),
        ({"type": "string", "pattern": "a(?=b)"}, "look-ahead"),
    ],
)
def test_keywords_without_a_replacement_are_refused_by_name(schema: Schema, words: str) -> None:
    with pytest.raises(RequestError) as caught:
        COMPILER.compile("json", json.dumps(schema))
    assert words in str(caught.value)


PATTERNS = [
    r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$",
    r"^(?!^[-+.]*$)[+-]?0*(?:\d{0,3}|(?=[\d.]{1,4}0*$)\d{0,3}\.\d{0,3}0*$)$",
    r"^(?=.*[A-Z])(?=.*\d).{2,}$",
    r"^(?!\s*$).+$",
    r"^(?!$)[a-z]*$",
    r"^(?!.*[ .])[-+a-z ]*$",
]


@given(st.sampled_from(PATTERNS), st.text(alphabet="+-.0012aA z", max_size=7))
def test_a_pattern_without_look_ahead_finds_the_same(pattern: str, text: str) -> None:
    parts = without_look_ahead(pattern)
    assert not any("(?=" in part or "(?!" in part for part in parts)
    assert all(re.search(part, text) for part in parts) == (re.search(pattern, text) is not None)


@pytest.mark.parametrize("pattern", [r"a(?=b)", r"^(?!ab)c", r"(?!^[-+.]*$)a", r"^(?=a"])
def test_other_look_ahead_is_left(pattern: str) -> None:
    assert without_look_ahead(pattern) == [pattern]


class Everyday(pydantic.BaseModel):
    amount: decimal.Decimal
    path: Path
    secret: pydantic.SecretStr
    url: pydantic.AnyUrl
    data: bytes
    words: set[str]
    counts: dict[str, int]


def test_pydantics_everyday_types_compile_and_are_not_changed_when_they_say_all() -> None:
    schema = Everyday.model_json_schema()
    COMPILER.compile("json", json.dumps(schema))
    closed = record(a=DIGIT) | {"additionalProperties": False}
    assert adapted(closed) == closed


def test_a_schema_that_refers_to_itself_in_all_its_parts_ends() -> None:
    chain: Callable[[int], Schema] = lambda i: {"allOf": [{"$ref": f"#/$defs/d{i}"}, {"$ref": f"#/$defs/d{i}"}]}  # noqa: E731
    schema = {"$defs": {f"d{i}": chain(i + 1) for i in range(30)} | {"d30": record(a=DIGIT)}, **chain(0)}
    assert len(json.dumps(adapted(schema))) < 10_000_000
    adapted({"allOf": [{"$ref": "#"}, {"properties": {"a": {}}}]})


def repeated(depth: int, num_times: int = 64) -> Schema:
    """A small schema with parts that are repeated num_times ** depth times."""
    return DIGIT if not depth else {"type": "array", "contains": repeated(depth - 1), "minContains": num_times}


def conditional(depth: int) -> Schema:
    """A schema that doubles at each level."""
    condition: Schema = {"type": "object", "if": {"required": ["a", "b"]}}
    return DIGIT if not depth else condition | {"then": {"properties": {"a": conditional(depth - 1)}}, "else": {}}


LONG = {"enum": ["x" * 100] * 1000}
HOSTILE: dict[str, Schema] = {
    "contains": repeated(6),
    "contains of much text": {"type": "array", "contains": LONG, "minContains": 64},
    "if": conditional(30),
    "dependencies": record(**{f"k{i}": DIGIT for i in range(400)})
    | {
        "dependentSchemas": {f"k{i}": {"$ref": "#/$defs/all"} for i in range(400)},
        "$defs": {"all": record(**{f"k{i}": DIGIT for i in range(400)})},
    },
    "names of a reference": {
        "$defs": {"big": record(**{f"k{i}": DIGIT for i in range(2000)})},
        "anyOf": [{"properties": {"x": {"$ref": "#/$defs/big"}}} for _ in range(2000)],
    },
    "patterns": record(**{f"k{i}": DIGIT for i in range(2000)})
    | {"patternProperties": {f"^{i}": XY for i in range(2000)}},
    "arrangements": {
        "type": "array",
        "items": {"enum": [f"{i}" + "x" * 20_000 for i in range(5)]},
        "uniqueItems": True,
    },
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_small_schema_with_a_huge_translation_is_refused_with_its_place_and_the_numbers(name: str) -> None:
    with pytest.raises(RequestError, match=r"structured_outputs.json( at #\S*)?: more than \d+ (parts|MiB|s) "):
        COMPILER.compile("json", json.dumps(HOSTILE[name]))


def fastest_s(work: Callable[[], object], num_runs: int = 3) -> float:
    """Return the CPU seconds of the fastest of some runs."""
    seconds = []
    for _ in range(num_runs):
        begun_at = time.thread_time()
        work()
        seconds.append(time.thread_time() - begun_at)
    return min(seconds)


@pytest.mark.parametrize("pattern", ["^(a+)+$", "^(a|a)*$", "(a*)*(a*)*(a*)*!$", "(.*a){30}"])
def test_a_pattern_meets_keys_in_linear_time(pattern: str) -> None:
    schema = record(**{"a" * 5000 + "b": DIGIT}) | {"patternProperties": {pattern: DIGIT}}
    assert fastest_s(lambda: adapted(schema), 1) < 5, "Python's re takes longer than the world is old"


@pytest.mark.parametrize("text", ["^(?=" + "[" * 20_000, "^" + "(?=a)" * 20_000, "^(?=" + "[a" * 20_000 + "\\" * 3])
def test_hostile_look_ahead_is_read_in_linear_time(text: str) -> None:
    twice = fastest_s(lambda: without_look_ahead(text + text[1:]))
    assert twice < 6 * fastest_s(lambda: without_look_ahead(text)) + 0.01


ENDLESS_KEYS: list[tuple[Schema, object]] = [
    (record(score=DIGIT) | {"patternProperties": {"^score$": DIGIT}}, {"score": 5}),
    (
        record(a=DIGIT, b=DIGIT) | {"patternProperties": {"^[ab]$": {"minimum": 3}, "^a$": {"maximum": 6}}},
        {"a": 4, "b": 9},
    ),
    (record(a=DIGIT) | {"patternProperties": {"^[ab]$": DIGIT}}, {"a": 4, "b": 9}),
    ({"type": "object", "required": ["x1"], "patternProperties": {"^x": DIGIT}}, {"x1": 5, "x2": 6}),
    ({"type": "object", "properties": {"a": DIGIT}, "patternProperties": {"^a$": XY}}, {}),
    *(
        (
            {"$defs": {"x": {"properties": {"a": {}}}}, "type": "object", "patternProperties": {pattern: DIGIT}}
            | joined,
            {"a": 5},
        )
        for pattern in ("^a$", "^(a|b)$")
        for joined in (
            {"$ref": "#/$defs/x"},
            {"$ref": "#/$defs/x", "required": ["a"]},
            {"allOf": [{"$ref": "#/$defs/x"}, {"anyOf": [{"properties": {"b": {}, "a": XY}}, {"required": ["a"]}]}]},
        )
    ),
]


@pytest.mark.parametrize("is_closed", [True, False])
@pytest.mark.parametrize(("schema", "value"), ENDLESS_KEYS)
def test_patterns_that_match_properties_lead_to_no_dead_end(schema: Schema, value: object, is_closed: bool) -> None:
    schema = schema | ({"additionalProperties": False} if is_closed else {})
    assert accepts(schema, value)
    assert not accepts(schema, {"a": "none of these"})
    for seed in range(12):
        found = answer(schema, seed)  # fails if a mask leaves nothing
        if found is not None:
            jsonschema.Draft202012Validator(schema).validate(found)


ACTING: dict[str, object] = {
    "$ref": "#/$defs/a",
    "type": "integer",
    "enum": [1],
    "const": 1,
    "allOf": [DIGIT],
    "anyOf": [DIGIT],
    "oneOf": [DIGIT],
    "properties": {"a": DIGIT},
    "patternProperties": {"a": DIGIT},
    "additionalProperties": DIGIT,
    "unevaluatedProperties": DIGIT,
    "propertyNames": XY,
    "required": ["a"],
    "minProperties": 9,
    "maxProperties": 0,
    "dependentRequired": {"a": ["b"]},
    "dependentSchemas": {"a": {"required": ["b"]}},
    "dependencies": {"a": ["b"]},
    "items": DIGIT,
    "prefixItems": [DIGIT],
    "contains": DIGIT,
    "minItems": 9,
    "maxItems": 0,
    "minLength": 9,
    "maxLength": 0,
    "pattern": "^z$",
    "format": "date",
    "minimum": 9,
    "maximum": -9,
    "exclusiveMinimum": 9,
    "exclusiveMaximum": -9,
    "multipleOf": 3,
}
ANNOTATING: dict[str, object] = {
    "$defs": {"a": DIGIT},
    "definitions": {"a": DIGIT},
    "$id": "https://example.com/a",
    "id": "a",
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "$anchor": "a",
    "$comment": "a",
    "$vocabulary": {},
    "nullable": True,  # acts beside `type`
    "if": DIGIT,  # acts with `then` or `else`
    "additionalItems": False,  # acts beside a list of items
    "unevaluatedItems": False,
    "uniqueItems": True,  # acts on few values: docs/reference/openai.md
    "contentEncoding": "base64",
    "contentMediaType": "text/html",
    "contentSchema": {},
    **dict.fromkeys(("title", "description", "default", "examples", "deprecated", "x-order"), "a"),
    **dict.fromkeys(("readOnly", "writeOnly"), True),
}
REFUSED: dict[str, tuple[object, str]] = {  # a value, and the words of the error
    "$dynamicRef": ("#a", r"\$dynamicRef"),
    "$dynamicAnchor": ("a", r"\$dynamicAnchor"),
    "$recursiveRef": ("#", r"\$recursiveRef is not served"),
    "$recursiveAnchor": (True, r"\$recursiveAnchor is not served"),
    "extends": ({}, "extends is not served"),
    "disallow": ("string", "disallow is not served"),
    "divisibleBy": (3, "divisibleBy is not served"),
    "x-guidance": ({"lenient": True}, "x-guidance is not served: use disable_any_whitespace"),
    "not": ({"pattern": "a"}, "not"),
    "then": (DIGIT, "then"),
    "else": (DIGIT, "else"),
    "minContains": (2, "minContains"),
    "maxContains": (2, "maxContains"),
}
SAMPLES: list[object] = [None, True, 5, "b", "ab", [], ["b"], {}, {"a": "b"}, {"c": 1}]


@pytest.mark.parametrize("keyword", [*ACTING, *ANNOTATING, *REFUSED])
def test_each_keyword_acts_or_annotates_or_is_refused_by_name(keyword: str) -> None:
    value, words = REFUSED.get(keyword, ((ACTING | ANNOTATING).get(keyword), None))
    schema = {"$defs": {"a": DIGIT}, keyword: value}
    if words is not None:
        with pytest.raises(RequestError, match=words):
            COMPILER.compile("json", json.dumps(schema))
        return
    taken = [accepts(schema, each) for each in SAMPLES]
    assert all(taken) == (keyword in ANNOTATING), list(zip(SAMPLES, taken, strict=True))


@pytest.mark.parametrize(("low", "high"), [(-37, 150), (0, 255), (1900, 2100), (99, 101), (-1, 0)])
def test_a_range_of_integers_has_its_numbers_and_no_other(low: int, high: int) -> None:
    """mlc-ai/xgrammar#661."""
    schema: Schema = {"type": "integer", "minimum": low, "maximum": high}
    edges = (low, high, low // 10, high // 10, low * 10, high * 10, -low, -high, 0)
    for value in {edge + around for edge in edges for around in (-10, -2, -1, 0, 1, 2, 10)}:
        assert accepts(schema, value) is (low <= value <= high), value


@pytest.mark.parametrize(
    ("text", "fits"), [("ab", False), ("abc", True), ("abcde", True), ("abcdef", False), ("ABC", False), ("", False)]
)
def test_a_pattern_and_a_length_hold_together(text: str, fits: bool) -> None:
    """mlc-ai/xgrammar#683."""
    assert accepts({"type": "string", "pattern": "^[a-z]+$", "minLength": 3, "maxLength": 5}, text) is fits


A_IS_B_IS_A = {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}


@pytest.mark.parametrize("schema", [{"$ref": "#"}, A_IS_B_IS_A, {"allOf": [{"$ref": "#"}]}], ids=str)
def test_a_reference_that_leads_to_itself_alone_is_refused(schema: Schema) -> None:
    """mudler/LocalAI#11020."""
    with pytest.raises(RequestError, match="no text of finite length conforms to it"):
        COMPILER.compile("json", json.dumps(schema))
    tree = record(left={"anyOf": [{"$ref": "#"}, {"type": "null"}]})
    assert accepts(tree, {"left": {"left": None}})


@pytest.mark.parametrize(
    ("schema", "longest"),
    [
        ({"type": "string", "maxLength": 10_000}, "x" * 10_000),
        ({"type": "array", "items": DIGIT, "maxItems": 1998}, [1] * 1998),
    ],
    ids=["maxLength", "maxItems"],
)
def test_a_large_length_is_exact(schema: Schema, longest: Any) -> None:
    """unslothai/unsloth#9888."""
    assert accepts(schema, longest)
    assert not accepts(schema, longest + longest[:1])


def test_masks_of_a_least_length_take_time_in_proportion_to_the_text() -> None:
    """mlc-ai/xgrammar#805."""

    def write(length: int) -> None:
        matcher = COMPILER.compile("json", json.dumps({"type": "string", "minLength": length}))
        for token_id in TOKENIZER.encode(f'"{"ab" * length}"', add_special_tokens=False).ids:
            assert token_id in allowed(matcher)
            matcher.consume([token_id])

    assert fastest_s(lambda: write(800)) < 16 * fastest_s(lambda: write(200)) + 0.01


def test_schemas_share_one_vocabulary_of_bytes() -> None:
    names = itertools.count()

    def adapt() -> object:
        properties, patterns = {f"name {next(names)}": {}}, {"^[ab]$": {"type": "integer"}}
        return adapted({"type": "object", "properties": properties, "patternProperties": patterns})

    assert fastest_s(adapt, 9) < fastest_s(lambda: LLTokenizer("byte"), 9)
