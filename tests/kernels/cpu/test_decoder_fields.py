"""Every field of DecoderWeights, alone and in combinations: the fused decoder and its operations equal the reference in
float32 within rounding, at every instruction level."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tokenloom.kernels.contract import GATED_SILU, Activation, CacheGroup
from tokenloom.kernels.cpu.cpu_ops import CpuOps
from tokenloom.kernels.reference import ReferenceOps
from tokenloom.tests.support.random_decoders import NUM_IDS, Builder, ExpertFields, Fields, run_layers
from tokenloom.tests.support.today import some
from tokenloom.tests.workers.paged_run import make_metadata

BLOCK_SIZE = 16
ROWS = [(300, 1, list(range(1, 20))), (3, 1, [20]), (30, 21, [21, 22, 23, 24])]  # the first row's context is split
UNGATED = [Activation(kind) for kind in ("silu", "gelu", "gelu_tanh", "quick_gelu", "relu", "relu2", "none")]
GATED = [Activation(kind, is_gated=True) for kind in ("gelu", "gelu_tanh", "relu", "relu2", "none")]
EXPERTS = [
    ExpertFields(),
    ExpertFields(top_k=1, is_normalized=True, shared="plain"),
    ExpertFields(num_experts=20, score="sigmoid", has_choice_bias=True, is_normalized=True, scale=2.5),
    ExpertFields(num_experts=8, score="sigmoid", num_groups=4, top_groups=2, group_score="top2", shared="plain"),
    ExpertFields(num_experts=12, score="softmax_of_chosen", num_groups=3, top_groups=1, has_expert_scales=True),
    ExpertFields(num_experts=40, top_k=5, has_choice_bias=True, shared="gated"),
]
VALUES: dict[str, list[Any]] = {  # other than the default
    "hidden_size": [64],
    "inner_sizes": [(50, 70), (96, 32)],
    "num_kv_heads": [1, 4],
    "head_dim": [32, 72],
    "norm": ["layer"],
    "has_norm_weight": [False],
    "has_norm_bias": [True],
    "order": ["post", "sandwich", "parallel", "parallel with two norms"],
    "head_norms": ["shared", "per head", "spanning"],
    "rotated": [(8, 16), (24, 0), (0, 0)],
    "has_query_scale": [True],
    "scales": [(0.4, 0.4), (0.2, 0.05)],
    "windows": [(None, 20), (5, 5)],
    "softcap": [1.0],
    "has_sinks": [True],
    "has_position_bias": [True],
    "qkv_clip": [0.7],
    "activation": [*UNGATED, *GATED, Activation("swiglu_clamped", is_gated=True, limit=0.5)],
    "experts": EXPERTS,
    "has_bias": [True],
    "is_tied": [True],
    "has_positions": [True],
    "embedding_scale": [6.0],
    "residual_scale": [0.3],
    "logit_scale": [0.25],
    "logit_softcap": [0.5],
}
OF_HEAD_NORMS: dict[str, list[Any]] = {"head_norm": ["layer"], "has_head_bias": [True], "is_after_rope": [True]}
ALONE = [
    (Fields(norm="layer" if name == "has_norm_bias" else "rms"), name, value)
    for name, values in VALUES.items()
    for value in values
]
ALONE += [
    (Fields(head_norms=norms, head_norm="layer" if name == "has_head_bias" else "rms"), name, value)
    for norms in ("shared", "per head", "spanning")
    for name, values in OF_HEAD_NORMS.items()
    for value in values
]
INDICES = torch.tensor([22, 0, 1, 7])


def fill_cache(fields: Fields, dtype: torch.dtype) -> Tensor:
    torch.manual_seed(0)
    shape = (25, 2, 2, fields.num_kv_heads, BLOCK_SIZE, fields.head_dim)
    return torch.randn(shape).bfloat16().to(dtype)


def run(fields: Fields, ops: CpuOps, is_fused: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return hidden states, logits and the cache after one step."""
    weights, cache = Builder(fields, ops, ops.dtype).decoder(), fill_cache(fields, ops.dtype)
    metadata = make_metadata(ROWS, BLOCK_SIZE)
    token_ids = torch.arange(metadata.query_starts_host[-1]) * 7 % NUM_IDS
    if not is_fused:
        return *run_layers(ops, weights, token_ids, INDICES, metadata, cache), cache
    decoder = ops.fuse_decoder(weights)
    assert decoder is not None
    hidden, logits = decoder(token_ids, INDICES, [CacheGroup(cache, metadata)])
    return hidden.clone(), logits.clone(), cache


def run_exact(fields: Fields) -> tuple[Tensor, Tensor, Tensor]:
    weights, cache = Builder(fields, ReferenceOps(), torch.float32).decoder(), fill_cache(fields, torch.float32)
    metadata = make_metadata(ROWS, BLOCK_SIZE)
    token_ids = torch.arange(metadata.query_starts_host[-1]) * 7 % NUM_IDS
    return *run_layers(ReferenceOps(), weights, token_ids, INDICES, metadata, cache), cache


