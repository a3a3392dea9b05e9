"""Numbers of schemas mean the same to the grammar as to Python, however large: exact, narrower, or refused by name."""

from __future__ import annotations

import json
import math
import random

import pytest

from tokenloom.core.grammar.exact_numbers import LARGEST, exact_bounds, inexact_number
from tokenloom.ipc.errors import RequestError
from tokenloom.tests.core.grammar.test_json_schema import COMPILER, Schema, accepts, answer, record

EDGES = [2**k + d for k in (31, 52, 53, 54, 60, 62, 63, 64) for d in (-1025, -2, -1, 0, 1, 2, 1025)]


@pytest.mark.parametrize("value", [2**53 + 1, -(2**53) - 1, 1234567890123456789, 2**64 - 1, 2**64, 10**25 + 1, 10**400])
@pytest.mark.parametrize("around", [lambda n: {"const": n}, lambda n: {"enum": [1, {"a": [n]}]}])
def test_an_id_that_would_become_another_is_refused_with_its_place(value: int, around: object) -> None:
    schema = record(id=around(value))  # type: ignore[operator]
    where = (
        r"at #/properties/id: -?\d+ in (const|enum) cannot be kept exact, .* make it a text, \{\"type\": \"string\"\}"
    )
    with pytest.raises(RequestError, match=where):
        COMPILER.compile("json", json.dumps(schema))


@pytest.mark.parametrize("value", [2**53, -(2**53), 2**60, 10**22, 0.1, 1.10, -0.0, 1e300, 123456.789])
def test_values_that_can_be_exact_are(value: float) -> None:
    assert inexact_number(value) is None
    found = answer({"const": value}, 0)
    assert isinstance(found, int | float) and float(found) == value


@pytest.mark.parametrize("seed", range(60))
def test_no_answer_leaves_the_bounds_however_large(seed: int) -> None:
    draw = random.Random(seed)
    low, high = sorted(draw.choice((1, -1)) * draw.choice(EDGES) for _ in range(2))
    schema: Schema = {"type": draw.choice(["integer", "number"])}
    schema |= draw.choice([{"minimum": low}, {"exclusiveMinimum": low}, {}])
    schema |= draw.choice([{"maximum": high}, {"exclusiveMaximum": high}, {}])
    try:
        found = [answer(schema, seed * 100 + i) for i in range(6)]
    except RequestError as error:  # narrow ranges may hold no float64
        assert "nsatisfiable" in str(error), error
        assert high - low < 1 << 12 or min(abs(low), abs(high)) >= LARGEST
        return
    for value in found:
        if isinstance(value, int):
            assert value >= schema.get("minimum", value) and value <= schema.get("maximum", value)
            assert value > schema.get("exclusiveMinimum", value - 1) and value < schema.get(
                "exclusiveMaximum", value + 1
            )


@pytest.mark.parametrize(
    ("low", "high"),
    [
        (-(2**63), 2**63 - 1),
        (0, 2**64 - 1),
        (-3.4028235e38, 3.4028235e38),
        (-1.7976931348623157e308, 1.7976931348623157e308),
    ],
)
@pytest.mark.parametrize("kind", ["integer", "number"])
def test_the_bounds_of_machine_types_are_served(kind: str, low: float, high: float) -> None:
    schema = {"type": kind, "minimum": low, "maximum": high}
    assert accepts(schema, 0) and accepts(schema, 2**53 + 1) and accepts(schema, LARGEST)


def test_bounds_that_are_exact_stay() -> None:
    schema = {"type": "integer", "minimum": -(2**53) + 1, "exclusiveMaximum": 100, "multipleOf": 5}
    before = dict(schema)
    exact_bounds(schema)
    assert schema == before


def test_a_bound_beyond_all_numbers_is_refused() -> None:
    for bound in (math.inf, -math.inf):
        with pytest.raises(RequestError, match="inf in minimum"):
            COMPILER.compile("json", json.dumps({"minimum": bound}))
