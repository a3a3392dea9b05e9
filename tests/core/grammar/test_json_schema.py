"""Whatever a grammar made of a schema lets through conforms to the schema, as an independent validator has it."""

from __future__ import annotations

import decimal
import itertools
import json
import random
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pydantic
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLTokenizer

from tokenloom.core.grammar.compiler import GrammarCompiler
from tokenloom.core.grammar.json_schema import adapted
from tokenloom.core.grammar.look_ahead import without_look_ahead
from tokenloom.ipc.errors import RequestError

DEMO = Path(__file__).resolve().parents[3] / "demo"
EOS, MAX_STEPS = 1, 300
TOKENIZER = tokenizers.Tokenizer.from_file(str(DEMO / "tokenizer.json"))
COMPILER = GrammarCompiler(DEMO, 2048, [EOS])
Schema = dict[str, Any]

DIGIT: Schema = {"type": "integer", "minimum": 0, "maximum": 9}
WORD: Schema = {"type": "string", "maxLength": 4}
XY: Schema = {"enum": ["x", "y"]}


def accepts_text(schema: Schema, text: str, kind: Any = "json") -> bool:
    """Whether a text conforms to the grammar of `schema`."""
    matcher = COMPILER.compile(kind, json.dumps(schema))
    for token_id in TOKENIZER.encode(text, add_special_tokens=False).ids:
        matcher.consume([token_id])
        if matcher.error is not None:
            return False
    return bool(matcher.inner.is_accepting())


def accepts(schema: Schema, value: object) -> bool:
    """Whether a value's text, written as the library itself would, conforms to the grammar of `schema`."""
    return accepts_text(schema, json.dumps(value, ensure_ascii=False))


def random_text(schema: Schema, seed: int, end_chance: float = 0.5) -> str:
    """Return a random text of the grammar; "" if it has no end in sight. `end_chance`: to end it where that may be."""
    matcher, draw, taken = COMPILER.compile("json", json.dumps(schema)), random.Random(seed), list[int]()
    words = np.zeros(COMPILER.num_words, np.uint32)
    while not matcher.is_complete and len(taken) < MAX_STEPS:
        matcher.fill(words)
        assert matcher.error is None, matcher.error
        found = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist()
        if EOS in found and (len(found) == 1 or draw.random() < end_chance):
            break
        taken.append(draw.choice([each for each in found if each != EOS]))
        matcher.consume(taken[-1:])
    return TOKENIZER.decode(taken, skip_special_tokens=True) if matcher.inner.is_accepting() else ""


def answer(schema: Schema, seed: int) -> object:
    """Return a random value of the grammar, of a text that ends as soon as it may; None without an end in sight."""
    try:
        return json.loads(random_text(schema, seed, end_chance=1.0))
    except ValueError:
        return None


def record(**properties: object) -> Schema:
    return {"type": "object", "properties": properties, "required": list(properties)}


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


CLOSED: list[tuple[Schema, object, object]] = [  # a schema, a valid answer, an invalid one
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
]


@pytest.mark.parametrize(("schema", "good", "bad"), CLOSED)
def test_objects_and_tuples_are_closed_unless_they_say_otherwise(schema: Schema, good: object, bad: object) -> None:
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
    ("schema", "good", "bad"),
    [
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
        ({"type": ["string", "null"], "not": {"type": "null"}}, "b", None),
    ],
)
def test_keywords_that_the_library_lacks_act(schema: Schema, good: object, bad: object) -> None:
    assert accepts(schema, good)
    assert not accepts(schema, bad)


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


@pytest.mark.parametrize("pattern", ["^(a+)+$", "^(a|a)*$", "(a*)*(a*)*(a*)*!$", "(.*a){30}"])
def test_a_pattern_meets_keys_in_linear_time(pattern: str) -> None:
    schema = record(**{"a" * 5000 + "b": DIGIT}) | {"patternProperties": {pattern: DIGIT}}
    begun_at = time.thread_time()
    adapted(schema)
    assert time.thread_time() - begun_at < 5, "Python's re takes longer than the world is old"


@pytest.mark.parametrize("text", ["^(?=" + "[" * 20_000, "^" + "(?=a)" * 20_000, "^(?=" + "[a" * 20_000 + "\\" * 3])
def test_hostile_look_ahead_is_read_in_linear_time(text: str) -> None:
    def seconds(pattern: str) -> float:
        begun_at = time.thread_time()
        without_look_ahead(pattern)
        return time.thread_time() - begun_at

    assert min(seconds(text + text[1:]) for _ in range(3)) < 6 * min(seconds(text) for _ in range(3)) + 0.01


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


