"""Ranks that share a borrowed model give the logits of one rank; a model that no plan describes is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from tokenloom.ipc.config.engine_config import EngineConfig
from tokenloom.ipc.errors import ConfigError
from tokenloom.ipc.models.model_file import load_model_config
from tokenloom.kernels.reference import ReferenceOps
from tokenloom.tests.support.checkpoints import tiny_checkpoint
from tokenloom.tests.support.recurrent_families import recurrent_checkpoint
from tokenloom.tests.workers.paged_run import CPU
from tokenloom.tests.workers.test_parallel import logits_of_ranks
from tokenloom.workers.borrowed.attention import Unserved
from tokenloom.workers.borrowed.load import load_borrowed
from tokenloom.workers.borrowed.shards import shard_model
from tokenloom.workers.parallel import ParallelGroup


def test_ranks_give_the_logits_of_one_rank(tmp_path: Path) -> None:
    folders = [
        tiny_checkpoint(tmp_path / "apertus", "apertus"),  # norms of heads; an activation with parameters
        tiny_checkpoint(tmp_path / "olmo2", "olmo2", vocab_size=272),  # whole heads on each rank; a head that divides
        tiny_checkpoint(
            tmp_path / "qwen2", "qwen2", num_key_value_heads=4, vocab_size=294
        ),  # biases; a shared embedding
        tiny_checkpoint(tmp_path / "phi3", "phi3"),
        tiny_checkpoint(tmp_path / "starcoder2", "starcoder2"),  # biases behind summed layers
        tiny_checkpoint(tmp_path / "qwen3_moe", "qwen3_moe"),  # experts
        recurrent_checkpoint(tmp_path / "qwen3_5", "qwen3_5"),  # gated attention, linear attention
    ]
    for name, actual, expected in logits_of_ranks(tmp_path, 2, folders, is_borrowed=True):
        np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-4, err_msg=name)
        assert (actual.argmax(-1) == expected.argmax(-1)).all()


def load(folder: Path, size: int) -> None:
    """Load as one of `size` ranks that never talk."""
    config = load_model_config(folder, implementation="transformers")
    settings, group = EngineConfig(skip_self_check=True), ParallelGroup(0, size)
    load_borrowed(folder, config, settings, 64, torch.float32, CPU, ReferenceOps(), group)


def test_a_model_without_a_plan_is_refused(tmp_path: Path) -> None:
    folder = recurrent_checkpoint(tmp_path, "falcon_h1")
    with pytest.raises(ConfigError, match="no plan to shard it: leave --tensor-parallel-size 2 out"):
        load(folder, 2)


class Model(nn.Module):
    """A model with a linear layer, and a plan for it."""

    def __init__(self, style: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 8)])
        self.tp_plan = {"layers.*": style, "head": "colwise"}
        self.config = self
        self.base_model_tp_plan = self.tp_plan

    def get_text_config(self, decoder: bool) -> Model:
        return self

    def get_output_embeddings(self) -> None:
        return None


def test_a_style_that_is_unknown_is_refused() -> None:
    with pytest.raises(Unserved, match=r"makes layers.0, a Linear, sequence_parallel, which is unknown"):
        shard_model(Model("sequence_parallel"), ParallelGroup(0, 2))  # type: ignore[arg-type]


def test_a_layer_that_does_not_divide_is_refused() -> None:
    with pytest.raises(ConfigError, match="8 outputs of a layer do not divide by --tensor-parallel-size 3"):
        shard_model(Model("colwise"), ParallelGroup(0, 3))  # type: ignore[arg-type]
