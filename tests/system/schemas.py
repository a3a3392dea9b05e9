"""JSON schemas that even a random model completes: bounded texts, arrays and numbers, and recursion that dies out."""

from __future__ import annotations

from typing import TypeAlias

Schema: TypeAlias = dict[str, object]

TEXT: Schema = {"type": "string", "maxLength": 12}
DIGIT: Schema = {"type": "integer", "minimum": 0, "maximum": 9}


def record(required: list[str] | None = None, /, **properties: object) -> Schema:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties) if required is None else required,
        "additionalProperties": False,
    }


def array(items: object, least: int = 0, most: int = 3) -> Schema:
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}


SCHEMAS: dict[str, Schema] = {
    "boolean": {"type": "boolean"},
    "null": {"type": "null"},
    "text": TEXT,
    "text of a length": {"type": "string", "minLength": 3, "maxLength": 5},
    "pattern": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"},
    "pattern with alternatives": {"type": "string", "pattern": "^(north|south)(east|west)?$"},
    "unicode pattern": {"type": "string", "pattern": "^[α-ω]{1,4}$"},
    "integer in a range": {"type": "integer", "minimum": -17, "maximum": 1203},
    "exclusive integer": {"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 3},
    "number in a range": {"type": "number", "minimum": -1.5, "maximum": 2.25},
    "multiple": {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 700},
    "enum": {"enum": ["red", "green", "blue"]},
    "mixed enum": {"enum": [1, "one", None, True, [1, 2], {"a": 1}]},
    "unicode enum": {"enum": ["é", "日本語", "😀", "naïve café", "Ω≈ç√"]},
    "enum with escapes": {"enum": ['say "hi"', "tab\there", "back\\slash", "line\nbreak"]},
    "const": {"const": {"version": 3, "name": "tokenloom"}},
    "ipv4": {"type": "string", "format": "ipv4"},
    "uuid": {"type": "string", "format": "uuid"},
    "date": {"type": "string", "format": "date"},
    "types": {"type": ["integer", "null"], "minimum": 0, "maximum": 99},
    "any of": {"anyOf": [{"type": "boolean"}, DIGIT, {"enum": ["x"]}]},
    "one of, disjoint": {"oneOf": [{"type": "string", "maxLength": 3}, DIGIT]},
    "all of": {"allOf": [record(a=DIGIT, b=DIGIT), {"type": "object", "properties": {"a": {"maximum": 4}}}]},
    "person": record(name=TEXT, age={"type": "integer", "minimum": 0, "maximum": 150}),
    "optional fields": record(["a"], a=DIGIT, b=TEXT, c={"type": "boolean"}),
    "unicode names": record(None, **{"名前": TEXT, "größe": DIGIT, "emoji 😀": {"type": "boolean"}}),
    "empty object": record(),
    "nested": record(a=record(b=record(c=record(d=record(e=DIGIT))))),
    "address": record(street=TEXT, city=TEXT, zip={"type": "string", "pattern": "^[0-9]{5}$"}),
    "order": record(
        id=DIGIT,
        lines=array(record(sku={"enum": ["A1", "B2"]}, count={"type": "integer", "minimum": 1, "maximum": 20}), 1),
        paid={"type": "boolean"},
    ),
    "array": array(DIGIT),
    "array of a length": array({"enum": ["a", "b"]}, 4, 4),
    "array of arrays": array(array(array({"type": "boolean"}, 1, 2), 1, 2), 1, 2),
    "tuple": {
        "type": "array",
        "prefixItems": [DIGIT, {"enum": ["x", "y"]}, {"type": "null"}],
        "items": False,
        "minItems": 3,
        "maxItems": 3,
    },
    "tuple with a tail": {
        "type": "array",
        "prefixItems": [{"type": "boolean"}],
        "items": DIGIT,
        "minItems": 1,
        "maxItems": 4,
    },
    "array or nothing": {"anyOf": [array(DIGIT, 1, 2), {"type": "null"}]},
    "map": {"type": "object", "additionalProperties": DIGIT, "maxProperties": 0},
    "map of patterns": {
        "type": "object",
        "patternProperties": {"^k[0-3]$": DIGIT},
        "properties": {"id": DIGIT},
        "required": ["id"],
        "additionalProperties": False,
        "maxProperties": 1,
    },
    "refs": {"$defs": {"p": record(x=DIGIT, y=DIGIT)}, **record(a={"$ref": "#/$defs/p"}, b={"$ref": "#/$defs/p"})},
    "list by recursion": {
        "$defs": {
            "node": record(v={"type": "boolean"}, next={"anyOf": [{"enum": [None, 0, 1, 2]}, {"$ref": "#/$defs/node"}]})
        },
        "$ref": "#/$defs/node",
    },
    "tree by recursion": {
        "$defs": {"tree": record(["leaf"], leaf=DIGIT, left={"$ref": "#/$defs/tree"})},
        "$ref": "#/$defs/tree",
    },
    "mutual recursion": {
        "$defs": {
            "a": record(["n"], n=DIGIT, b={"$ref": "#/$defs/b"}),
            "b": record(["m"], m={"type": "boolean"}, a={"$ref": "#/$defs/a"}),
        },
        "$ref": "#/$defs/a",
    },
    "expression by recursion": {
        "$defs": {"e": {"anyOf": [DIGIT, record(op={"enum": ["neg", "abs"]}, of={"$ref": "#/$defs/e"})]}},
        "$ref": "#/$defs/e",
    },
    "tool call": record(
        name={"const": "get_weather"},
        arguments=record(place=TEXT, unit={"enum": ["°C", "°F"]}, days={"type": "integer", "minimum": 1, "maximum": 7}),
    ),
    "tagged union": {
        "anyOf": [
            record(kind={"const": "circle"}, radius=DIGIT),
            record(kind={"const": "box"}, width=DIGIT, height=DIGIT),
        ]
    },
    "all kinds": record(
        s=TEXT,
        i={"type": "integer", "minimum": -5, "maximum": 5},
        f={"type": "number", "minimum": 0, "maximum": 1},
        b={"type": "boolean"},
        n={"type": "null"},
        e={"enum": ["ä", "ö"]},
        a=array(TEXT),
        o=record(inner=array({"type": "boolean"})),
    ),
}
assert len(SCHEMAS) >= 40
