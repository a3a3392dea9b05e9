"""A cache of bytes keeps its error bounds; attention over it equals a dense one over the dequantized values."""

from __future__ import annotations

import pytest
import torch

from tokenloom.kernels.byte_cache import LARGEST
from tokenloom.kernels.contract import AttentionSpec, Rotary
from tokenloom.kernels.reference import ReferenceOps
from tokenloom.tests.kernels.gpu.shapes import as_bytes, from_bytes
from tokenloom.tests.kernels.spans import dense_attention
from tokenloom.tests.kernels.test_reference import scatter_rows
from tokenloom.tests.workers.paged_run import make_metadata

KINDS = pytest.mark.parametrize("dtype", [torch.int8, torch.uint8])


def bound_of(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The largest errors that byte_cache.py states for x [..., D], and a little for the rounding of scales."""
    largest = x.abs().amax(-1, keepdim=True)
    if dtype == torch.int8:
        return largest.expand_as(x) / 254 * (1 + 1e-5)
    return torch.maximum(x.abs() / 16, largest / 448 / 1024) * (1 + 1e-5)


@KINDS
@pytest.mark.parametrize("size", [1e-30, 1e-3, 1.0, 1e4])
def test_an_element_is_stored_within_the_stated_bound(size: float, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(200, 64) * torch.logspace(-6, 0, 200)[:, None] ** torch.rand(200, 64) * size
    x[3] = 0
    x[4, 7] *= 1000  # one channel above all others
    stored = from_bytes(as_bytes(x.view(1, 10, 20, 64), dtype)).view(200, 64)
    bound = bound_of(x, dtype)
    assert ((stored - x).abs() <= bound).all()
    assert not stored[3].any()
    assert ((stored - x).abs() > 0.9 * bound).any()  # no better than stated


@KINDS
def test_magnitudes_whose_scale_would_be_subnormal_become_zeros(dtype: torch.dtype) -> None:
    x = torch.tensor([2.0**-149, 5e-43, 2.0**-127, -1e-36, LARGEST[dtype] * 2.0**-126])[:, None].expand(5, 8)
    stored = from_bytes(as_bytes(x.reshape(1, 5, 1, 8), dtype)).view(5, 8)
    assert not stored[:4].any()
    assert torch.equal(stored[4], x[4])


@KINDS
def test_halves_are_rounded_to_even_numbers(dtype: torch.dtype) -> None:
    largest = float(LARGEST[dtype])  # so that the scale is 1
    halves = {torch.int8: [0.5, 1.5, -2.5, 63.5], torch.uint8: [17.0, 19.0, -21.0, 2.0**-10]}[dtype]
    wanted = {torch.int8: [0.0, 2.0, -2.0, 64.0], torch.uint8: [16.0, 20.0, -20.0, 0.0]}[dtype]
    stored = from_bytes(as_bytes(torch.tensor([[[[*halves, largest, 0, 0, 0]]]]), dtype))
    assert stored.flatten()[:5].tolist() == [*wanted, largest]


@KINDS
@torch.inference_mode()
def test_attention_equals_that_over_dequantized_values(dtype: torch.dtype) -> None:
    ops = ReferenceOps()
    torch.manual_seed(1)
    block_size, rows = 16, scatter_rows([(30, 1), (5, 1), (20, 7)], 16, 9, seed=1)
    metadata = make_metadata(rows, block_size)
    cache = as_bytes(torch.randn(9, 2, 2, 2, block_size, 32), dtype)
    heads = torch.randn(9, 8, 32)
    cos_sin = torch.cat([torch.ones(64, 16), torch.zeros(64, 16)], dim=-1)
    query = ops.qk_norm_rope_cache(heads.clone(), None, Rotary(cos_sin), cache, 1, metadata).clone()
    plain = from_bytes(cache)
    blocks, places = metadata.slots // block_size, metadata.slots % block_size
    for side in (0, 1):
        given = heads[:, 4 + 2 * side : 6 + 2 * side]
        assert ((plain[blocks, 1, side, :, places] - given).abs() <= bound_of(given, dtype)).all()
    spec = AttentionSpec(32**-0.5)
    wanted = dense_attention(query, plain, 1, metadata, spec, [[]] * 3)
    torch.testing.assert_close(ops.paged_attention(query, cache, 1, metadata, spec), wanted, atol=2e-5, rtol=2e-5)