def check_fields(fields: Fields, ops: CpuOps) -> None:
    """In bf16 the roundings of two layers are allowed for, relative to the deviation of the numbers. They change the
    choice of experts for a few tokens, so that experts are judged by the median token."""
    exact = run_exact(fields)
    for is_fused in (True, False):
        for answer, expected in zip(run(fields, ops, is_fused), exact, strict=True):
            if ops.dtype == torch.float32:
                torch.testing.assert_close(answer, expected, rtol=1e-4, atol=1e-4 * float(expected.std()))
            else:
                error = (answer.float() - expected) / expected.std()
                if fields.experts:
                    assert error.square().mean(dim=-1).sqrt().median() < 0.05
                    continue
                assert error.square().mean().sqrt() < 0.03 and error.abs().amax() < 0.3


@pytest.mark.parametrize(("base", "name", "value"), some(ALONE, 20), ids=lambda value: str(value)[:40])
def test_each_field_alone(ops: CpuOps, base: Fields, name: str, value: object) -> None:
    fields = replace(base, **{name: value})
    if name == "head_dim":
        fields = replace(fields, rotated=(fields.head_dim, fields.head_dim))
    check_fields(fields, ops)
    if ops.dtype == torch.float32 and name not in ("hidden_size", "num_kv_heads", "head_dim", "inner_sizes"):
        before, after = run(base, ops, True), run(fields, ops, True)
        assert max(float((a - b).abs().amax()) for a, b in zip(before[:2], after[:2], strict=True)) > 0.05


@pytest.mark.parametrize("seed", some(range(16), 4))
def test_random_combinations(ops: CpuOps, seed: int) -> None:
    draw = random.Random(seed)
    chosen = {name: draw.choice(values) for name, values in VALUES.items() if draw.random() < 0.4}
    chosen |= {name: draw.choice(values) for name, values in OF_HEAD_NORMS.items() if draw.random() < 0.4}
    chosen.setdefault("activation", GATED_SILU)
    fields = Fields(**chosen)
    if "rotated" not in chosen:
        fields = replace(fields, rotated=(fields.head_dim, fields.head_dim))
    check_fields(fields, ops)


@pytest.mark.parametrize("seed", some(range(4), 2))
def test_a_row_does_not_depend_on_the_rows_beside_it(ops: CpuOps, seed: int) -> None:
    draw = random.Random(seed)
    order = ("post", "sandwich", "parallel", "parallel with two norms")[seed]
    chosen = {name: draw.choice(values) for name, values in VALUES.items() if draw.random() < 0.5}
    fields = Fields(**{**chosen, "order": order, "head_norms": ("spanning", "per head")[seed % 2], "rotated": (24, 8)})
    weights, cache = Builder(fields, ops, ops.dtype).decoder(), fill_cache(fields, ops.dtype)
    decoder = ops.fuse_decoder(weights)
    assert decoder is not None
    group = CacheGroup(cache.clone(), make_metadata(ROWS, BLOCK_SIZE))
    together = decoder(torch.arange(23), torch.arange(23), [group])[1].clone()
    for row in range(2):
        group = CacheGroup(cache.clone(), make_metadata([ROWS[row]], BLOCK_SIZE))
        alone = decoder(torch.tensor([row]), torch.tensor([0]), [group])
        assert torch.equal(alone[1][0], together[row])


def test_each_layer_uses_the_cache_slots_and_tables_of_its_group(ops: CpuOps) -> None:
    """The second layer's group has its own blocks; those behind its window are the null block, which holds NaN."""
    fields = Fields(windows=(None, 20))
    weights, cache = Builder(fields, ops, ops.dtype).decoder(), fill_cache(fields, ops.dtype)
    token_ids, places = torch.arange(23) * 7 % NUM_IDS, torch.randperm(30) + 1
    results = []
    moved = replace(weights.layers[1], attention=replace(weights.layers[1].attention, group=1, cache_layer=0))
    for layers in (weights.layers, [weights.layers[0], moved]):
        metadata, whole = make_metadata(ROWS, BLOCK_SIZE), cache.clone()
        groups = [CacheGroup(whole, metadata)]
        if layers is not weights.layers:
            own = torch.full((31, 1, *cache.shape[2:]), torch.nan, dtype=ops.dtype)
            own[places[: len(cache) - 1], 0] = cache[1:, 1]
            tables, firsts = metadata.block_tables.clone(), (metadata.seq_lens - torch.tensor([1, 1, 21]) - 19)
            own_tables = torch.where(tables > 0, places[tables.long() - 1].int(), 0)
            for row, first in enumerate(firsts.clamp(min=0) // BLOCK_SIZE):
                own_tables[row, :first] = 0
            slots = places[metadata.slots // BLOCK_SIZE - 1] * BLOCK_SIZE + metadata.slots % BLOCK_SIZE
            groups.append(CacheGroup(own, replace(metadata, slots=slots, block_tables=own_tables)))
            groups[0] = CacheGroup(whole[:, :1].contiguous(), metadata)
        decoder = ops.fuse_decoder(replace(weights, layers=layers))
        assert decoder is not None
        results.append([each.clone() for each in decoder(token_ids, INDICES, groups)])
    assert all(map(torch.equal, *results))
