"""Attention with spans in C is attention by a dense mask, for every instruction level that this machine has."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tokenloom.kernels.contract import AttentionSpec
from tokenloom.kernels.cpu.cpu_ops import CpuOps
from tokenloom.kernels.cpu.library import KernelLibrary
from tokenloom.tests.kernels.cpu.levels import BF16_EPS, check
from tokenloom.tests.kernels.cpu.test_ops import draw_attention
from tokenloom.tests.kernels.spans import dense_attention, with_spans
from tokenloom.tests.support.today import some
from tokenloom.tests.workers.paged_run import make_metadata

SEEDS = [(seed, False) for seed in range(80, 96)] + [(seed, True) for seed in range(80, 84)]


@pytest.mark.parametrize(("seed", "is_batch_invariant"), some(SEEDS, 5))
def test_spans_attend_as_a_dense_mask_says(
    library: KernelLibrary, kind: tuple[torch.dtype, str], seed: int, is_batch_invariant: bool
) -> None:
    ops = CpuOps(library, kind[0], is_batch_invariant=is_batch_invariant)
    query, kv_cache, metadata, window, _, _ = draw_attention(seed, ops.dtype)
    metadata, spans = with_spans(metadata, seed)
    sinks = torch.randn(query.shape[1]) if seed % 3 == 0 else None
    spec = AttentionSpec(query.shape[2] ** -0.5, window, 2.5 * (seed % 4 == 0), sinks)
    exact = dense_attention(query, kv_cache, 1, metadata, spec, spans)
    answer = ops.paged_attention(query, kv_cache, 1, metadata, spec)
    check(answer, exact, atol=2 * BF16_EPS if ops.dtype == torch.bfloat16 else 1e-5)


@pytest.mark.parametrize("window", some([None, 300], 1))
def test_an_image_of_256_tokens_behind_a_long_context(ops: CpuOps, window: int | None) -> None:
    """Some strips of queries see keys of a later group of staged keys, others do not."""
    torch.manual_seed(0)
    see_until = torch.arange(900, 1600, dtype=torch.int32)
    see_until[100:356], see_until[360:616] = 1255, 1515
    metadata = replace(make_metadata([(900, 700, list(range(1, 102)))], 16), see_until=see_until)
    query, kv_cache = torch.randn(700, 8, 64, dtype=ops.dtype), torch.randn(102, 1, 2, 2, 16, 64).to(ops.dtype)
    spec, spans = AttentionSpec(0.2, window), [[range(1000, 1256), range(1260, 1516)]]
    exact = dense_attention(query, kv_cache, 0, metadata, spec, spans)
    answer = ops.paged_attention(query, kv_cache, 0, metadata, spec)
    check(answer, exact, atol=2 * BF16_EPS if ops.dtype == torch.bfloat16 else 1e-5)
