"""Attention with spans in plain torch is attention by a dense mask."""

from __future__ import annotations

import pytest
import torch

from tokenloom.kernels.batch_invariant import BatchInvariantOps
from tokenloom.kernels.contract import AttentionSpec
from tokenloom.kernels.reference import ReferenceOps
from tokenloom.tests.kernels.spans import dense_attention, with_spans
from tokenloom.tests.workers.paged_run import make_metadata

ROWS = [(40, 1, [1, 2, 3]), (0, 300, list(range(4, 23))), (21, 50, list(range(23, 28))), (3, 2, [28])]


@pytest.mark.parametrize("ops", [ReferenceOps(), BatchInvariantOps()], ids=["plain", "batch_invariant"])
@pytest.mark.parametrize(
    "spec",
    [AttentionSpec(0.3), AttentionSpec(0.3, 7), AttentionSpec(0.3, 100, 1.5, torch.randn(4)), AttentionSpec(0.3, 1)],
    ids=["plain", "window", "window, cap and sinks", "window of one"],
)
def test_spans_attend_as_a_dense_mask_says(ops: ReferenceOps, spec: AttentionSpec) -> None:
    torch.manual_seed(0)
    metadata, spans = with_spans(make_metadata(ROWS, 16), seed=0)
    query, kv_cache = torch.randn(353, 4, 8), torch.randn(29, 2, 2, 2, 16, 8)
    answer = ops.paged_attention(query, kv_cache, 1, metadata, spec)
    expected = dense_attention(query, kv_cache, 1, metadata, spec, spans)
    torch.testing.assert_close(answer, expected, atol=1e-5, rtol=1e-5)
    causal = dense_attention(query, kv_cache, 1, metadata, spec, [[]] * len(spans))
    assert (causal - expected).abs().amax() > 0.1
