"""Slots that a step's tokens do not see change no bit, even with NaN, at every instruction level."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from tokenloom.kernels.contract import AttentionSpec
from tokenloom.kernels.cpu.cpu_ops import CpuOps
from tokenloom.kernels.cpu.library import KernelLibrary
from tokenloom.tests.kernels.cpu.test_ops import draw_attention
from tokenloom.tests.kernels.gpu.shapes import as_bytes
from tokenloom.tests.kernels.spans import with_spans
from tokenloom.tests.kernels.unseen import with_unseen_nan
from tokenloom.tests.support.today import some


@pytest.mark.parametrize("stored", [None, torch.int8, torch.uint8], ids=["elements", "int8", "e4m3"])
@pytest.mark.parametrize("seed", some(range(40), 8))
def test_nan_behind_the_windows_and_past_the_rows_ends_changes_no_bit(
    library: KernelLibrary, kind: tuple[torch.dtype, str], stored: torch.dtype | None, seed: int
) -> None:
    """Over decode rows, prompts, drafts and spans, with sinks and soft caps."""
    draw = random.Random(seed)
    ops = CpuOps(library, kind[0], is_batch_invariant=seed % 5 == 0)
    query, kv_cache, metadata, _, _, _ = draw_attention(seed, ops.dtype)
    if stored is not None:
        kv_cache = as_bytes(kv_cache.float(), stored)
    if seed % 3 == 0:
        metadata, _ = with_spans(metadata, seed)
    elif seed % 3 == 1:
        has_drafts = torch.tensor([draw.random() < 0.5 for _ in metadata.seq_lens_host], dtype=torch.int32)
        metadata = replace(metadata, has_drafts=has_drafts)
    sinks = torch.randn(query.shape[1]) if seed % 2 else None
    spec = AttentionSpec(query.shape[2] ** -0.5, draw.choice([1, 7, 48, 100, 300, None]), 1.5 * (seed % 4 == 0), sinks)
    calm = ops.paged_attention(query, kv_cache, 1, metadata, spec)
    kv_cache, metadata = with_unseen_nan(kv_cache, metadata, spec.window)
    answer = ops.paged_attention(query, kv_cache, 1, metadata, spec)
    assert torch.equal(answer, calm) and calm.isfinite().all()
