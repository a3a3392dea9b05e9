"""SamplingParams and PoolingParams refuse invalid values with a message that has the range."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import msgspec
import pytest

from tokenloom.ipc.errors import RequestError
from tokenloom.ipc.params.pooling_params import PoolingParams
from tokenloom.ipc.params.sampling_params import RepetitionDetectionParams, SamplingParams, child_seed

BAD = [
    ({"temperature": -0.1}, r"\[0, 100\]"),
    ({"temperature": math.nan}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"top_p": 0.0}, r"\(0, 1\]"),
    ({"top_p": 1.1}, r"\(0, 1\]"),
    ({"min_p": 1.5}, r"\[0, 1\]"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 1.5}, "top_k must be an integer"),
    ({"seed": 2**64}, "seed"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"min_tokens": 9, "max_tokens": 8}, "above max_tokens 8"),
    ({"stop": ""}, "at least 1 character"),
    ({"stop": 5}, "stop must be a list of strings, got 5"),
    ({"stop": ["a"] * 65}, "at most 64"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"stop_token_ids": list(range(257))}, "at most 256"),
    ({"cache_salt": ""}, "cache_salt"),
    ({"n": 0}, r"\[1, 128\]"),
    ({"best_of": 4}, "not offered"),
    ({"presence_penalty": 2.1}, r"\[-2, 2\]"),
    ({"frequency_penalty": -2.1}, r"\[-2, 2\]"),
    ({"repetition_penalty": 2**-127}, r"\[1.17549e-38, 100\]"),
    ({"logit_bias": {3: 101.0}}, r"logit_bias\[3\] must be in \[-100, 100\]"),
    ({"logit_bias": {-1: 1.0}}, "logit_bias"),
    ({"logit_bias": dict.fromkeys(range(1025), 1.0)}, "at most 1024"),
    ({"allowed_token_ids": []}, "at least 1|name at least 1"),
    ({"allowed_token_ids": [-1]}, "allowed_token_ids"),
    ({"allowed_token_ids": 7}, "allowed_token_ids must be a list of token ids, got 7"),
    ({"logit_bias": [(1, 2.0)]}, "logit_bias must be a dict"),
    ({"bad_words": "word"}, "bad_words must be a list of strings, got 'word'"),
    ({"bad_words": [" "]}, "not blank"),
    ({"bad_words": ["\x1c" * 10_000]}, r"bad_words holds .{80}: each"),
    ({"bad_words": ["a"] * 257}, "at most 256"),
    ({"logits_processors": ["a:b"] * 9}, "at most 8"),
    ({"logprobs": -2}, r"logprobs must be in \[-1"),
    ({"logprob_token_ids": [-1]}, "logprob_token_ids"),
    ({"logprob_token_ids": list(range(129))}, "at most 128"),
    ({"logprob_token_ids": [3, 4], "logprobs": 3}, "leave one out"),
    ({"thinking_token_budget": -2}, "thinking_token_budget"),
    ({"detokenize": False, "stop": ["x"]}, "use stop_token_ids"),
    ({"extra_args": {"a": {1, 2}}}, "dict of JSON values"),
    ({"extra_args": {"a": math.nan}}, "dict of JSON values"),
    ({"extra_args": {"a": 2**64}}, "JSON values"),
    ({"extra_args": {"a": "x" * 65536}}, "at most 65536"),
    ({"use_beam_search": True}, "LLM.beam_search"),
    ({"stream_interval": 5}, "stream_interval is 5, which is not offered"),
    ({"trace_decode_token_ids": []}, "trace_decode_token_ids is empty"),
    ({"trace_decode_token_ids": [-1, 5]}, "trace_decode_token_ids must be in"),
    ({"trace_decode_token_ids": [5], "n": 2}, "requires n=1, got 2"),
    ({"trace_decode_token_ids": [5], "structured_outputs": {"regex": "a"}}, "not supported with structured outputs"),
    ({"prompt_logprob_token_ids": [[5]]}, "use prompt_logprobs"),
    ({"repetition_detection": {"max_pattern_size": 3}}, r"min_count must be in \[2, 128\]"),
    ({"repetition_detection": {"max_pattern_size": 257, "min_count": 2}}, "max_pattern_size"),
    ({"repetition_detection": {"max_pattern_size": 2, "min_pattern_size": 3, "min_count": 2}}, "min_pattern_size"),
    ({"repetition_detection": 3}, "repetition_detection: Expected"),
    ({"_real_n": 2}, "give n alone"),
    ({"guided_decoding": {"regex": "a"}, "structured_outputs": {"regex": "a"}}, "former name"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"output_kind": "some"}, "cumulative, delta or final_only"),
]


@pytest.mark.parametrize(("fields", "message"), BAD)
def test_values_out_of_range_are_refused_with_the_range_also_if_they_are_assigned(
    fields: dict[str, object], message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        SamplingParams(**fields)  # type: ignore[arg-type]
    params = SamplingParams()
    for name, value in fields.items():
        setattr(params, name, value)
    with pytest.raises(RequestError, match=message):
        params.checked()


def test_later_changes_do_not_affect_a_checked_copy() -> None:
    params = SamplingParams(stop=["a"], stop_token_ids=[1], logit_bias={1: 1.0}, extra_args={"a": [1]})
    copies = [params.checked(), params.clone()]
    expected = params.clone()
    assert params.extra_args is not None and isinstance(params.stop, list)
    params.max_tokens, params.temperature = 5, 0.0
    params.stop.append("b")
    params.stop_token_ids, params.logit_bias[2] = [2], 2.0  # type: ignore[index]
    params.extra_args["a"].append(2)  # type: ignore[attr-defined]
    assert copies == [expected, expected]
    assert params.checked() == params != expected


def test_a_misspelt_name_is_an_error() -> None:
    with pytest.raises(AttributeError, match="max_token"):
        SamplingParams().max_token = 5  # type: ignore[attr-defined]
    with pytest.raises(TypeError, match="temprature"):
        SamplingParams(temprature=1.0)  # type: ignore[call-arg]


def test_none_means_the_default_in_from_optional() -> None:
    given = dict.fromkeys(("n", "temperature", "top_p", "min_tokens", "detokenize", "stop", "output_kind"))
    assert SamplingParams.from_optional(**given) == SamplingParams()
    assert SamplingParams.from_optional(max_tokens=None).max_tokens is None
    assert SamplingParams.from_optional(logit_bias={"7": 1.0, 8: 2.0}).logit_bias == {7: 1.0, 8: 2.0}
    with pytest.raises(RequestError, match=r"\['x', 'y'\]"):
        SamplingParams.from_optional(logit_bias={"x": 1.0, "5": 1.0, "y": 1.0})
    with pytest.raises(RequestError, match="keys are token ids"):
        SamplingParams.from_optional(logit_bias={"9" * 5000: 1.0})


def test_the_former_name_of_structured_outputs_is_the_same() -> None:
    assert SamplingParams(guided_decoding={"regex": "a"}) == SamplingParams(structured_outputs={"regex": "a"})  # type: ignore[arg-type]


def test_parameters_survive_a_round_trip() -> None:
    params = SamplingParams(thinking_token_budget=-1, extra_args={"a": [1, None, "b", {"c": 0.5}]}, skip_clone=True)
    frame = msgspec.msgpack.encode(params)
    assert msgspec.msgpack.decode(frame, type=SamplingParams) == params
    assert params.thinking_token_budget is None


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
def test_values_at_the_limits_are_accepted(fields: dict[str, object]) -> None:
    SamplingParams(**fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("seed", "index", "expected"), [(5, 0, 5), (5, 3, 8), (-2, 3, 1), (2**64 - 1, 1, 0), (2**64 - 2, 1, 2**64 - 1)]
)
def test_seeds_of_answers_are_consecutive_modulo_64_bits(seed: int, index: int, expected: int) -> None:
    assert child_seed(seed, index) == expected


def test_repetition_detection_accepts_any_object_with_the_fields() -> None:
    @dataclasses.dataclass
    class OfVllm:
        max_pattern_size: int = 4
        min_pattern_size: int = 2
        min_count: int = 3

    found = SamplingParams(repetition_detection=OfVllm()).repetition_detection  # type: ignore[arg-type]
    assert found == RepetitionDetectionParams(max_pattern_size=4, min_pattern_size=2, min_count=3)


@pytest.mark.parametrize("is_normal", [True, False])
def test_use_activation_is_another_name_of_normalize(is_normal: bool) -> None:
    params = PoolingParams(use_activation=is_normal, dimensions=8)
    assert params == PoolingParams(normalize=is_normal, dimensions=8) and params.use_activation is is_normal
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=PoolingParams) == params


@pytest.mark.parametrize(
    "wrong",
    [
        {"method": "median"},
        {"task": "rank"},
        {"truncate_prompt_tokens": 0},
        *({"dimensions": each} for each in (0, 1 << 21, 1.5, "8")),
    ],
)
def test_what_is_out_of_range_is_refused_by_name(wrong: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=f"^{next(iter(wrong))} "):
        PoolingParams(**wrong)
