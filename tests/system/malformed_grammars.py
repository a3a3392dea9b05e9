"""Thousands of malformed grammars, as mistaken or hostile users may send."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator

from tokenloom import StructuredOutputsParams
from tokenloom.ipc.params.structured_outputs import MAX_SCHEMA_DEPTH
from tokenloom.tests.system.schemas import SCHEMAS, Schema

_TYPES = ("objct", "strin", "int", "", "any", "Array")
_LARK = 'start: item+ "," tail?\nitem: WORD | "(" start ")"\ntail: /[0-9]{1,4}/\nWORD: /[a-z]+/\n'
_BROKEN_REGEXES = ("(", ")", "[", "a{2,1}", "*a", "(?P<", "[z-a]", "\\", "a**", "(?z)", "\\p{Nope}", "x{1001,1000}")


def deep_grammars() -> Iterator[StructuredOutputsParams]:
    """Yield grammars that are expensive to compile: depth, long chains, repetition, exponential growth; some valid."""
    chain = {f"d{i}": {"type": "array", "items": {"$ref": f"#/$defs/d{i + 1}"}} for i in range(3000)}
    yield StructuredOutputsParams(json={"$defs": {**chain, "d3000": {"type": "string"}}, "$ref": "#/$defs/d0x"})
    yield StructuredOutputsParams(json={"$defs": {**chain, "d3000": {"type": "string"}}, "$ref": "#/$defs/d0"})
    for rule in ("r", "T"):
        rules = "\n".join(f"{rule}{i}: {rule}{i + 1}" for i in range(12_000))
        yield StructuredOutputsParams(grammar=f'start: {rule}0\n{rules}\n{rule}12000: "a" | "b" /c{{3}}/')
    depth = MAX_SCHEMA_DEPTH - 1  # deeper ones are refused before they are sent
    yield StructuredOutputsParams(json='{"type":"array","items":' * depth + "{}" + "}" * depth)
    yield StructuredOutputsParams(json="[" * depth)
    yield StructuredOutputsParams(regex="(" * 50_000 + "a" + ")" * 50_000)
    yield StructuredOutputsParams(grammar="start: " + "(" * 50_000 + '"a"' + ")" * 50_000)
    yield StructuredOutputsParams(grammar="start: start")
    yield StructuredOutputsParams(json={"$ref": "#"})
    yield StructuredOutputsParams(json={"allOf": [{"$ref": "#"}]})
    terms = "\n".join(f"T{i}: T{i + 1} T{i + 1}" for i in range(40))
    yield StructuredOutputsParams(grammar=f'start: T0\n{terms}\nT40: "a"')
    yield StructuredOutputsParams(json={"enum": [f"v{i * 7919}" for i in range(15_000)]})
    yield StructuredOutputsParams(json={"type": "integer", "multipleOf": 99999989, "minimum": 1, "maximum": 10**18})
    both = [{"type": "string", "pattern": f"^.*a.{{{k}}}$"} for k in range(10, 30)]
    yield StructuredOutputsParams(json={"allOf": both})


def malformed_grammars(count: int, seed: int) -> list[StructuredOutputsParams]:
    """Return `count` grammars, most of them valid ones with a mutation; some may still be valid."""
    rng = random.Random(seed)
    makers = (_broken_text, _broken_schema, _broken_regex, _broken_lark, _noise)
    return [rng.choice(makers)(rng) for _ in range(count)]


def _broken_text(rng: random.Random) -> StructuredOutputsParams:
    text = json.dumps(SCHEMAS[rng.choice(list(SCHEMAS))], ensure_ascii=False)
    place = rng.randrange(len(text))
    return StructuredOutputsParams(
        json=text[:place] + rng.choice(["", "{", "]", '"', "\x00"]) + text[place + 1 :] + "!"
    )


def _broken_schema(rng: random.Random) -> StructuredOutputsParams:
    faults: list[Schema] = [
        {"type": rng.choice(_TYPES)},
        {"type": 5},
        {"enum": []},
        {"enum": "red"},
        {"$ref": f"#/$defs/{rng.randrange(1000)}"},
        {"$ref": "http://localhost:9/schema"},
        {"not": {"type": "null"}},
        {"pattern": rng.choice(_BROKEN_REGEXES), "type": "string"},
        {"minimum": 5, "maximum": rng.randrange(5), "type": "integer"},
        {"minLength": -1, "type": "string"},
        {"uniqueItems": True, "type": "array"},
        {"properties": [1, 2], "type": "object"},
        {"required": "a", "type": "object"},
        {"format": f"format-{rng.randrange(1000)}", "type": "string"},
    ]
    fault = rng.choice(faults)
    for _ in range(rng.randrange(4)):
        around: list[Schema] = [
            {"type": "array", "items": fault, "minItems": 1},
            {"type": "object", "properties": {"a/b": fault, "é": {}}, "required": ["a/b"]},
            {"allOf": [{}, fault]},
        ]
        fault = rng.choice(around)
    return StructuredOutputsParams(json=fault)


def _broken_regex(rng: random.Random) -> StructuredOutputsParams:
    good = rng.choice(["[a-z]+", "(ab|cd){1,3}", "\\d{4}", "é?"])
    return StructuredOutputsParams(regex=good * rng.randrange(3) + rng.choice(_BROKEN_REGEXES) + good)


def _broken_lark(rng: random.Random) -> StructuredOutputsParams:
    lines = _LARK.splitlines()
    fault = rng.randrange(5)
    if fault == 0:
        del lines[rng.randrange(len(lines))]
    elif fault == 1:
        lines.append(f"{rng.choice(['x', 'X', '%x', '@', ':'])}: {rng.choice(['missing', '(', '/(/', ''])} nowhere")
    else:
        line = rng.randrange(len(lines))
        place = rng.randrange(len(lines[line]))
        lines[line] = lines[line][:place] + rng.choice(['"', "(", "/", "|", "{", "\\"]) + lines[line][place + 1 :]
    return StructuredOutputsParams(grammar="\n".join(lines) + "\nunused: nowhere")


def _noise(rng: random.Random) -> StructuredOutputsParams:
    text = "".join(rng.choice('{}[]()"\\/:|*+?^$ \n\x01aZ0é😀%') for _ in range(rng.randrange(1, 200)))
    kind = rng.randrange(3)
    if kind == 0:
        return StructuredOutputsParams(json=text)
    return StructuredOutputsParams(regex=text + "(") if kind == 1 else StructuredOutputsParams(grammar=text + "(")
