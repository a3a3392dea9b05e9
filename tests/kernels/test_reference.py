"""ReferenceOps against the formulas, written out in numpy and with dense masks, over many shapes and schedules."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

from tokenloom.kernels.batch_invariant import BatchInvariantOps
from tokenloom.kernels.contract import GATED_SILU, AttentionSpec, Routing
from tokenloom.kernels.reference import ReferenceOps
from tokenloom.tests.kernels.spans import dense_attention, with_spans
from tokenloom.tests.support.norms import rms
from tokenloom.tests.workers.paged_run import make_metadata

Row = tuple[int, int, list[int]]  # computed tokens, new tokens, block ids


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def scatter_rows(sizes: list[tuple[int, int]], block_size: int, num_blocks: int, seed: int) -> list[Row]:
    """Make rows of (computed, new) tokens with blocks scattered over the pool, except block 0."""
    free = list(range(1, num_blocks))
    random.Random(seed).shuffle(free)
    return [(c, n, [free.pop() for _ in range(-(-(c + n) // block_size))]) for c, n in sizes]


@pytest.mark.parametrize("is_normalized", [False, True])
@pytest.mark.parametrize(("num_experts", "top_k"), [(1, 1), (5, 2), (16, 16)])
def test_fused_moe_equals_a_loop_over_tokens(num_experts: int, top_k: int, is_normalized: bool) -> None:
    torch.manual_seed(num_experts)
    x, scores = torch.randn(9, 24), torch.randn(9, num_experts)
    gate_up, down = torch.randn(num_experts, 14, 24), torch.randn(num_experts, 24, 7)
    expected = np.zeros((9, 24))
    for token, values in enumerate(x.double().numpy()):
        weights = np.exp(scores[token].double().numpy())
        weights /= weights.sum()
        chosen = np.argsort(-weights)[:top_k]
        for expert in chosen:
            gate, up = np.split(gate_up[expert].double().numpy() @ values, 2)
            answer = down[expert].double().numpy() @ (gate / (1 + np.exp(-gate)) * up)
            expected[token] += answer * weights[expert] / (weights[chosen].sum() if is_normalized else 1)
    ops = ReferenceOps()
    mixed = ops.fused_moe(
        x, scores, ops.pack_experts(list(gate_up), list(down)), Routing(top_k, is_normalized=is_normalized)
    )
    np.testing.assert_allclose(mixed.numpy(), expected, atol=1e-4)
    assert ops.fused_moe(
        x[:0], scores[:0], ops.pack_experts(gate_up, down), Routing(1, is_normalized=is_normalized)
    ).shape == (0, 24)


SCHEDULES = {
    "decode of like lengths": [(30, 1), (31, 1), (28, 1)],
    "decode, one far longer": [(5, 1), (700, 1), (0, 1), (63, 1), (64, 1), (65, 1), (9, 1)],
    "prefill": [(0, 33), (0, 2)],
    "prefill longer than a query chunk": [(0, ReferenceOps.query_chunk_size + 40)],
    "later chunks": [(17, 21), (64, 3)],
    "mixed": [(12, 1), (200, 1), (0, 40), (40, 17), (15, 1)],
}


@pytest.mark.parametrize("ops", [ReferenceOps(), BatchInvariantOps()], ids=["plain", "batch_invariant"])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "block_size", "window", "softcap", "has_spans"),
    [
        (2, 2, 32, 16, None, 0.0, False),
        (6, 2, 80, 8, 37, 0.0, True),
        (8, 1, 64, 32, 1, 1.5, False),
        (6, 3, 16, 5, 16, 1.5, True),
    ],
)
def test_paged_attention_is_attention_over_each_rows_own_context(
    ops: ReferenceOps,
    schedule: str,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    window: int | None,
    softcap: float,
    has_spans: bool,
) -> None:
    torch.manual_seed(len(schedule))
    rows = scatter_rows(SCHEDULES[schedule], block_size, 300, seed=head_dim)
    metadata, spans = with_spans(make_metadata(rows, block_size), seed=head_dim)
    if not has_spans:
        metadata, spans = replace(metadata, see_until=None), [[]] * len(spans)
    spec = AttentionSpec(0.2, window, softcap, torch.randn(num_heads) if softcap else None)
    kv_cache = torch.randn(300, 2, 2, num_kv_heads, block_size, head_dim)
    projected = torch.randn(metadata.query_starts_host[-1], num_heads + 3, head_dim)
    query = projected[:, 1 : num_heads + 1]  # strided, as in a fused projection
    output = ops.paged_attention(query, kv_cache, 1, metadata, spec)
    expected = dense_attention(query, kv_cache, 1, metadata, spec, spans)
    torch.testing.assert_close(output, expected, atol=2e-6, rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scores_of_half_precision_are_summed_in_float32(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    rows = scatter_rows([(300, 1), (290, 1), (0, 40)], 16, 80, seed=1)
    metadata = make_metadata(rows, 16)
    kv_cache = torch.randn(80, 1, 2, 2, 16, 64).to(dtype)
    query = torch.randn(42, 6, 64).to(dtype)
    spec, rounding = AttentionSpec(0.125), torch.finfo(dtype).eps
    output = ReferenceOps().paged_attention(query, kv_cache, 0, metadata, spec)
    assert output.dtype == dtype
    exact = dense_attention(query, kv_cache, 0, metadata, spec, [[]] * 3)
    torch.testing.assert_close(output.float(), exact, atol=2 * rounding, rtol=2 * rounding)


def test_tokens_beyond_the_rows_and_empty_rows_get_zeros() -> None:
    rows = [*scatter_rows([(4, 1)], 8, 20, seed=0), *scatter_rows([(0, 5)], 8, 20, seed=0)]
    metadata = make_metadata(rows, 8)
    output = ReferenceOps().paged_attention(
        torch.randn(9, 2, 8), torch.randn(20, 1, 2, 1, 8, 8), 0, metadata, AttentionSpec(1.0, None)
    )
    assert output[:6].abs().amin() > 0
    assert output[6:].abs().amax() == 0


def test_step_without_tokens_is_legal() -> None:
    ops, metadata, kv_cache = ReferenceOps(), make_metadata([], 8), torch.zeros(4, 1, 2, 1, 8, 8)
    nothing = torch.empty(0, 1, 8)
    ops.store_kv(nothing, nothing, kv_cache, 0, metadata)
    assert ops.paged_attention(torch.empty(0, 2, 8), kv_cache, 0, metadata, AttentionSpec(1.0, None)).shape == (0, 2, 8)


def test_store_kv_writes_the_slots_of_its_layer_and_nothing_else() -> None:
    torch.manual_seed(0)
    rows = scatter_rows([(9, 1), (0, 11)], 4, 12, seed=3)
    metadata = make_metadata(rows, 4)
    metadata.slots[3] = -1
    kv_cache = torch.randn(12, 3, 2, 2, 4, 8)
    expected = kv_cache.clone()
    key, value = torch.randn(12, 5, 8)[:, 1:3], torch.randn(12, 2, 8)
    for token, slot in enumerate(metadata.slots.tolist()):
        if slot >= 0:
            expected[slot // 4, 1, 0, :, slot % 4] = key[token]
            expected[slot // 4, 1, 1, :, slot % 4] = value[token]
    ReferenceOps().store_kv(key, value, kv_cache, 1, metadata)
    assert torch.equal(kv_cache[1:], expected[1:])  # slot -1 may be written to the null block


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
def test_an_overflowed_request_does_not_poison_the_next_owner_of_its_block(poison: float) -> None:
    ops, kv_cache = ReferenceOps(), torch.zeros(4, 1, 2, 1, 8, 8)
    ops.store_kv(
        torch.full((8, 1, 8), poison), torch.full((8, 1, 8), poison), kv_cache, 0, make_metadata([(0, 8, [2])], 8)
    )
    metadata = make_metadata([(0, 3, [2])], 8)
    key, value, query = (torch.randn(3, 1, 8) for _ in range(3))
    ops.store_kv(key, value, kv_cache, 0, metadata)
    assert ops.paged_attention(query, kv_cache, 0, metadata, AttentionSpec(1.0, None)).isfinite().all()


def test_rotary_turns_each_pair_by_its_angle_in_place() -> None:
    torch.manual_seed(0)
    angles = torch.rand(50, 6) * 7
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1)
    projected = torch.randn(5, 4, 12)
    before, positions = projected.clone(), torch.tensor([0, 49, 7, 7, 3])
    ReferenceOps().rotate(projected[:, :3], positions, cos_sin)
    pairs = torch.complex(before[:, :3, :6], before[:, :3, 6:])
    turned = pairs * torch.polar(torch.ones(5, 1, 6), angles[positions][:, None])
    expected = torch.cat((turned.real, turned.imag), dim=-1)
    torch.testing.assert_close(projected[:, :3], expected)
    assert torch.equal(projected[:, 3], before[:, 3])


def test_norms_divide_by_the_root_mean_square() -> None:
    ops, x, residual, weight = ReferenceOps(), torch.randn(3, 5, 20), torch.randn(3, 5, 20), torch.randn(20)

    def norm(values: np.ndarray) -> np.ndarray:
        normed: np.ndarray = values / np.sqrt((values**2).mean(-1, keepdims=True) + 1e-3) * weight.numpy()
        return normed

    np.testing.assert_allclose(ops.norm(x, rms(weight, 1e-3)).numpy(), norm(x.numpy()), rtol=1e-4, atol=1e-6)
    total = x + residual
    normed = ops.add_norm(x, residual, rms(weight, 1e-3))
    assert torch.equal(residual, total)
    np.testing.assert_allclose(normed.numpy(), norm(total.numpy()), rtol=1e-4, atol=1e-6)


def test_silu_gates_the_second_half_with_the_first() -> None:
    x = torch.randn(7, 10)
    gate, up = x[:, :5].numpy(), x[:, 5:].numpy()
    np.testing.assert_allclose(
        ReferenceOps().activate(x, GATED_SILU).numpy(), gate / (1 + np.exp(-gate)) * up, rtol=1e-5
    )


def test_embedding_of_foreign_ids_is_zero() -> None:
    weight = torch.randn(4, 3)
    rows = ReferenceOps().embedding(torch.tensor([9, 10, 13, 14], dtype=torch.int32), weight, 10)
    assert torch.equal(rows, torch.stack((torch.zeros(3), weight[0], weight[3], torch.zeros(3))))


def test_linear_is_the_product_plus_bias() -> None:
    ops, x, weight, bias = ReferenceOps(), torch.randn(3, 5), torch.randn(4, 5), torch.randn(4)
    packed = ops.pack_linear(weight, bias)
    assert (packed.in_features, packed.out_features, packed.nbytes) == (5, 4, 24 * 4)
    torch.testing.assert_close(ops.linear(x, packed), x @ weight.T + bias)
