"""Draft models and heads change no token and no logprob, under every feature and schedule, whether right or not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tokenloom import LLM, RequestOutput, SamplingParams
from tokenloom.core.features.speculation.ask_rates import AskRates
from tokenloom.core.features.speculation.model_drafts import SOURCE, ModelDrafts
from tokenloom.tests.support.eagle_heads import trained_head
from tokenloom.tests.support.mtp_layers import mtp_checkpoint
from tokenloom.tests.support.recurrent_families import recurrent_checkpoint
from tokenloom.tests.support.today import some, some_pairs
from tokenloom.tests.system.logprob_oracle import LogprobOracle
from tokenloom.tests.system.sampling_engine import (
    VOCAB_SIZE,
    folder,
    make_prompts,
    open_llm,
    oracle,
    sampling_checkpoint,
)
from tokenloom.tests.system.test_schedules import compare
from tokenloom.tests.system.test_speculation import (
    CASES,
    COUNT,
    PARAMS,
    PROMPTS,
    SCHEDULES,
    FreeDrafts,
    answers,
    lookup_of,
    num_drafts,
)

__all__ = ["answers", "folder", "oracle"]  # fixtures


class AlwaysAsk(AskRates):
    """Each step asks, and each draft is made."""

    def should_ask(self, num_rows: int) -> bool:
        return True

    def least_chance(self, num_rows: int, plain_s: float, marginal_s: float) -> float:
        return 0.0


class KnownCosts(FreeDrafts):
    """The cost of each step is known from the begin."""

    def plain_s(self, num_rows: int) -> float:
        return 1.0

    alone_s = plain_s

    def most_drafts(self, num_rows: int) -> int:
        return 100


@pytest.fixture(scope="module")
def drafts(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The model with noise in its weights, and a head trained for seconds: both are often right, and often wrong."""
    made = sampling_checkpoint(tmp_path_factory.mktemp("draft") / "m")
    generator = torch.Generator().manual_seed(1)
    for path in made.glob("*.safetensors"):
        tensors = load_file(path)
        for name, each in tensors.items():
            tensors[name] = each + 0.3 * each.std() * torch.randn(each.shape, generator=generator, dtype=each.dtype)
        save_file(tensors, path, {"format": "pt"})
    head = trained_head(tmp_path_factory.mktemp("head") / "m", folder, [0, 1, 2], VOCAB_SIZE - 50)
    return {"model": made, "eagle3": head}


def open_asking(folder: Path, draft: Path | None, **options: object) -> LLM:
    """Open an engine in which each step asks for drafts. draft: None for those of the model's MTP layer."""
    drafting = {"speculation": "mtp"} if draft is None else {"draft_model": str(draft)}
    llm = open_llm(folder, **drafting, **options)
    proposer = lookup_of(llm)
    proposer.choice.costs = KnownCosts()
    assert isinstance(proposer.model, ModelDrafts)
    proposer.model.rates = AlwaysAsk()
    return llm


@pytest.mark.parametrize(("schedule", "kind"), some_pairs(list(SCHEDULES), ["model", "eagle3"], every=2))
def test_drafts_change_no_token_and_no_logprob(
    schedule: str,
    kind: str,
    folder: Path,
    drafts: dict[str, Path],
    oracle: LogprobOracle,
    answers: list[RequestOutput],
) -> None:
    with open_asking(folder, drafts[kind], **SCHEDULES[schedule]) as llm:
        found = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    for i, case in enumerate(CASES):
        of_case = slice(i * COUNT, (i + 1) * COUNT)
        pairs = zip(answers[of_case], found[of_case], PARAMS[of_case], strict=True)
        assert sum(compare(oracle, *each) for each in pairs) <= 1, case
        assert num_drafts(found[of_case])[1] > 0, case
    drafted, accepted = num_drafts(found)
    assert drafted > 1.2 * accepted, "wrong drafts were verified, too"


@pytest.mark.parametrize("schedule", some(list(SCHEDULES), 2))
def test_a_model_guesses_itself_right(schedule: str, folder: Path) -> None:
    """So the draft model has the keys and values of all tokens: of prompts that were found in the prefix cache or
    computed while no drafts were asked for, of preempted answers, and behind drafts that were wrong or cut."""
    prompts = [*make_prompts(12, 4), *make_prompts(12, 4)]
    params = [SamplingParams(temperature=(0.0, 1.0)[i % 2], seed=i, max_tokens=40) for i in range(24)]
    with open_asking(folder, folder, **SCHEDULES[schedule]) as llm:
        llm.generate(prompts, params, use_tqdm=False)
        engine: Any = llm._transport
        drafting = engine._engine._core.scheduler.batches.drafting
    drafted = drafting.num_drafted[SOURCE]
    assert drafted > 150
    accepted = sum(count for (source, _), count in drafting.num_accepted.items() if source == SOURCE)
    assert accepted >= 0.99 * drafted  # a near tie may fall to either side


def test_a_model_with_states_takes_the_drafts_of_one_without(folder: Path, tmp_path: Path) -> None:
    hybrid = recurrent_checkpoint(tmp_path / "hybrid", "qwen3_5", vocab_size=VOCAB_SIZE)
    prompts = make_prompts(6, 8)
    params = [SamplingParams(temperature=0.0, max_tokens=20, logprobs=1, ignore_eos=True) for _ in prompts]
    with open_llm(hybrid, speculation="off") as llm:
        expected = llm.generate(prompts, params, use_tqdm=False)
    with open_asking(hybrid, folder) as llm:
        found = llm.generate(prompts, params, use_tqdm=False)
    assert num_drafts(found)[0] > 100
    for mine, other in zip(expected, found, strict=True):
        assert mine.outputs[0].token_ids == other.outputs[0].token_ids
        assert mine.outputs[0].logprobs == other.outputs[0].logprobs


@pytest.mark.parametrize("family", some(["qwen3_5", "glm4_moe"], 1))
def test_the_drafts_of_an_mtp_layer_change_no_token_and_no_logprob(family: str, tmp_path: Path) -> None:
    folder = mtp_checkpoint(tmp_path / "m", family, bigram_noise=0.5, vocab_size=VOCAB_SIZE)
    prompts = make_prompts(8, 8)
    params = [
        SamplingParams(temperature=(0.0, 1.0)[i % 2], seed=i, max_tokens=24, logprobs=1, ignore_eos=True)
        for i in range(8)
    ]
    with open_llm(folder, speculation="off") as llm:
        expected = llm.generate(prompts, params, use_tqdm=False)
    with open_asking(folder, None) as llm:
        found = llm.generate(prompts, params, use_tqdm=False)
    drafted, accepted = num_drafts(found)
    assert 20 < accepted < 0.9 * drafted
    for mine, other in zip(expected, found, strict=True):
        assert mine.outputs[0].token_ids == other.outputs[0].token_ids
        assert mine.outputs[0].logprobs == other.outputs[0].logprobs
