"""SamplingParams refuse what makes no sense, and the message holds the range."""

from __future__ import annotations

import math

import pytest

from tokenloom.ipc.errors import RequestError
from tokenloom.ipc.pooling_params import PoolingParams
from tokenloom.ipc.sampling_params import SamplingParams, child_seed

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
    ({"stop": 5}, "stop must be a list of strings, got 5"),
    ({"stop": ["a"] * 65}, "at most 64"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"stop_token_ids": list(range(257))}, "at most 256"),
    ({"cache_salt": ""}, "cache_salt"),
    ({"n": 0}, r"\[1, 128\]"),
    ({"n": 129}, r"\[1, 128\]"),
    ({"best_of": 4}, "not offered"),
    ({"n": 2, "best_of": 1}, "not offered"),
    ({"presence_penalty": 2.1}, r"\[-2, 2\]"),
    ({"frequency_penalty": -2.1}, r"\[-2, 2\]"),
    ({"repetition_penalty": 0.0}, r"\(0, 100\]"),
    ({"repetition_penalty": math.nan}, "repetition_penalty"),
    ({"logit_bias": {3: 101.0}}, r"logit_bias\[3\] must be in \[-100, 100\]"),
    ({"logit_bias": {-1: 1.0}}, "logit_bias"),
    ({"logit_bias": dict.fromkeys(range(1025), 1.0)}, "at most 1024"),
    ({"allowed_token_ids": []}, "at least 1|name at least 1"),
    ({"allowed_token_ids": [-1]}, "allowed_token_ids"),
    ({"allowed_token_ids": 7}, "allowed_token_ids must be a list of token ids, got 7"),
    ({"logit_bias": [(1, 2.0)]}, "logit_bias must be a dict"),
    ({"bad_words": "word"}, "bad_words must be a list of strings, got 'word'"),
    ({"bad_words": [" "]}, "not blank"),
    ({"bad_words": ["a"] * 257}, "at most 256"),
    ({"logits_processors": ["a:b"] * 9}, "at most 8"),
    ({"logprobs": -1}, "logprobs"),
    ({"prompt_logprobs": -1}, "prompt_logprobs"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
    ({"output_kind": "some"}, "cumulative, delta or final_only"),
]


@pytest.mark.parametrize(("fields", "message"), BAD)
def test_values_out_of_range_are_refused_with_the_range(fields: dict[str, object], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        SamplingParams(**fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("dimensions", [0, 1 << 21, 1.5, "many"])
def test_dimensions_that_cannot_be_are_refused(dimensions: object) -> None:
    with pytest.raises(RequestError, match="dimensions must be"):
        PoolingParams(dimensions=dimensions)  # type: ignore[arg-type]


def test_an_unknown_parameter_is_named() -> None:
    with pytest.raises(TypeError, match="temprature"):
        SamplingParams(temprature=1.0)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    "fields",
    [
        {"top_k": -1},
        {"top_k": 0},
        {"n": 128, "best_of": 128},
        {"logprobs": 0},
        {"logit_bias": {0: -100}},
        {"seed": -5},
        {"temperature": 0},
        {"top_p": 1},
    ],
)
def test_values_at_the_edge_are_taken(fields: dict[str, object]) -> None:
    SamplingParams(**fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("seed", "index", "expected"), [(5, 0, 5), (5, 3, 8), (-2, 3, 1), (2**64 - 1, 1, 0), (2**64 - 2, 1, 2**64 - 1)]
)
def test_the_seeds_of_answers_follow_each_other_within_64_bits(seed: int, index: int, expected: int) -> None:
    assert child_seed(seed, index) == expected
