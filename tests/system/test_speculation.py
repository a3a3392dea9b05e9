"""Speculation changes no token and no logprob: lookup and an adversary, under every feature and every schedule, and
beside adapters and images."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tokenloom import LLM, RequestOutput, SamplingParams, StructuredOutputsParams
from tokenloom.core.features.speculation.lookup import LookupProposer
from tokenloom.core.features.speculation.step_costs import StepCosts
from tokenloom.ipc.messages.metrics import Counter, Gauge
from tokenloom.kernels.cpu.processor import instruction_levels
from tokenloom.tests.support.adapters import write_adapters
from tokenloom.tests.support.checkpoints import tiny_checkpoint
from tokenloom.tests.support.today import at_night, some_pairs
from tokenloom.tests.support.waiting import wait_until
from tokenloom.tests.system import adapter_engine, media_engine, media_families, recorded_drafts
from tokenloom.tests.system.logprob_oracle import LogprobOracle
from tokenloom.tests.system.recorded_drafts import MODES
from tokenloom.tests.system.sampling_engine import (
    VOCAB_SIZE,
    folder,
    make_prompts,
    open_llm,
    oracle,
)
from tokenloom.tests.system.test_schedules import FEATURES, SCHEMA, compare

__all__ = ["folder", "oracle"]  # fixtures

COUNT, MAX_TOKENS = 6, 24  # requests of a case
CASES: dict[str, dict[str, object]] = {
    "plain": {},
    "logprobs": FEATURES["logprobs"],
    "penalties": FEATURES["penalties"],
    "bad words": FEATURES["bad_words"],
    "min_tokens": {"min_tokens": 9, "stop_token_ids": list(range(0, 256, 5))},
    "stop strings": FEATURES["stop strings"],
    "n=4": {"n": 4},
    "schema": {"structured_outputs": StructuredOutputsParams(json=SCHEMA)},
    "all": {key: value for name, fields in FEATURES.items() if name != "n=3" for key, value in fields.items()},
}
SCHEDULES: dict[str, dict[str, object]] = {
    "one step": {"steps_in_flight": 1},
    "two steps": {"steps_in_flight": 2},
    "preempted": {"num_kv_blocks": 30, "max_num_seqs": 16, "max_num_batched_tokens": 128, "max_model_len": 160},
    "chunked": {"max_num_batched_tokens": 24, "max_num_seqs": 8},
}
needs_kernels = pytest.mark.skipif(not instruction_levels(), reason="the processor has no AVX2")
PLAIN: dict[str, object] = {"steps_in_flight": 1, "enable_prefix_caching": False, "speculation": "off"}


def make_params(case: str) -> list[SamplingParams]:
    return [
        SamplingParams(temperature=(0.0, 1.0, 2.5)[i % 3], top_p=0.95, seed=i, max_tokens=MAX_TOKENS, **CASES[case])  # type: ignore[arg-type]
        for i in range(COUNT)
    ]


PROMPTS = make_prompts(COUNT * len(CASES), 3)
PARAMS = [params for case in CASES for params in make_params(case)]


@pytest.fixture(scope="module")
def answers(folder: Path) -> list[RequestOutput]:
    """The outputs of all cases without speculation."""
    with open_llm(folder, **PLAIN) as llm:
        return llm.generate(PROMPTS, PARAMS, use_tqdm=False)


def num_drafts(outputs: Sequence[RequestOutput]) -> tuple[int, int]:
    """Return the drafts that were verified, and the accepted ones."""
    metrics = [output.metrics for output in outputs if output.metrics is not None]
    return sum(each.num_drafts for each in metrics), sum(each.num_accepted_drafts for each in metrics)


@pytest.mark.parametrize(("schedule", "mode"), some_pairs(list(SCHEDULES), list(MODES), every=3))
def test_an_adversary_changes_no_token_and_no_logprob(
    schedule: str,
    mode: str,
    folder: Path,
    oracle: LogprobOracle,
    answers: list[RequestOutput],
    tmp_path: Path,
) -> None:
    recorded_drafts.record(tmp_path / "record", mode, VOCAB_SIZE, answers, PARAMS)
    with open_llm(folder, **SCHEDULES[schedule]) as llm:
        recorded_drafts.use(llm, tmp_path / "record")
        found = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    for i, case in enumerate(CASES):
        of_case = slice(i * COUNT, (i + 1) * COUNT)
        pairs = zip(answers[of_case], found[of_case], PARAMS[of_case], strict=True)
        assert sum(compare(oracle, *each) for each in pairs) <= 1, case
        drafted, accepted = num_drafts(found[of_case])
        assert drafted > 10, case
        assert (accepted > 0) == (mode != "wrong"), case
        assert accepted < drafted or mode == "right", case


class FreeDrafts(StepCosts):
    """A step lasts as long with drafts as without, so that all are sent."""

    def seconds(self, num_rows: int, most: int) -> list[float]:
        return [1.0] * (most + 1)


def test_lookup_changes_no_token(folder: Path, oracle: LogprobOracle) -> None:
    """Prompts that repeat themselves, and answers that do: greedy ones of random weights fall into loops."""
    prompts = [each * 4 for each in make_prompts(6, 9)]
    params = [SamplingParams(temperature=0.0, max_tokens=80, seed=i, ignore_eos=True) for i in range(6)]
    with open_llm(folder, **PLAIN) as llm:
        expected = llm.generate(prompts, params, use_tqdm=False)
    for steps_in_flight in (1, 2):
        with open_llm(folder, speculation="lookup", steps_in_flight=steps_in_flight) as llm:
            lookup_of(llm).choice.costs = FreeDrafts()
            found = llm.generate(prompts, params, use_tqdm=False)
        pairs = zip(expected, found, params, strict=True)
        assert sum(compare(oracle, *each) for each in pairs) <= 1
        drafted, accepted = num_drafts(found)
        assert drafted > accepted > 50


def lookup_of(llm: LLM) -> LookupProposer:
    """Return the proposer of an engine in this process."""
    engine: Any = llm._transport
    found: LookupProposer = engine._engine._core.scheduler.batches.drafting.proposer
    return found


def drafts_without_effect(
    folder: Path, params: list[SamplingParams], tmp_path: Path, **options: Any
) -> tuple[int, int]:
    """Check that a prompt for each of `params` has the same tokens and bits of logprobs with drafts, right and wrong
    ones, and without. Return the numbers of drafts, and of accepted ones."""
    prompts = make_prompts(len(params), 5)
    with open_llm(folder, **options, speculation="off") as llm:
        expected = llm.generate(prompts, params, use_tqdm=False)
    recorded_drafts.record(tmp_path / "record", "mixed", VOCAB_SIZE, expected, params)
    with open_llm(folder, **options) as llm:
        recorded_drafts.use(llm, tmp_path / "record")
        found = llm.generate(prompts, params, use_tqdm=False)
    for mine, other in zip(expected, found, strict=True):
        assert mine.outputs[0].token_ids == other.outputs[0].token_ids
        assert mine.outputs[0].logprobs == other.outputs[0].logprobs
    return num_drafts(found)


@pytest.mark.parametrize("deterministic", [True, pytest.param(False, marks=needs_kernels)])
def test_tokens_have_equal_bits_with_drafts_and_without(folder: Path, deterministic: bool, tmp_path: Path) -> None:
    params = [SamplingParams(temperature=i % 2, seed=i, max_tokens=40, logprobs=3, ignore_eos=True) for i in range(6)]
    drafted, accepted = drafts_without_effect(folder, params, tmp_path, deterministic=deterministic)
    assert drafted > accepted > 20


@needs_kernels
def test_speculation_is_on_by_default_on_the_cpu_and_reports_its_drafts(folder: Path) -> None:
    """Steps of this model are so short that drafts may not pay: the counters agree, whatever they are. The answers of
    one request with n above 1 help each other: the corpus has them when they have ended."""
    prompts = [each * 4 for each in make_prompts(2, 9)]
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    with open_llm(folder) as llm:
        expected = num_drafts(llm.generate(prompts, params, use_tqdm=False))
        wait_until(lambda: (total(llm, "drafted"), total(llm, "accepted")) == expected, "all drafts are counted")
        num_before = gauge(llm, "spec_corpus_tokens")
        llm.generate(prompts[0], params.replace(temperature=1, n=2), use_tqdm=False)
        wait_until(lambda: gauge(llm, "spec_corpus_tokens") >= num_before + 120, "both answers are in the corpus")


def gauge(llm: LLM, name: str) -> float:
    gauges = [each for each in llm.get_metrics() if isinstance(each, Gauge)]
    return next(each.value for each in gauges if each.name == f"tokenloom_{name}")


def total(llm: LLM, name: str) -> int:
    found = [each for each in llm.get_metrics() if each.name == f"tokenloom_spec_{name}_total"]
    return int(sum(each.value for each in found if isinstance(each, Counter)))


def check_tokens(expected: list[RequestOutput], found: list[RequestOutput], least_accepted: int) -> None:
    assert [each.outputs[0].token_ids for each in found] == [each.outputs[0].token_ids for each in expected]
    drafted, accepted = num_drafts(found)
    assert drafted >= accepted > least_accepted


def test_drafts_of_rows_with_adapters_change_no_answer(tmp_path: Path) -> None:
    models_folder = tmp_path / "models"
    checkpoint = tiny_checkpoint(models_folder / "model", "qwen3", vocab_size=adapter_engine.VOCAB_SIZE)
    modules = [f"{path.name}={path}" for path in write_adapters(models_folder / "adapters", checkpoint, 3)]
    names = ["", *(each.split("=")[0] for each in modules)]
    requests = adapter_engine.make_requests(names, 12, seed=4, max_tokens=20)
    options = {**adapter_engine.OPTIONS, "in_process": True, "lora_modules": modules, "deterministic": True}
    with adapter_engine.LLM(checkpoint, **options, speculation="off") as llm:  # type: ignore[arg-type]
        expected = requests.run(llm)
    recorded_drafts.record(tmp_path / "record", "mixed", adapter_engine.VOCAB_SIZE, expected, requests.params)
    with adapter_engine.LLM(checkpoint, **options, max_num_seqs=5) as llm:  # type: ignore[arg-type]
        recorded_drafts.use(llm, tmp_path / "record")
        found = requests.run(llm)
    check_tokens(expected, found, 20)


@pytest.mark.parametrize("family", ["qwen2_5_vl", *at_night("llava")])
def test_drafts_behind_images_change_no_answer(family: str, tmp_path: Path) -> None:
    """Rows behind images have shifted positions, and their prompts hold placeholders."""
    models = media_families.make_models(tmp_path / "m", family)
    requests = media_engine.make_requests(models, 5, 6)
    with media_engine.open_llm(models, deterministic=True, speculation="off") as llm:
        expected = media_engine.run(llm, models, requests)
        vocab_size = max(token for each in expected for token in each.outputs[0].token_ids) + 1
    params = [SamplingParams(temperature=0, seed=None)] * len(expected)
    recorded_drafts.record(tmp_path / "record", "mixed", vocab_size, expected, params)
    with media_engine.open_llm(models, deterministic=True, max_num_seqs=4) as llm:
        recorded_drafts.use(llm, tmp_path / "record")
        found = media_engine.run(llm, models, requests)
    check_tokens(expected, found, 10)
