"""A draft model changes no token and no logprob, under every feature and every schedule, whether it is right or not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tokenloom import LLM, RequestOutput
from tokenloom.core.features.speculation.ask_rates import AskRates
from tokenloom.core.features.speculation.model_drafts import ModelDrafts
from tokenloom.tests.support.today import some
from tokenloom.tests.system.logprob_oracle import LogprobOracle
from tokenloom.tests.system.sampling_engine import folder, open_llm, oracle, sampling_checkpoint
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
def draft(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model with noise in its weights, so that it often agrees with it, and often not."""
    made = sampling_checkpoint(tmp_path_factory.mktemp("draft") / "m")
    generator = torch.Generator().manual_seed(1)
    for path in made.glob("*.safetensors"):
        tensors = load_file(path)
        for name, each in tensors.items():
            tensors[name] = each + 0.15 * each.std() * torch.randn(each.shape, generator=generator, dtype=each.dtype)
        save_file(tensors, path, {"format": "pt"})
    return made


def open_asking(folder: Path, draft: Path, **options: object) -> LLM:
    """Open an engine in which each step asks for drafts."""
    llm = open_llm(folder, draft_model=str(draft), **options)
    proposer = lookup_of(llm)
    proposer.choice.costs = KnownCosts()
    assert isinstance(proposer.model, ModelDrafts)
    proposer.model.rates = AlwaysAsk()
    return llm


@pytest.mark.parametrize("schedule", some(list(SCHEDULES), 2))
def test_a_draft_model_changes_no_token_and_no_logprob(
    schedule: str, folder: Path, draft: Path, oracle: LogprobOracle, answers: list[RequestOutput]
) -> None:
    with open_asking(folder, draft, **SCHEDULES[schedule]) as llm:
        found = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    for i, case in enumerate(CASES):
        of_case = slice(i * COUNT, (i + 1) * COUNT)
        pairs = zip(answers[of_case], found[of_case], PARAMS[of_case], strict=True)
        assert sum(compare(oracle, *each) for each in pairs) <= 1, case
        drafted, accepted = num_drafts(found[of_case])
        assert drafted > accepted > 0, case