KEYWORDS: dict[str, tuple[object, str]] = {  # a value, and its effect: acts, annotates, or the error's words
    "$ref": ("#/$defs/a", "acts"),
    "$defs": ({"a": DIGIT}, "annotates"),
    "definitions": ({"a": DIGIT}, "annotates"),
    "$id": ("https://example.com/a", "annotates"),
    "id": ("a", "annotates"),
    "$schema": ("https://json-schema.org/draft/2020-12/schema", "annotates"),
    "$anchor": ("a", "annotates"),
    "$comment": ("a", "annotates"),
    "$vocabulary": ({}, "annotates"),
    "$dynamicRef": ("#a", r"\$dynamicRef"),
    "$dynamicAnchor": ("a", r"\$dynamicAnchor"),
    "$recursiveRef": ("#", r"\$recursiveRef is not served"),
    "$recursiveAnchor": (True, r"\$recursiveAnchor is not served"),
    "extends": ({}, "extends is not served"),
    "disallow": ("string", "disallow is not served"),
    "divisibleBy": (3, "divisibleBy is not served"),
    "x-guidance": ({"lenient": True}, "x-guidance is not served: use disable_any_whitespace"),
    "type": ("integer", "acts"),
    "enum": ([1], "acts"),
    "const": (1, "acts"),
    "nullable": (True, "annotates"),  # acts beside `type`
    "allOf": ([DIGIT], "acts"),
    "anyOf": ([DIGIT], "acts"),
    "oneOf": ([DIGIT], "acts"),
    "not": ({"pattern": "a"}, "not"),
    "if": (DIGIT, "annotates"),  # acts with `then` or `else`
    "then": (DIGIT, "then"),
    "else": (DIGIT, "else"),
    "properties": ({"a": DIGIT}, "acts"),
    "patternProperties": ({"a": DIGIT}, "acts"),
    "additionalProperties": (DIGIT, "acts"),
    "unevaluatedProperties": (DIGIT, "acts"),
    "propertyNames": (XY, "acts"),
    "required": (["a"], "acts"),
    "minProperties": (9, "acts"),
    "maxProperties": (0, "acts"),
    "dependentRequired": ({"a": ["b"]}, "acts"),
    "dependentSchemas": ({"a": {"required": ["b"]}}, "acts"),
    "dependencies": ({"a": ["b"]}, "acts"),
    "items": (DIGIT, "acts"),
    "prefixItems": ([DIGIT], "acts"),
    "additionalItems": (False, "annotates"),  # acts beside a list of items
    "unevaluatedItems": (False, "annotates"),
    "contains": (DIGIT, "acts"),
    "minContains": (2, "minContains"),
    "maxContains": (2, "maxContains"),
    "minItems": (9, "acts"),
    "maxItems": (0, "acts"),
    "uniqueItems": (True, "annotates"),  # acts on few values: docs/openai.md
    "minLength": (9, "acts"),
    "maxLength": (0, "acts"),
    "pattern": ("^z$", "acts"),
    "format": ("date", "acts"),
    "contentEncoding": ("base64", "annotates"),
    "contentMediaType": ("text/html", "annotates"),
    "contentSchema": ({}, "annotates"),
    "minimum": (9, "acts"),
    "maximum": (-9, "acts"),
    "exclusiveMinimum": (9, "acts"),
    "exclusiveMaximum": (-9, "acts"),
    "multipleOf": (3, "acts"),
    **dict.fromkeys(("title", "description", "default", "examples", "deprecated", "x-order"), ("a", "annotates")),
    **dict.fromkeys(("readOnly", "writeOnly"), (True, "annotates")),
}
SAMPLES: list[object] = [None, True, 5, "b", "ab", [], ["b"], {}, {"a": "b"}, {"c": 1}]


@pytest.mark.parametrize("keyword", KEYWORDS)
def test_each_keyword_acts_or_annotates_or_is_refused_by_name(keyword: str) -> None:
    value, effect = KEYWORDS[keyword]
    schema = {"$defs": {"a": DIGIT}, keyword: value}
    if effect not in ("acts", "annotates"):
        with pytest.raises(RequestError, match=effect):
            COMPILER.compile("json", json.dumps(schema))
        return
    taken = [accepts(schema, each) for each in SAMPLES]
    assert all(taken) == (effect == "annotates"), list(zip(SAMPLES, taken, strict=True))


def test_nullable_of_openapi_allows_null() -> None:
    assert accepts({"type": "integer", "nullable": True}, None)
    assert not accepts({"type": "integer", "nullable": False}, None)


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
    words = np.zeros(COMPILER.num_words, np.uint32)

    def seconds(length: int) -> float:
        matcher = COMPILER.compile("json", json.dumps({"type": "string", "minLength": length}))
        begun_at = time.thread_time()
        for token_id in TOKENIZER.encode(f'"{"ab" * length}"', add_special_tokens=False).ids:
            matcher.fill(words)
            matcher.consume([token_id])
        assert matcher.error is None
        return time.thread_time() - begun_at

    assert min(seconds(800) for _ in range(3)) < 16 * min(seconds(200) for _ in range(3)) + 0.01


def test_schemas_share_one_vocabulary_of_bytes() -> None:
    names = itertools.count()

    def adapt() -> object:
        properties, patterns = {f"name {next(names)}": {}}, {"^[ab]$": {"type": "integer"}}
        return adapted({"type": "object", "properties": properties, "patternProperties": patterns})

    def seconds(work: Callable[[], object]) -> float:
        begun_at = time.thread_time()
        work()
        return time.thread_time() - begun_at

    assert min(seconds(adapt) for _ in range(9)) < min(seconds(lambda: LLTokenizer("byte")) for _ in range(9))
