"""Each dense family's logits equal those of transformers in float32, however the tokens are scheduled."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tokenloom.ipc.spec.models.audio_families import AUDIO_FAMILIES
from tokenloom.ipc.spec.models.families import FAMILIES
from tokenloom.ipc.spec.models.model_file import load_model_config
from tokenloom.ipc.spec.models.vision_families import VISION_FAMILIES
from tokenloom.tests.support.checkpoints import tiny_checkpoint
from tokenloom.tests.support.families import CONFIGS
from tokenloom.tests.support.family_checkpoints import reference_model
from tokenloom.tests.support.today import some
from tokenloom.tests.workers.models.test_decoder import prompts_of, run_schedule, schedule
from tokenloom.tests.workers.paged_run import PagedRun, load

EXPERTS = {"gemma4_moe", "gpt_oss", "glm4_moe", "dots1", "ernie4_5_moe", "qwen2_moe"}  # test_experts.py
DENSE = sorted(
    family
    for family, config in CONFIGS.items()
    if config["architectures"][0] in FAMILIES | VISION_FAMILIES | AUDIO_FAMILIES and family not in EXPERTS
)
TOLERANCE = 1e-5  # of the largest logit


@pytest.mark.parametrize("family", some(DENSE, 8))
def test_logits_equal_transformers_under_any_schedule(family: str, tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path, family, seed=1)
    check(folder, {"a": 97, "b": 1, "c": 33, "d": 2}, max_model_len=128)


@pytest.mark.parametrize("family", some(["phi3", "phi4_mini"], 1))
def test_longrope_uses_the_long_factors_where_contexts_may_be_long(family: str, tmp_path: Path) -> None:
    """Transformers chooses the factors by the length of each prompt, so all are longer than the original length."""
    check(tiny_checkpoint(tmp_path, family, seed=1), {"a": 140, "b": 129}, max_model_len=256)


def check(folder: Path, lengths: dict[str, int], max_model_len: int) -> None:
    tokens = prompts_of(lengths, load_model_config(folder).vocab_size, seed=2)
    expected = reference_logits(folder, tokens)
    run = PagedRun(load(folder, max_model_len=max_model_len), 8)
    actual = run_schedule(run, tokens, schedule(lengths, seed=3))
    for name in tokens:
        tolerance = TOLERANCE * expected[name].abs().max().item()
        torch.testing.assert_close(actual[name], expected[name], atol=tolerance, rtol=0)


@torch.inference_mode()
def reference_logits(folder: Path, tokens: dict[str, list[int]]) -> dict[str, torch.Tensor]:
    model = reference_model(folder)
    return {name: model(torch.tensor([ids])).logits[0] for name, ids in tokens.items()}
