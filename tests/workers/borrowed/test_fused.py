"""Attention and feed-forward modules run on our operations exactly if these compute the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tokenloom.kernels.reference import ReferenceOps
from tokenloom.tests.support.checkpoints import tiny_checkpoint
from tokenloom.tests.support.recurrent_families import RECURRENT, recurrent_checkpoint
from tokenloom.tests.support.today import some
from tokenloom.tests.workers.borrowed.test_model import load
from tokenloom.workers.borrowed.fused_attention import FusedAttention
from tokenloom.workers.borrowed.fused_layer import FusedLayer
from tokenloom.workers.borrowed.mlp import PackedMLP, pack_mlps

SIZE, INNER = 12, 20


def fused(folder: Path) -> tuple[float, ...]:
    """Return the shares of layers whose attention, whose feed-forward block, and which as a whole run fused."""
    model = load(folder)
    kinds = [type(each) for each in model.decoder.modules()]
    counts = [kinds.count(kind) for kind in (FusedAttention, PackedMLP, FusedLayer)]
    return tuple(count / model.decoder.config.num_hidden_layers for count in counts)


@pytest.mark.parametrize(
    ("family", "fields", "expected"),
    some(
        [
            ("qwen3", {}, (1, 1, 1)),  # norms of heads
            ("llama", {"attention_bias": True, "mlp_bias": True}, (1, 1, 1)),
            ("gemma3_text", {}, (1, 1, 1)),  # norms with 1 + w, two kinds of angles, gelu
            ("olmo2", {}, (1, 1, 1)),  # norms over all heads
            ("phi3", {}, (1, 1, 1)),  # one matrix of query, key and value heads, one of gates and ups
            ("smollm3", {}, (1, 1, 1)),  # a layer without rotation
            ("hunyuan_v1_dense", {}, (1, 1, 1)),  # norms after the rotation
            ("starcoder2", {}, (1, 1, 0)),  # no gates, biases; norms with means
            ("arcee", {}, (1, 1, 1)),  # no gates, relu2
            ("olmo", {"clip_qkv": None}, (1, 1, 0)),  # norms without weights
            ("olmo", {"clip_qkv": 8.0}, (0, 1, 0)),  # clips numbers that random tokens never reach
            ("ministral3", {}, (0, 1, 0)),  # queries grow with positions beyond the tokens of a trial
            ("glm4", {}, (0, 1, 0)),  # rotates neighbours
            ("stablelm", {"qk_layernorm": True}, (0, 1, 0)),  # each head has its own norm
            ("apertus", {}, (1, 0, 0)),  # an activation with parameters
            ("qwen3_5", {}, (0, 1, 0)),  # gated attention
        ],
        4,
    ),
)
def test_modules_are_fused_by_what_they_compute(
    family: str, fields: dict[str, Any], expected: tuple[float, ...], tmp_path: Path
) -> None:
    write: Callable[..., Path] = recurrent_checkpoint if family in RECURRENT else tiny_checkpoint
    assert fused(write(tmp_path, family, **fields)) == expected


class Block(nn.Module):
    """down(silu(gate(x)) * up(x))"""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up, self.gate = nn.Linear(INNER, SIZE), nn.Linear(SIZE, INNER), nn.Linear(SIZE, INNER)

    def inner(self, gate: Tensor, up: Tensor) -> Tensor:
        return nn.functional.silu(gate) * up

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.down(self.inner(self.gate(x), self.up(x)))
        return found


class TanhBlock(Block):
    def inner(self, gate: Tensor, up: Tensor) -> Tensor:
        return nn.functional.gelu(gate, approximate="tanh") * up


class ClampedBlock(Block):
    def inner(self, gate: Tensor, up: Tensor) -> Tensor:
        return super().inner(gate, up.clamp_(-50, 50))


class SharpBlock(Block):
    def inner(self, gate: Tensor, up: Tensor) -> Tensor:
        return gate * torch.sigmoid(1.01 * gate) * up


class ResidualBlock(Block):
    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


class ScaledBlock(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(0.5 * x)


@pytest.mark.parametrize(
    ("kind", "is_packed"),
    [
        (Block, True),
        (TanhBlock, True),
        (ClampedBlock, False),
        (SharpBlock, False),
        (ResidualBlock, False),
        (ScaledBlock, False),
    ],
)
def test_only_a_plain_block_is_packed(kind: type[Block], is_packed: bool) -> None:
    model, x = nn.Sequential(kind()), torch.randn(1, 5, SIZE)
    expected = model(x)
    pack_mlps(model, ReferenceOps(), torch.float32)
    assert any(isinstance(each, PackedMLP) for each in model.modules()) is is_packed
    torch.testing.assert_close(model(x), expected)
