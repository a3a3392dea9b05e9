"""Logprobs of a whole engine equal transformers' under every schedule, and take bounded memory."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tokenloom import LLM, CompletionOutput, RequestOutput, SamplingParams
from tokenloom.tests.support.checkpoints import tiny_checkpoint
from tokenloom.tests.support.today import some
from tokenloom.tests.system.logprob_oracle import LogprobOracle, check_token
from tokenloom.tests.system.sampling_engine import (
    SCHEDULES,
    VOCAB_SIZE,
    folder,
    llm,
    make_prompts,
    open_llm,
    oracle,
)

__all__ = ["folder", "llm", "oracle"]  # fixtures


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """An engine of a model with a large vocabulary."""
    folder = tiny_checkpoint(tmp_path_factory.mktemp("wide") / "m", "llama", vocab_size=151_936)
    options: dict[str, object] = {"max_model_len": 1024, "enable_prefix_caching": False, "max_num_batched_tokens": 2048}
    with open_llm(folder, max_logprobs=-1, **options) as llm:
        yield llm


@pytest.mark.parametrize("schedule", some(["plain", *SCHEDULES], num_today=2))
def test_logprobs_of_prompts_and_answers_equal_transformers(schedule: str, folder: Path, oracle: LogprobOracle) -> None:
    prompts = make_prompts(12, 1)
    params = [
        SamplingParams(
            temperature=i % 2 * 4, seed=i, max_tokens=16, ignore_eos=True, logprobs=i % 7, prompt_logprobs=i % 5
        )
        for i in range(12)
    ]
    with open_llm(folder, **SCHEDULES.get(schedule, {})) as llm:
        if schedule == "prefix hit":
            llm.generate(prompts, SamplingParams(max_tokens=1), use_tqdm=False)
        outputs = llm.generate(prompts, params, use_tqdm=False)
    if schedule == "preempted":
        assert sum(output.metrics.num_preemptions for output in outputs) > 0
    for output, wanted in zip(outputs, params, strict=True):
        check_output(oracle, output, wanted.logprobs or 0, wanted.prompt_logprobs or 0)


def test_logprobs_of_all_and_of_requested_tokens_equal_transformers(folder: Path, oracle: LogprobOracle) -> None:
    prompts = make_prompts(3, 4)
    every = SamplingParams(temperature=2, seed=3, max_tokens=6, ignore_eos=True, logprobs=-1, prompt_logprobs=-1)
    named = every.replace(logprobs=None, prompt_logprobs=None, logprob_token_ids=[299, 0, 17, 299, 41])
    with open_llm(folder, max_logprobs=-1, **SCHEDULES["chunked"]) as llm:
        outputs = llm.generate(prompts * 2, [every] * 3 + [named] * 3, use_tqdm=False)
    for whole, some_tokens in zip(outputs[:3], outputs[3:], strict=True):
        check_output(oracle, whole, VOCAB_SIZE, VOCAB_SIZE)
        answer = some_tokens.outputs[0]
        assert answer.token_ids == whole.outputs[0].token_ids
        check_named(oracle, some_tokens.prompt_token_ids, answer, [299, 0, 17, 41])


def check_named(oracle: LogprobOracle, prompt: list[int], answer: CompletionOutput, named: list[int]) -> None:
    expected = oracle.logprobs([*prompt, *answer.token_ids])
    assert answer.logprobs is not None
    for i, (token_id, found) in enumerate(zip(answer.token_ids, answer.logprobs, strict=True)):
        row = expected[len(prompt) + i - 1]
        assert list(found) == [token_id, *(each for each in named if each != token_id)]
        check_token(row, token_id, {token_id: found[token_id]}, 0)
        for each in named:
            assert found[each].logprob == pytest.approx(float(row[each]), abs=1e-4)
            assert each == token_id or found[each].rank is None


def test_a_request_that_skips_the_prefix_cache_still_fills_it(llm: LLM) -> None:
    prompt, params = [7] * 40, SamplingParams(temperature=1, seed=3, max_tokens=4, ignore_eos=True)
    (first,) = llm.generate([prompt], params, use_tqdm=False)
    found = []
    for params.skip_reading_prefix_cache in (False, True, None):
        (output,) = llm.generate([prompt], params, use_tqdm=False)
        found.append(output.num_cached_tokens)
        assert output.outputs[0].token_ids == first.outputs[0].token_ids
    assert found == [32, 0, 32]


def check_output(oracle: LogprobOracle, output: RequestOutput, num_top: int, num_prompt_top: int) -> None:
    prompt, answer = output.prompt_token_ids, output.outputs[0]
    expected = oracle.logprobs([*prompt, *answer.token_ids])
    assert answer.logprobs is not None and len(answer.logprobs) == len(answer.token_ids)
    for i, (token_id, found) in enumerate(zip(answer.token_ids, answer.logprobs, strict=True)):
        check_token(expected[len(prompt) + i - 1], token_id, found, num_top)
    own = [found[token_id].logprob for token_id, found in zip(answer.token_ids, answer.logprobs, strict=True)]
    assert answer.cumulative_logprob == pytest.approx(sum(own), abs=1e-6)
    assert output.prompt_logprobs is not None and len(output.prompt_logprobs) == len(prompt)
    assert output.prompt_logprobs[0] is None
    for i, told in enumerate(output.prompt_logprobs[1:], 1):
        assert told is not None
        check_token(expected[i - 1], prompt[i], told, num_prompt_top)


@pytest.mark.parametrize("num_tokens", [600, pytest.param(1000, marks=pytest.mark.nightly)])
def test_logprobs_of_a_long_prompt_take_bounded_memory(num_tokens: int, wide: LLM) -> None:
    """Check the peak memory of this process; all logits at once would take 600 KB a token."""
    prompt = random.Random(1).choices(range(151_936), k=num_tokens)
    for _ in range(2):
        wide.generate([prompt], SamplingParams(max_tokens=1), use_tqdm=False)
    Path("/proc/self/clear_refs").write_text("5")  # the peak is what is held now
    before = peak_bytes()
    output = wide.generate([prompt], SamplingParams(max_tokens=1, prompt_logprobs=20), use_tqdm=False)[0]
    added = peak_bytes() - before
    assert len(output.prompt_logprobs or ()) == num_tokens
    assert added < 256 << 20, f"{added >> 20} MiB more at the peak"


def peak_bytes() -> int:
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in line]
    return int(line.split()[1]) << 10


def test_zero_max_tokens_scores_the_prompt_only(llm: LLM, oracle: LogprobOracle) -> None:
    prompts = make_prompts(4, 2)
    scores = SamplingParams(max_tokens=0, prompt_logprobs=2, logprobs=1, temperature=0)
    for _ in range(2):  # the second time from the prefix cache
        for output in llm.generate(prompts, scores, use_tqdm=False):
            (answer,) = output.outputs
            assert (list(answer.token_ids), answer.text, answer.finish_reason) == ([], "", "length")
            assert answer.logprobs == [] and answer.cumulative_logprob == 0
            check_output(oracle, output, 0, 2)


@pytest.mark.parametrize("detokenize", [True, False])
def test_a_repetitive_answer_ends_at_the_token_that_completes_the_pattern(llm: LLM, detokenize: bool) -> None:
    params = SamplingParams(max_tokens=60, ignore_eos=True, logprobs=1, detokenize=detokenize, temperature=0)
    params.repetition_detection = {"max_pattern_size": 3, "min_count": 4}  # type: ignore[assignment]
    params.allowed_token_ids, params.logit_bias, params.n = [65, 66], {65: -100.0}, 2
    (output,) = llm.generate([[1, 2, 3]], params, use_tqdm=False)
    params.min_tokens = 10
    (late,) = llm.generate([[1, 2, 3]], params, use_tqdm=False)
    for answer, count in ((output.outputs[0], 4), (output.outputs[1], 4), (late.outputs[0], 10)):
        assert answer.token_ids == [66] * count and len(answer.logprobs or ()) == count
        assert (answer.finish_reason, answer.stop_reason) == ("repetition", "repetition_detected")
        assert answer.text == "B" * count * detokenize
