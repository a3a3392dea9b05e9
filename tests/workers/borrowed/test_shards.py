"""Ranks that share a borrowed model give the logits of one rank; a model that no plan describes is refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from tokenloom.ipc.errors import ConfigError
from tokenloom.ipc.spec.config.engine_config import EngineConfig
from tokenloom.ipc.spec.models.model_file import load_model_config
from tokenloom.kernels.reference import ReferenceOps
from tokenloom.tests.support.checkpoints import tiny_checkpoint
from tokenloom.tests.support.recurrent_families import recurrent_checkpoint
from tokenloom.tests.support.today import some
from tokenloom.tests.workers.machine.test_parallel import check_ranks
from tokenloom.tests.workers.paged_run import CPU
from tokenloom.workers.borrowed.attention import Unserved
from tokenloom.workers.borrowed.load import load_borrowed
from tokenloom.workers.borrowed.model import BorrowedModel
from tokenloom.workers.borrowed.shards import shard_model
from tokenloom.workers.machine.parallel import ParallelGroup

SHARED: dict[str, Callable[[Path], Path]] = {
    "norms of heads, an activation with parameters": partial(tiny_checkpoint, family="apertus"),
    "norms over all heads, a head that divides": partial(tiny_checkpoint, family="olmo2", vocab_size=272),
    "biases, a shared embedding": partial(tiny_checkpoint, family="qwen2", num_key_value_heads=4, vocab_size=294),
    "packed matrices": partial(tiny_checkpoint, family="phi3"),
    "biases behind summed layers": partial(tiny_checkpoint, family="starcoder2"),
    "experts": partial(tiny_checkpoint, family="qwen3_moe"),
    "gated attention, linear attention": partial(recurrent_checkpoint, family="qwen3_5"),
}


@pytest.mark.parametrize("layers", some(list(SHARED), 1))
def test_two_ranks_give_the_logits_of_one_rank(layers: str, tmp_path: Path) -> None:
    folder = SHARED[layers](tmp_path)
    check_ranks(2, lambda group: load(folder, group), layers)


def load(folder: Path, group: ParallelGroup) -> BorrowedModel:
    config = load_model_config(folder, implementation="transformers")
    settings = EngineConfig(skip_self_check=True)
    return load_borrowed(folder, config, settings, 128, torch.float32, CPU, ReferenceOps(), group)


def test_a_model_without_a_plan_is_refused(tmp_path: Path) -> None:
    folder = recurrent_checkpoint(tmp_path, "falcon_h1")
    with pytest.raises(ConfigError, match="no plan to shard it: leave --tensor-parallel-size 2 out"):
        load(folder, ParallelGroup(0, 2))


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
