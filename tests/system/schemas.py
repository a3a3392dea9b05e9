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
    "pattern": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"},
    "unicode pattern": {"type": "string", "pattern": "^[α-ω]{1,4}$"},
    "number in a range": {"type": "number", "minimum": -1.5, "maximum": 2.25},
    "multiple": {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 700},
    "mixed enum": {"enum": [1, "one", None, True, [1, 2], {"a": 1}]},
    "unicode enum": {"enum": ["é", "日本語", "😀", "naïve café", "Ω≈ç√"]},
    "enum with escapes": {"enum": ['say "hi"', "tab\there", "back\\slash", "line\nbreak"]},
    "const": {"const": {"version": 3, "name": "tokenloom"}},
    "ipv4": {"type": "string", "format": "ipv4"},
    "any of": {"anyOf": [{"type": "boolean"}, DIGIT, {"enum": ["x"]}]},
    "one of, disjoint": {"oneOf": [{"type": "string", "maxLength": 3}, DIGIT]},
    "all of": {"allOf": [record(a=DIGIT, b=DIGIT), {"type": "object", "properties": {"a": {"maximum": 4}}}]},
    "person": record(name=TEXT, age={"type": "integer", "minimum": 0, "maximum": 150}),
    "unicode names": record(None, **{"名前": TEXT, "größe": DIGIT, "emoji 😀": {"type": "boolean"}}),
    "order": record(
        id=DIGIT,
        lines=array(record(sku={"enum": ["A1", "B2"]}, count={"type": "integer", "minimum": 1, "maximum": 20}), 1),
        paid={"type": "boolean"},
    ),
    "array of arrays": array(array(array({"type": "boolean"}, 1, 2), 1, 2), 1, 2),
    "tuple": {
        "type": "array",
        "prefixItems": [DIGIT, {"enum": ["x", "y"]}, {"type": "null"}],
        "items": False,
        "minItems": 3,
        "maxItems": 3,
    },
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
    "expression by recursion": {
        "$defs": {"e": {"anyOf": [DIGIT, record(op={"enum": ["neg", "abs"]}, of={"$ref": "#/$defs/e"})]}},
        "$ref": "#/$defs/e",
    },
    "tool call": record(
        name={"const": "get_weather"},
        arguments=record(place=TEXT, unit={"enum": ["°C", "°F"]}, days={"type": "integer", "minimum": 1, "maximum": 7}),
    ),
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
