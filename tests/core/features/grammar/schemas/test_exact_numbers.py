"""Numbers of schemas mean the same to the grammar as to Python, however large: exact, or narrower.

Where they are exact is tested in `test_lark_schema.py`."""

from __future__ import annotations

import json
import math
import random

import pytest

from tokenloom.core.features.grammar.schemas.exact_numbers import LARGEST, inexact_number, narrowed
from tokenloom.ipc.errors import RequestError
from tokenloom.tests.core.features.grammar.matching import COMPILER, Schema, accepts, answer
from tokenloom.tests.support.today import seeds

EDGES = [2**k + d for k in (31, 52, 53, 54, 60, 62, 63, 64) for d in (-1025, -2, -1, 0, 1, 2, 1025)]


@pytest.mark.parametrize("value", [2**53, -(2**53), 2**60, 10**22, 0.1, 1.10, -0.0, 1e300, 123456.789])
def test_values_that_can_be_exact_are(value: float) -> None:
    assert inexact_number(value) is None
    found = answer({"const": value}, 0)
    assert isinstance(found, int | float) and float(found) == value


@pytest.mark.parametrize("seed", [*seeds(20, 80), 739950015])  # the last: a maximum that is read as its fewest digits
def test_no_answer_leaves_the_bounds_where_they_cannot_be_exact(seed: int) -> None:
    draw = random.Random(seed)
    low, high = sorted(draw.choice((1, -1)) * draw.choice(EDGES) for _ in range(2))
    schema: Schema = {"type": draw.choice(["integer", "number"]), "multipleOf": 1}
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
    assert accepts(schema, 0) and accepts(schema, 2**53 + 1) and accepts(schema, 2**63 - 1)
    for bound in (low, high):
        assert isinstance(bound, float) or (accepts(schema, bound) and not accepts(schema, bound + (bound > 0) * 2 - 1))


def test_bounds_that_are_exact_stay() -> None:
    schema = {"type": "integer", "minimum": -(2**53) + 1, "exclusiveMaximum": 100, "multipleOf": 5}
    assert narrowed(schema) == schema


def test_a_bound_beyond_all_numbers_is_refused() -> None:
    for bound in (math.inf, -math.inf):
        with pytest.raises(RequestError, match="inf in minimum"):
            COMPILER.compile("json", json.dumps({"minimum": bound}))
