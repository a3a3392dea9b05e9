"""SamplingParams refuse what makes no sense, and the message holds the range."""

from __future__ import annotations

import math

import pytest

from tokenloom.ipc.errors import RequestError
from tokenloom.ipc.sampling_params import SamplingParams

BAD = [
    ({"temperature": -0.1}, r"\[0, 100\]"),
    ({"temperature": math.nan}, "temperature"),
    ({"temperature": math.inf}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"top_p": 0.0}, r"\(0, 1\]"),
    ({"top_p": 1.1}, r"\(0, 1\]"),
    ({"top_p": math.nan}, "top_p"),
    ({"min_p": -0.1}, r"\[0, 1\]"),
    ({"min_p": 1.5}, r"\[0, 1\]"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 1.5}, "top_k must be an integer"),
    ({"seed": 2**64}, "seed"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"min_tokens": 9, "max_tokens": 8}, "above max_tokens 8"),
    ({"stop": ""}, "at least 1 character"),
    ({"stop": ["a"] * 65}, "at most 64"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"stop_token_ids": list(range(257))}, "at most 256"),
    ({"cache_salt": ""}, "cache_salt"),
]


@pytest.mark.parametrize(("fields", "message"), BAD)
def test_values_out_of_range_are_refused_with_the_range(fields: dict[str, object], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        SamplingParams(**fields)  # type: ignore[arg-type]


def test_an_unknown_parameter_is_named() -> None:
    with pytest.raises(TypeError, match="temprature"):
        SamplingParams(temprature=1.0)  # type: ignore[call-arg]


@pytest.mark.parametrize("fields", [{"top_k": -1}, {"top_k": 0}, {"seed": -5}, {"temperature": 0}, {"top_p": 1}])
def test_values_at_the_edge_are_taken(fields: dict[str, object]) -> None:
    SamplingParams(**fields)  # type: ignore[arg-type]
