"""Attention with spans in C is attention by a dense mask, for every instruction level that this machine has."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from tokenloom.kernels.contract import AttentionSpec
from tokenloom.kernels.cpu.cpu_ops import CpuOps
from tokenloom.kernels.cpu.library import KernelLibrary
from tokenloom.tests.kernels.cpu.levels import BF16_EPS, LEVELS, check
from tokenloom.tests.kernels.cpu.test_ops import draw_attention
from tokenloom.tests.kernels.spans import dense_attention, with_spans
from tokenloom.tests.workers.paged_run import make_metadata

pytestmark = pytest.mark.skipif(not LEVELS, reason="the processor has no AVX2")


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def check_spans(ops: CpuOps, seed: int) -> None:
    query, kv_cache, metadata, window, _, _ = draw_attention(seed, ops.dtype)
    metadata, spans = with_spans(metadata, seed)
    sinks = torch.randn(query.shape[1]) if seed % 3 == 0 else None
    spec = AttentionSpec(query.shape[2] ** -0.5, window, 2.5 * (seed % 4 == 0), sinks)
    exact = dense_attention(query, kv_cache, 1, metadata, spec, spans)
    answer = ops.paged_attention(query, kv_cache, 1, metadata, spec)
    check(answer, exact, atol=2 * BF16_EPS if ops.dtype == torch.bfloat16 else 1e-5)


@pytest.mark.parametrize("seed", range(80, 96))
def test_spans_attend_as_a_dense_mask_says(ops: CpuOps, seed: int) -> None:
    check_spans(ops, seed)


@pytest.mark.parametrize("seed", range(80, 84))
def test_spans_of_a_batch_invariant_step_attend_as_a_dense_mask_says(
    library: KernelLibrary, kind: tuple[torch.dtype, str], seed: int
) -> None:
    check_spans(CpuOps(library, kind[0], is_batch_invariant=True), seed)


@pytest.mark.parametrize("window", [None, 300])
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
