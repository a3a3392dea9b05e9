"""Layers of encoders by our kernels are those of plain formulas, with the same bits in any company."""

from __future__ import annotations

import itertools
import random
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from tokenloom.kernels.cpu.cpu_ops import CpuOps, make_cpu_ops
from tokenloom.kernels.reference import ReferenceOps
from tokenloom.tests.kernels.cpu.levels import LEVELS, kinds
from tokenloom.tests.workers.encoders.ranges import by_mask, random_bounds, random_cuts
from tokenloom.workers.encoders.attention import rotated
from tokenloom.workers.encoders.blocks import Block, EncoderState
from tokenloom.workers.encoders.fused import FusedBlocks, fuse

NUM_LAYERS = 3
KINDS = [(dtype, level) for dtype, level in kinds() if level in LEVELS]


class RMSNorm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.rand(size) + 0.5), 1e-6

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.rms_norm(x, self.weight.shape, self.weight, self.eps)


class PlainMLP(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(size, 2 * size), nn.Linear(2 * size, size)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.fc1(x)
        return self.fc2(inner * torch.sigmoid(1.702 * inner))  # type: ignore[no-any-return]


class GatedMLP(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(size, 2 * size, bias=False), nn.Linear(size, 2 * size, bias=False)
        self.down = nn.Linear(2 * size, size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))  # type: ignore[no-any-return]


class Case(NamedTuple):
    layers: list[Block]
    state: EncoderState
    hidden: Tensor
    bounds: list[int]


def random_layer(rng: random.Random, num_heads: int, size: int, *, is_new: bool, has_norms: bool) -> Block:
    """One with layer norms, biases, and gains; or with RMS norms, a gated MLP, and one projection to all heads."""
    width, module = num_heads * size, nn.Module()
    module.out = nn.Linear(width, width, bias=not is_new)
    module.mlp = GatedMLP(width) if is_new else PlainMLP(width)
    module.norms = nn.ModuleList([(RMSNorm if is_new else nn.LayerNorm)(width) for _ in range(2)])
    count, each = (1, 3 * width) if is_new else (3, width)
    module.projections = nn.ModuleList([nn.Linear(width, each, bias=not is_new) for _ in range(count)])
    module.head_norms = nn.ModuleList([RMSNorm(width) for _ in range(2)] if has_norms else [])
    gains = None if is_new else (torch.rand(width) + 0.5, torch.rand(width) + 0.5)
    return Block(
        module, module.norms[0], list(module.projections), num_heads, rng.choice((size**-0.5, 0.3)), module.out,
        module.norms[1], module.mlp, list(module.head_norms), gains,
    )  # fmt: skip


def random_case(seed: int, dtype: torch.dtype) -> Case:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    num_heads, size = rng.choice((1, 3)), rng.choice((16, 24, 64, 72, 80))
    is_new, has_norms = rng.random() < 0.5, size % 16 == 0 and rng.random() < 0.5
    layers = [
        random_layer(rng, num_heads, size, is_new=is_new, has_norms=has_norms and not is_new) for _ in range(NUM_LAYERS)
    ]
    for layer in layers:
        layer.module.to(dtype)
    bounds = random_bounds(rng)
    num_rows = bounds[-1]
    state = EncoderState(bounds=bounds)
    if is_new:
        angles = torch.randn((num_rows, size // 2)).repeat(1, 2)
        state.rotations = angles.cos(), angles.sin()
    return Case(layers, state, torch.randn((num_rows, num_heads * size)).to(dtype), bounds)


def by_formulas(case: Case) -> Tensor:
    """All layers in float64."""
    x = case.hidden.double()
    for block in case.layers:
        block.module.double()
        q, k, v = (each.unflatten(1, (block.num_heads, -1)) for each in block.project(block.norm(x)))
        if case.state.rotations is not None:
            q, k = (rotated(each, *(angle[:, None].double() for angle in case.state.rotations)) for each in (q, k))
        gains = (1.0, 1.0) if block.gains is None else [each.double() for each in block.gains]
        x = x + gains[0] * block.out(by_mask(block.scale, q, k, v, case.bounds))
        x = x + gains[1] * block.mlp(block.mlp_norm(x))
    return x


def run(fused: FusedBlocks, case: Case, cuts: list[int], groups: list[int]) -> Tensor:
    """Take all rows through the layers; each call gets the pieces between two `groups`, which are some of the cuts."""
    state = EncoderState(bounds=case.bounds, rotations=case.state.rotations)
    state.hidden = case.hidden.clone()
    for layer in range(-1, NUM_LAYERS):
        for start, stop in itertools.pairwise(groups):
            fused.run(state, layer, case.bounds, [cut for cut in cuts if start <= cut <= stop])
    return state.hidden


def fused_layers(ops: CpuOps, case: Case) -> FusedBlocks:
    fused = fuse(ops, list(case.layers), ops.dtype)
    assert fused is not None
    return fused


@pytest.mark.parametrize(("dtype", "level"), KINDS)
def test_layers_are_those_of_formulas_and_pieces_have_the_same_bits_alone_and_together(
    dtype: torch.dtype, level: str
) -> None:
    for seed in range(5):
        case, rng = random_case(seed, dtype), random.Random(seed)
        with torch.inference_mode():
            expected = by_formulas(case)
            for block in case.layers:
                block.module.to(dtype)
            fused = fused_layers(make_cpu_ops(dtype, level), case)
            cuts = random_cuts(rng, case.bounds[-1])
            found = run(fused, case, cuts, cuts)
            for groups in ([cuts[0], cuts[-1]], sorted({cuts[0], rng.choice(cuts), cuts[-1]})):
                assert torch.equal(run(fused, case, cuts, groups), found)
        tolerance = 2e-4 if dtype == torch.float32 else 0.05
        assert (found - expected).abs().max() < tolerance * expected.abs().max()


def test_layers_with_other_parts_or_without_kernels_are_left_as_they_are() -> None:
    case = random_case(1, torch.float32)
    ops = make_cpu_ops(torch.float32, LEVELS[-1])
    assert fuse(ReferenceOps(), case.layers, torch.float32) is None
    case.layers[0].module.mlp.act = nn.Dropout()
    other = case.layers[0]._replace(mlp=nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)))
    assert fuse(ops, [other], torch.float32) is None
    assert len(case.layers) == NUM_LAYERS
    assert other.module._modules
