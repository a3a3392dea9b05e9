"""Logits of borrowed models equal those of transformers in float32, however the tokens are scheduled."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tokenloom.ipc.spec.config.engine_config import EngineConfig
from tokenloom.ipc.spec.models.model_file import load_model_config
from tokenloom.kernels.select import select_ops
from tokenloom.tests.support.checkpoints import tiny_checkpoint
from tokenloom.tests.support.recurrent_families import RECURRENT, recurrent_checkpoint
from tokenloom.tests.support.today import some
from tokenloom.tests.workers.models.test_decoder import oracle, prompts_of, run_schedule, schedule
from tokenloom.tests.workers.paged_run import CPU, PagedRun
from tokenloom.workers.borrowed.load import load_borrowed
from tokenloom.workers.borrowed.model import BorrowedModel

TOLERANCE = 1e-4
ATTENDING = (
    "gemma2",
    "gemma3_text",
    "phi3",
    "olmo2",
    "granite",
    "gpt_oss",
    "starcoder2",
    "cohere2",
    "glm4",
    "smollm3",
    "gemma4",
)
STEPWISE = ("jamba",)  # its layers forget their state if a chunk that continues has more than one token
LENGTHS = {"a": 40, "b": 1, "c": 23, "d": 2}


def checkpoint(folder: Path, family: str) -> Path:
    write = recurrent_checkpoint if family in RECURRENT else tiny_checkpoint
    return write(folder / family, family, seed=3)


def load(folder: Path, dtype: torch.dtype = torch.float32, device: torch.device = CPU) -> BorrowedModel:
    """Load without the self-check, which has tests of its own."""
    config = load_model_config(folder, implementation="transformers")
    place = (dtype, device, select_ops(device, dtype))
    return load_borrowed(folder, config, EngineConfig(skip_self_check=True), 128, *place)


@pytest.mark.parametrize("family", [*some(ATTENDING, 1), *some(list(RECURRENT), 2)])
def test_logits_equal_transformers_under_a_ragged_schedule(family: str, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, family)
    tokens = prompts_of(LENGTHS, 270, seed=1)
    model = load(folder)
    model.rows.is_stepwise = family in STEPWISE
    expected, actual = oracle(folder, tokens), run_schedule(PagedRun(model, 4), tokens, schedule(LENGTHS, seed=3))
    for name in tokens:
        torch.testing.assert_close(actual[name], expected[name], atol=TOLERANCE, rtol=0, msg=f"{family}: {name}")


def test_layers_with_fewer_kv_heads_and_narrower_heads_share_the_widest_page(tmp_path: Path) -> None:
    (spec,) = load(checkpoint(tmp_path, "gemma4")).kv_cache_specs(4, torch.float32)
    assert (spec.num_layers, spec.num_kv_heads, spec.head_dim) == (3, 2, 32)


def test_an_embedding_that_is_the_head_is_held_once(tmp_path: Path) -> None:
    model = load(checkpoint(tmp_path, "granite"))
    stored = tmp_path / "granite" / "model.safetensors"
    assert 0.9 < model.weight_bytes / stored.stat().st_size < 1.1
