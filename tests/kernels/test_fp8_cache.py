"""The fp8 cache keeps its error bounds; attention over it equals a dense one over the dequantized values."""

from __future__ import annotations

import pytest
import torch

from tokenloom.kernels import fp8_cache
from tokenloom.kernels.contract import AttentionSpec, Rotary
from tokenloom.kernels.reference import ReferenceOps
from tokenloom.kernels.select import select_ops
from tokenloom.tests.kernels.gpu.shapes import as_fp8, from_fp8
from tokenloom.tests.kernels.spans import dense_attention
from tokenloom.tests.kernels.test_reference import scatter_rows
from tokenloom.tests.workers.paged_run import make_metadata


@pytest.mark.parametrize("size", [1e-30, 1e-3, 1.0, 1e4])
def test_an_element_is_stored_within_the_stated_bound(size: float) -> None:
    torch.manual_seed(0)
    x = torch.randn(200, 64) * torch.logspace(-6, 0, 200)[:, None] ** torch.rand(200, 64) * size
    x[3] = 0
    stored = from_fp8(as_fp8(x.view(1, 10, 20, 64))).view(200, 64)
    bound = torch.maximum(x.abs() / 16, x.abs().amax(-1, keepdim=True) / 448 / 1024)
    assert ((stored - x).abs() <= bound * (1 + 1e-5)).all()
    assert not stored[3].any()
    assert ((stored - x).abs() > 0.9 * bound).any()  # no better than stated


@torch.inference_mode()
def test_attention_equals_that_over_dequantized_values() -> None:
    ops = ReferenceOps()
    torch.manual_seed(1)
    block_size, rows = 16, scatter_rows([(30, 1), (5, 1), (20, 7)], 16, 9, seed=1)
    metadata = make_metadata(rows, block_size)
    cache = as_fp8(torch.randn(9, 2, 2, 2, block_size, 32))
    heads = torch.randn(9, 8, 32)
    cos_sin = torch.cat([torch.ones(64, 16), torch.zeros(64, 16)], dim=-1)
    query = ops.qk_norm_rope_cache(heads.clone(), None, Rotary(cos_sin), cache, 1, metadata).clone()
    plain = from_fp8(cache)
    blocks, places = metadata.slots // block_size, metadata.slots % block_size
    for side in (0, 1):
        given = heads[:, 4 + 2 * side : 6 + 2 * side]
        bound = torch.maximum(given.abs() / 16, given.abs().amax(-1, keepdim=True) / 448 / 1024) * 1.0001
        assert ((plain[blocks, 1, side, :, places] - given).abs() <= bound).all()
    spec = AttentionSpec(32**-0.5)
    wanted = dense_attention(query, plain, 1, metadata, spec, [[]] * 3)
    torch.testing.assert_close(ops.paged_attention(query, cache, 1, metadata, spec), wanted, atol=2e-5, rtol=2e-5)


def test_a_cpu_falls_back_with_one_line(caplog: pytest.LogCaptureFixture) -> None:
    ops = select_ops(torch.device("cpu"), torch.bfloat16, has_fp8_cache=True)
    assert type(ops) is ReferenceOps
    (line,) = (record.message for record in caplog.records)
    assert "plain torch" in line and "the C kernels do not support an fp8 KV cache" in line
    assert fp8_cache.SCALE_BYTES == 4
