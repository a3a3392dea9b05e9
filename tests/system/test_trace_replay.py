"""Replayed answers: the given tokens are returned unchanged, with the model's logprobs for them."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tokenloom import FlatLogprobs, RequestError, SamplingParams
from tokenloom.tests.support.today import some
from tokenloom.tests.system.logprob_oracle import LogprobOracle
from tokenloom.tests.system.sampling_engine import (
    SCHEDULES,
    VOCAB_SIZE,
    folder,
    make_prompts,
    open_llm,
    oracle,
)
from tokenloom.tests.system.test_logprobs import check_output

__all__ = ["folder", "oracle"]  # fixtures

EOS = 2


@pytest.mark.parametrize("schedule", some(["plain", *SCHEDULES], num_today=2))
def test_replayed_tokens_have_the_models_logprobs(schedule: str, folder: Path, oracle: LogprobOracle) -> None:
    rng, prompts = random.Random(7), make_prompts(12, 1)
    traces = [[EOS, *rng.choices(range(VOCAB_SIZE), k=15), EOS] for _ in prompts]
    params = [
        SamplingParams(
            trace_decode_token_ids=trace,
            temperature=i % 3,
            top_k=1,
            max_tokens=None if i % 2 else 12,
            stop_token_ids=[trace[3]],
            bad_words=["a"],
            presence_penalty=1.0,
            min_tokens=3,
            logprobs=i % 4,
            prompt_logprobs=2,
        )
        for i, trace in enumerate(traces)
    ]
    with open_llm(folder, **SCHEDULES.get(schedule, {})) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    if schedule == "preempted":
        assert sum(output.metrics.num_preemptions for output in outputs) > 0
    for output, wanted, trace in zip(outputs, params, traces, strict=True):
        assert output.outputs[0].token_ids == trace[: wanted.max_tokens]
        assert output.outputs[0].finish_reason == "length"
        check_output(oracle, output, wanted.logprobs or 0, 2)


def test_a_replayed_answer_is_cut_at_max_model_len(folder: Path) -> None:
    trace, params = [5] * 9, SamplingParams(max_tokens=100)
    with open_llm(folder, max_model_len=16) as llm:
        params.trace_decode_token_ids = trace
        (output,) = llm.generate([[7] * 12], params, use_tqdm=False)
        assert output.outputs[0].token_ids == trace[:4]
        params.trace_decode_token_ids = [5, VOCAB_SIZE]
        with pytest.raises(RequestError, match=f"trace_decode_token_ids has {VOCAB_SIZE}, which are out-of-vocab"):
            llm.generate([[7]], params, use_tqdm=False)


def test_flat_logprobs_hold_the_same_values_in_columns(folder: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, logprobs=3, prompt_logprobs=2)
    with open_llm(folder) as llm:
        dicts, flat = llm.generate([[7, 8, 9]] * 2, [params, params.replace(flat_logprobs=True)], use_tqdm=False)
    found, of_prompt = flat.outputs[0].logprobs, flat.prompt_logprobs
    assert isinstance(found, FlatLogprobs) and list(found) == dicts.outputs[0].logprobs
    assert isinstance(of_prompt, FlatLogprobs) and list(of_prompt) == [{}, *(dicts.prompt_logprobs or ())[1:]]
    assert isinstance(found[1:3], FlatLogprobs) and list(found[1:3]) == list(found)[1:3] and found[-1] == list(found)[4]
    assert found.token_ids[found.start_indices[2] : found.end_indices[2]] == list(found[2])
