"""ReferenceOps against the formulas, written out in numpy and with dense masks, over many shapes and schedules."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest
import torch

from tokenloom.kernels.batch_invariant import BatchInvariantOps
from tokenloom.kernels.contract import GATED_SILU, AttentionSpec, LowRankPart, LowRankUpdate, Routing
from tokenloom.kernels.reference import ReferenceOps, route
from tokenloom.tests.kernels.gpu.shapes import as_bytes
from tokenloom.tests.kernels.spans import dense_attention, with_spans
from tokenloom.tests.kernels.unseen import with_unseen_nan
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
    sinks = torch.randn(num_heads) if softcap else None
    bias = torch.randn(num_heads, 2 * max(metadata.seq_lens_host) - 1) if has_spans else None
    spec = AttentionSpec(0.2, window, softcap, sinks, bias)
    kv_cache = torch.randn(300, 2, 2, num_kv_heads, block_size, head_dim)
    projected = torch.randn(metadata.query_starts_host[-1], num_heads + 3, head_dim)
    query = projected[:, 1 : num_heads + 1]  # strided, as in a fused projection
    output = ops.paged_attention(query, kv_cache, 1, metadata, spec)
    expected = dense_attention(query, kv_cache, 1, metadata, spec, spans)
    torch.testing.assert_close(output, expected, atol=2e-6, rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scores_of_half_precision_are_summed_in_float32(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    metadata = make_metadata(scatter_rows([(300, 1), (290, 1), (0, 40)], 16, 80, seed=1), 16)
    kv_cache = torch.randn(80, 1, 2, 2, 16, 64).to(dtype)
    query = torch.randn(42, 6, 64).to(dtype)
    spec, tolerance = AttentionSpec(0.125), 2 * torch.finfo(dtype).eps
    output = ReferenceOps().paged_attention(query, kv_cache, 0, metadata, spec)
    assert output.dtype == dtype
    exact = dense_attention(query, kv_cache, 0, metadata, spec, [[]] * 3)
    torch.testing.assert_close(output.float(), exact, atol=tolerance, rtol=tolerance)


def test_tokens_beyond_the_rows_and_empty_rows_get_zeros() -> None:
    metadata = make_metadata(scatter_rows([(4, 1), (0, 5)], 8, 20, seed=0), 8)
    output = ReferenceOps().paged_attention(
        torch.randn(9, 2, 8), torch.randn(20, 1, 2, 1, 8, 8), 0, metadata, AttentionSpec(1.0)
    )
    assert output[:6].all() and not output[6:].any()


def test_store_kv_writes_the_slots_of_its_layer_and_nothing_else() -> None:
    metadata = make_metadata(scatter_rows([(9, 1), (0, 11)], 4, 12, seed=3), 4)
    metadata.slots[3] = -1
    kv_cache = torch.randn(12, 3, 2, 2, 4, 8)
    expected = kv_cache.clone()
    key, value = torch.randn(12, 5, 8)[:, 1:3], torch.randn(12, 2, 8)
    for token, slot in enumerate(metadata.slots.tolist()):
        if slot >= 0:
            expected[slot // 4, 1, :, :, slot % 4] = torch.stack((key[token], value[token]))
    ReferenceOps().store_kv(key, value, kv_cache, 1, metadata)
    assert torch.equal(kv_cache[1:], expected[1:])  # slot -1 may be written to the null block


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
def test_an_overflowed_request_does_not_poison_the_next_owner_of_its_block(poison: float) -> None:
    ops, kv_cache, stale = ReferenceOps(), torch.zeros(4, 1, 2, 1, 8, 8), torch.full((8, 1, 8), poison)
    ops.store_kv(stale, stale, kv_cache, 0, make_metadata([(0, 8, [2])], 8))
    metadata = make_metadata([(0, 3, [2])], 8)
    key, value, query = torch.randn(3, 3, 1, 8)
    ops.store_kv(key, value, kv_cache, 0, metadata)
    assert ops.paged_attention(query, kv_cache, 0, metadata, AttentionSpec(1.0)).isfinite().all()


@pytest.mark.parametrize("ops", [ReferenceOps(), BatchInvariantOps()], ids=["plain", "batch_invariant"])
@pytest.mark.parametrize("stored", [None, torch.int8, torch.uint8], ids=["elements", "int8", "e4m3"])
@pytest.mark.parametrize("schedule", ["decode, one far longer", "later chunks", "mixed"])
def test_nan_behind_the_windows_and_past_the_rows_ends_changes_no_bit(
    ops: ReferenceOps, stored: torch.dtype | None, schedule: str
) -> None:
    torch.manual_seed(0)
    for (window, block_size, softcap), dtype in product(
        [(None, 5, 0.0), (1, 8, 1.5), (20, 5, 0.0), (40, 32, 1.5)], [torch.float32, torch.bfloat16, torch.float16]
    ):
        metadata = make_metadata(scatter_rows(SCHEDULES[schedule], block_size, 300, 0), block_size)
        query = torch.randn(metadata.query_starts_host[-1], 4, 16, dtype=dtype)
        kv_cache = torch.randn(300, 2, 2, 2, block_size, 16).to(dtype)
        if stored is not None:
            kv_cache = as_bytes(kv_cache.float(), stored)
        spec, results = AttentionSpec(0.3, window, softcap), []
        for cache, placed in ((kv_cache, metadata), with_unseen_nan(kv_cache, metadata, window)):
            results.append(ops.paged_attention(query, cache, 1, placed, spec))
        assert torch.equal(*results) and results[0].isfinite().all()


def test_equal_scores_go_to_the_experts_of_lower_ids() -> None:
    assert route(torch.zeros(3, 8), Routing(3))[1].tolist() == [[0, 1, 2]] * 3


def test_a_token_has_the_same_sigmoids_alone_and_in_a_batch() -> None:
    scores, sigmoid = torch.randn(999, 20), ReferenceOps.sigmoid
    assert torch.equal(sigmoid(scores), torch.cat([sigmoid(row.clone()) for row in scores.split(1)]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_token_with_an_adapter_has_the_same_bits_alone_and_in_a_batch(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    ops, x, token_slots = BatchInvariantOps(), torch.randn(7, 24, dtype=dtype), torch.IntTensor([0, 2, 1, 0, 3, 2, 1])
    packed = ops.pack_linear(torch.randn(40, 24, dtype=dtype), torch.randn(40, dtype=dtype), GATED_SILU)
    space = ops.adapter_space(3, 8)
    slots = space.attach(packed, 2)
    for slot in (1, 2):
        parts = [LowRankPart(first, torch.randn(3, 24), torch.randn(20, 3)) for first in (0, 20)]
        slots.fill(slot, LowRankUpdate(parts, torch.rand(40) if slot > 1 else None))
    space.begin_step(token_slots)
    for row, slot, wanted in zip(x.split(1), token_slots.split(1), ops.linear(x, packed), strict=True):
        space.begin_step(slot)
        assert torch.equal(ops.linear(row, packed)[0], wanted)
    space.begin_step(token_slots[:0])
    assert len(ops.linear(x[:0], packed)) == 0
    assert space.nbytes == 3 * 4 * (8 * (2 * 24 + 40) + 40)
