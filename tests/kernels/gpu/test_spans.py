"""Attention with spans in Triton is attention by a dense mask, over random steps, in the interpreter."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product

import pytest
import torch

from tokenloom.kernels.gpu.batch_invariant import BatchInvariantTritonOps
from tokenloom.kernels.gpu.ops import TritonOps
from tokenloom.tests.kernels.gpu.shapes import from_fp8, paged_step
from tokenloom.tests.kernels.spans import dense_attention, with_spans
from tokenloom.tests.support.today import some


@pytest.mark.parametrize(("kind", "seed"), some(list(product((TritonOps, BatchInvariantTritonOps), range(6))), 4))
def test_spans_attend_as_a_dense_mask_says(kind: type[TritonOps], seed: int) -> None:
    rng = random.Random(seed)
    step = paged_step(
        rng,
        decode_lengths=[rng.randrange(1, 300)] * (seed % 2),
        prefill_rows=[(rng.choice([0, 17, 200]), rng.choice([2, 40, 130])) for _ in range(2)],
        dtype=torch.float32,
        head_dim=rng.choice([64, 80]),
        group=rng.choice([1, 3, 4]),
        num_kv_heads=rng.choice([1, 2]),
        block_size=rng.choice([16, 64]),
        window=rng.choice([None, 5, 100]),
        has_fp8_cache=seed % 3 == 0,
        softcap=1.5 * (seed % 4 == 1),
    )
    metadata, spans = with_spans(step.metadata, seed)
    step = replace(step, metadata=metadata)
    kv_cache = from_fp8(step.kv_cache) if step.kv_cache.dtype == torch.uint8 else step.kv_cache
    exact = dense_attention(step.query, kv_cache, 1, metadata, step.spec, spans)
    answer = kind(90).paged_attention(step.query, step.kv_cache, 1, metadata, step.spec)
    torch.testing.assert_close(answer, exact, atol=1e-5, rtol=1e-5)
