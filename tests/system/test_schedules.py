"""No schedule changes an answer under any combination of sampling parameters."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from tokenloom import RequestOutput, SamplingParams, StructuredOutputsParams
from tokenloom.ipc.params.sampling_params import child_seed
from tokenloom.tests.support.sampling_reference import Wanted, scores
from tokenloom.tests.support.today import some
from tokenloom.tests.system.logprob_oracle import LogprobOracle
from tokenloom.tests.system.sampling_engine import (
    NEAR_TIE,
    SCHEDULES,
    folder,
    make_prompts,
    open_llm,
    oracle,
)

__all__ = ["folder", "oracle"]  # fixtures

COUNT, MAX_TOKENS = 12, 24
SCHEMA = {
    "type": "object",
    "properties": {"key": {"type": "string", "pattern": "^[a-zB%]{2,9}$"}, "number": {"type": "integer"}},
    "required": ["key", "number"],
    "additionalProperties": False,
}
FEATURES: dict[str, dict[str, object]] = {
    "logprobs": {"logprobs": 3, "prompt_logprobs": 2},
    "penalties": {"presence_penalty": 0.6, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
    "bad_words": {"bad_words": ["a", "th", "\u00e9", "B"], "logit_bias": {65: 2.0}},
    "n=3": {"n": 3},
    "stop strings": {"stop": ["q", "%", "zz"], "min_tokens": 3},
    "schema": {"structured_outputs": StructuredOutputsParams(json=SCHEMA)},
}
ALL_COMBINATIONS = [
    [name for bit, name in enumerate(FEATURES) if number >> bit & 1] for number in range(1 << len(FEATURES))
]


def pairwise(combinations: list[list[str]]) -> list[list[str]]:
    """Choose few combinations that cover, for any two features, both, neither, and each alone."""
    pairs = {
        (first, second, has_first, has_second)
        for first, second in itertools.combinations(FEATURES, 2)
        for has_first, has_second in itertools.product((False, True), repeat=2)
    }

    def shown(names: list[str]) -> set[tuple[str, str, bool, bool]]:
        return {pair for pair in pairs if (pair[0] in names, pair[1] in names) == pair[2:]}

    chosen: list[list[str]] = []
    while pairs:
        chosen.append(max(combinations, key=lambda names: len(shown(names))))
        pairs -= shown(chosen[-1])
    return chosen


PAIRWISE = pairwise(ALL_COMBINATIONS)
COMBINATIONS = [
    *some(PAIRWISE, num_today=4),
    *(pytest.param(names, marks=pytest.mark.nightly) for names in ALL_COMBINATIONS if names not in PAIRWISE),
]


def make_params(names: Sequence[str], count: int) -> list[SamplingParams]:
    fields = {key: value for name in names for key, value in FEATURES[name].items()}
    return [
        SamplingParams(temperature=(0.0, 2.5, 5.0)[i % 3], top_p=0.95, seed=i, max_tokens=MAX_TOKENS, **fields)  # type: ignore[arg-type]
        for i in range(count)
    ]


@pytest.mark.parametrize("names", COMBINATIONS, ids=lambda names: " ".join(names) or "plain")
def test_no_schedule_changes_an_answer(names: list[str], folder: Path, oracle: LogprobOracle) -> None:
    prompts, params = make_prompts(COUNT, len(names)), make_params(names, COUNT)
    with open_llm(folder, steps_in_flight=1, enable_prefix_caching=False) as llm:
        plain = [llm.generate([each], one, use_tqdm=False)[0] for each, one in zip(prompts, params, strict=True)]
    assert all(len(output.outputs) == one.n for output, one in zip(plain, params, strict=True))
    num_excuses = num_tokens = 0
    for schedule, options in SCHEDULES.items():
        with open_llm(folder, **options) as llm:
            if schedule == "prefix hit":
                llm.generate(prompts, SamplingParams(max_tokens=1), use_tqdm=False)
            outputs = llm.generate(prompts, params, use_tqdm=False)
        if schedule == "preempted":
            assert sum(output.metrics.num_preemptions for output in outputs) > 0
        if schedule == "prefix hit" and "logprobs" not in names:
            assert sum(output.num_cached_tokens > 0 for output in outputs) >= COUNT // 2
        for expected, found, one in zip(plain, outputs, params, strict=True):
            num_excuses += compare(oracle, expected, found, one)
            num_tokens += sum(len(answer.token_ids) for answer in found.outputs)
    assert num_excuses <= max(1, num_tokens // 1000)


def compare(oracle: LogprobOracle, expected: RequestOutput, found: RequestOutput, params: SamplingParams) -> int:
    """Check that two outputs are equal up to near ties; return the number of near ties."""
    num_excuses = 0
    assert found.finished and found.prompt_token_ids == expected.prompt_token_ids
    for mine, other in zip(expected.outputs, found.outputs, strict=True):
        if mine.token_ids != other.token_ids:
            check_near_tie(oracle, expected, mine.token_ids, other.token_ids, params, mine.index)
            num_excuses += 1
            continue
        for name in ("index", "text", "finish_reason", "stop_reason"):
            assert getattr(mine, name) == getattr(other, name)
        check_same_logprobs(mine.logprobs, other.logprobs)
    check_same_logprobs((expected.prompt_logprobs or [None])[1:], (found.prompt_logprobs or [None])[1:])
    return num_excuses


def check_same_logprobs(mine: Sequence[object] | None, other: Sequence[object] | None) -> None:
    assert (mine is None) == (other is None) and len(mine or ()) == len(other or ())
    for expected, found in zip(mine or (), other or (), strict=True):
        assert isinstance(expected, dict) and isinstance(found, dict)
        assert [each.logprob for each in found.values()] == pytest.approx(
            [each.logprob for each in expected.values()], abs=NEAR_TIE
        )
        assert next(iter(found)) == next(iter(expected)), "the token itself comes first"


def check_near_tie(
    oracle: LogprobOracle,
    output: RequestOutput,
    mine: list[int],
    other: list[int],
    params: SamplingParams,
    index: int,
) -> None:
    """Check that the first difference is a draw whose two scores are closer than NEAR_TIE."""
    i = next(i for i, (first, second) in enumerate(zip(mine, other, strict=False)) if first != second)
    prompt = output.prompt_token_ids
    logits = oracle.logprobs([*prompt, *mine[:i]])[-1].numpy()
    wanted = Wanted(
        temperature=params.temperature,
        top_p=1.0 if params.structured_outputs else params.top_p,  # top_p follows the mask, unknown here
        seed=child_seed(params.seed or 0, index),
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty,
        logit_bias=params.logit_bias or {},
    )
    found = scores(np.asarray(logits, np.float64), prompt, mine[:i], wanted)
    assert abs(found[mine[i]] - found[other[i]]) <= NEAR_TIE, f"token {i} is {other[i]}, alone it was {mine[i]}"
