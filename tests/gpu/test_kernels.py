"""The operations that a GPU gets agree with the reference on the CPU, and its noise is the CPU's bit for bit.

Tolerances are relative to the largest element of the reference in float32 of the rounded inputs: TOLERANCE[dtype].
"""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch
from torch import Tensor

from tokenloom.kernels.byte_cache import LARGEST
from tokenloom.kernels.contract import GATED_SILU, NO_ACTIVATION, AttentionMetadata, AttentionSpec, Rotary
from tokenloom.kernels.reference import ReferenceOps
from tokenloom.kernels.select import Ops, select_ops
from tokenloom.tests.gpu.sizes import SIZES
from tokenloom.tests.kernels.gpu.shapes import as_bytes, from_bytes, next_number
from tokenloom.tests.kernels.test_reference import scatter_rows
from tokenloom.tests.support.norms import head_norms, rms
from tokenloom.tests.workers.paged_run import make_metadata

pytestmark = pytest.mark.gpu

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
DTYPES = list(TOLERANCE)
EPS = 1e-5


def assert_near(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    bound = TOLERANCE[dtype] * max(float(expected.abs().max()), 1.0)
    torch.testing.assert_close(actual.cpu().float(), expected.float(), atol=bound, rtol=0)


def rounded(*shape: int, dtype: torch.dtype) -> Tensor:
    """Random float32 values that `dtype` holds exactly."""
    return torch.randn(*shape).to(dtype).float()


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    torch.manual_seed(0)
    kind: torch.dtype = request.param
    return kind


@pytest.fixture
def ops(device: torch.device, dtype: torch.dtype) -> Ops:
    return select_ops(device, dtype)


def to_device(metadata: AttentionMetadata, device: torch.device) -> AttentionMetadata:
    tensors = {
        field.name: getattr(metadata, field.name).to(device)
        for field in dataclasses.fields(metadata)
        if isinstance(getattr(metadata, field.name), Tensor)
    }
    return dataclasses.replace(metadata, **tensors)


@torch.inference_mode()
@pytest.mark.parametrize("num_tokens", SIZES.num_tokens)
def test_linears_and_norms_agree_with_the_reference(
    num_tokens: int, ops: Ops, device: torch.device, dtype: torch.dtype
) -> None:
    reference = ReferenceOps()
    x, residual, scale = (rounded(*shape, dtype=dtype) for shape in ((num_tokens, 96), (num_tokens, 96), (96,)))
    weight, bias = rounded(130, 96, dtype=dtype) / 8, rounded(130, dtype=dtype)
    here = [tensor.to(device, dtype, copy=True) for tensor in (x, residual, scale, weight, bias)]
    for is_gated in (False, True):
        packed = reference.pack_linear(weight, bias, GATED_SILU if is_gated else NO_ACTIVATION)
        actual = ops.linear(here[0], ops.pack_linear(here[3], here[4], GATED_SILU if is_gated else NO_ACTIVATION))
        assert_near(actual, reference.linear(x, packed), dtype)
    plain = reference.pack_linear(weight, None)
    assert_near(ops.logits(here[0], ops.pack_linear(here[3], None)), reference.logits(x, plain), dtype)
    assert_near(ops.norm(here[0], rms(here[2], EPS)), reference.norm(x, rms(scale, EPS)), dtype)
    normed = ops.add_norm(here[0], here[1], rms(here[2], EPS))
    assert_near(normed, reference.add_norm(x, residual, rms(scale, EPS)), dtype)
    assert_near(here[1], residual, dtype)


@torch.inference_mode()
@pytest.mark.parametrize("bytes_of", [None, *LARGEST])
@pytest.mark.parametrize("seed", range(SIZES.num_schedules))
def test_heads_and_attention_agree_with_the_reference_over_random_schedules(
    seed: int, bytes_of: torch.dtype | None, ops: Ops, device: torch.device, dtype: torch.dtype
) -> None:
    if bytes_of == torch.uint8 and torch.cuda.get_device_capability(device) < (8, 9):
        pytest.skip("this device converts nothing to e4m3")
    draw = random.Random(seed)
    num_kv_heads, group = draw.choice([1, 2, 3, 8]), draw.choice([1, 2, 3, 4, 8])
    head_dim, block_size = draw.choice([64, 80, 96, 128, 256]), draw.choice([16, 32, 64])
    window = draw.choice([None, None, draw.randint(1, 90)])
    context, chunk = SIZES.longest_context, SIZES.longest_chunk
    decode = [(draw.choice([0, 1, 15, 16, draw.randint(0, context)]), 1) for _ in range(draw.randint(0, 12))]
    prefill = [(draw.choice([0, draw.randint(0, 300)]), draw.randint(2, chunk)) for _ in range(draw.randint(0, 3))]
    sizes = [*decode, *prefill] or [(3, 1)]
    num_blocks = 2 + sum(-(-(computed + new) // block_size) for computed, new in sizes)
    metadata = make_metadata(scatter_rows(sizes, block_size, num_blocks, seed), block_size)
    kv_cache = rounded(num_blocks, 2, 2, num_kv_heads, block_size, head_dim, dtype=dtype)
    heads = rounded(metadata.query_starts_host[-1], (group + 2) * num_kv_heads, head_dim, dtype=dtype)
    norms = None if seed % 2 else (rounded(head_dim, dtype=dtype), rounded(head_dim, dtype=dtype))
    angles = torch.rand(1024, head_dim // 2) * 7
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1)
    results = []
    for each, where, kind in ((ReferenceOps(), torch.device("cpu"), torch.float32), (ops, device, dtype)):
        cache = kv_cache.to(where, kind, copy=True) if bytes_of is None else as_bytes(kv_cache, bytes_of).to(where)
        scales = None if norms is None else (norms[0].to(where, kind), norms[1].to(where, kind))
        copied, step = heads.to(where, kind, copy=True), to_device(metadata, where)
        query = each.qk_norm_rope_cache(copied, head_norms(scales, EPS), Rotary(cos_sin.to(where)), cache, 1, step)
        query = query.clone()
        attended = each.paged_attention(query, cache, 1, step, AttentionSpec(head_dim**-0.5, window))
        results.append((query, attended, cache.cpu()[1:]))  # what is not to be written may land in the null block
    (query, attended, cache), (query_here, attended_here, cache_here) = results
    assert_near(query_here, query, dtype)
    assert_near(attended_here, attended, dtype if bytes_of is None else torch.bfloat16)
    if bytes_of is None:
        assert_near(cache_here, cache, dtype)
    else:
        stored, stored_here = from_bytes(cache), from_bytes(cache_here)
        assert float(((stored_here - stored).abs() - next_number(stored, bytes_of) * 1.02).max()) <= 0
