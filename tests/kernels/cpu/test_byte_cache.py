"""The C kernels over a KV cache of bytes: stored bytes are plain torch's, attention is that over the dequantized
ones."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tokenloom.kernels.byte_cache import parts
from tokenloom.kernels.contract import AttentionMetadata, AttentionSpec, Rotary
from tokenloom.kernels.cpu.cpu_ops import CpuOps
from tokenloom.kernels.cpu.library import KernelLibrary
from tokenloom.kernels.reference import ReferenceOps
from tokenloom.tests.kernels.cpu.levels import BF16_EPS, check
from tokenloom.tests.kernels.cpu.test_ops import draw_attention
from tokenloom.tests.kernels.gpu.shapes import as_bytes, from_bytes, next_number
from tokenloom.tests.kernels.spans import with_spans
from tokenloom.tests.support.norms import head_norms
from tokenloom.tests.support.today import some
from tokenloom.tests.workers.paged_run import make_metadata

KINDS = pytest.mark.parametrize("stored", [torch.int8, torch.uint8], ids=["int8", "e4m3"])
NO_ROTATION = Rotary(None)


def adversarial(x: Tensor) -> Tensor:
    """x [n, heads, D] with vectors that are hard to round: an outlier, zeros, halves between two numbers, tiny and
    largest magnitudes, NaN and infinities."""
    x[:, :, 1] *= 9
    x[1], x[2] = 0, 0
    x[2, :, 0] = 1e-44
    x[3] = torch.arange(x.shape[2]) + 0.5
    x[3, :, 0], x[4, :, 0], x[4, :, 2] = 127, 448, 2.0**-9
    x[5] = torch.arange(x.shape[2]) * 1e36
    x[6] *= 1e-33
    x[7, :, 3], x[7, :, 0], x[8] = torch.nan, torch.inf, -torch.inf
    return x


@KINDS
@pytest.mark.parametrize(("head_dim", "block_size"), [(64, 16), (128, 8), (80, 5), (4, 16), (512, 32), (36, 8)])
def test_keys_and_values_are_stored_with_the_bits_of_plain_torch(
    ops: CpuOps, stored: torch.dtype, head_dim: int, block_size: int
) -> None:
    torch.manual_seed(head_dim)
    metadata = make_metadata([(9, 1, [3, 4, 5]), (0, 12, [2, 6, 7])], block_size)
    metadata.slots[3] = -1
    heads = adversarial(torch.randn(13, 3 + 2 * 2, head_dim)).to(ops.dtype)
    cache = as_bytes(torch.randn(8, 3, 2, 2, block_size, head_dim), stored)
    wanted = cache.clone()
    reference = ReferenceOps().qk_norm_rope_cache(heads.clone(), None, NO_ROTATION, wanted, 1, metadata)
    query = ops.qk_norm_rope_cache(heads, None, NO_ROTATION, cache, 1, metadata)
    torch.testing.assert_close(query, reference, atol=0, rtol=0, equal_nan=True)
    assert torch.equal(cache[1:], wanted[1:])
    assert parts(cache.flatten(-2), block_size)[1].isfinite().all()


@KINDS
def test_normalized_and_rotated_keys_are_the_references_up_to_the_next_number(ops: CpuOps, stored: torch.dtype) -> None:
    torch.manual_seed(0)
    metadata = make_metadata([(9, 1, [3]), (0, 11, [2])], 16)
    heads = torch.randn(12, 3 + 2 * 1, 64).to(ops.dtype)
    angles = torch.rand(50, 32) * 7
    rotary = Rotary(torch.cat((angles.cos(), angles.sin()), dim=-1))
    norms = (torch.randn(64, dtype=ops.dtype), torch.randn(64, dtype=ops.dtype))
    cache = as_bytes(torch.randn(4, 1, 2, 1, 16, 64), stored)
    wanted, float_norms = cache.clone(), (norms[0].float(), norms[1].float())
    ReferenceOps().qk_norm_rope_cache(heads.float().clone(), head_norms(float_norms, 1e-6), rotary, wanted, 0, metadata)
    ops.qk_norm_rope_cache(heads, head_norms(norms, 1e-6), rotary, cache, 0, metadata)
    exact = from_bytes(wanted)
    rounding = 0.0 if ops.dtype == torch.float32 else BF16_EPS  # of a key, before it becomes bytes
    bound = next_number(exact, stored) * 1.01 + rounding * exact.abs() + 1e-6
    assert ((from_bytes(cache) - exact).abs() <= bound).all()


def attend(ops: CpuOps, query: Tensor, cache: Tensor, metadata: AttentionMetadata, spec: AttentionSpec) -> Tensor:
    """Return the kernels' attention, which is that over the dequantized keys and values within rounding."""
    exact = ReferenceOps().paged_attention(query.float(), cache, 0, metadata, spec)
    answer = ops.paged_attention(query, cache, 0, metadata, spec)
    check(answer, exact, atol=2 * BF16_EPS if ops.dtype == torch.bfloat16 else 2e-5)
    return answer


@KINDS
@pytest.mark.parametrize("seed", some(range(24), 4))
def test_attention_is_that_over_the_dequantized_keys_and_values(
    library: KernelLibrary, kind: tuple[torch.dtype, str], stored: torch.dtype, seed: int
) -> None:
    """With windows, soft caps, sinks, and spans of tokens that see each other."""
    ops = CpuOps(library, kind[0], is_batch_invariant=seed % 5 == 0)
    query, kv_cache, metadata, window, _, _ = draw_attention(seed, ops.dtype)
    if seed % 2:
        metadata, _ = with_spans(metadata, seed)
    kv_cache, query = kv_cache.float(), query.clone()
    kv_cache[:, :, 0, ..., 3] *= 9  # of keys
    query[..., 3] /= 9
    kv_cache[:, :, :, :, ::7] = 0
    sinks = torch.randn(query.shape[1]) * 3 + 4 if seed % 3 == 0 else None
    spec = AttentionSpec(2 * query.shape[2] ** -0.5, window, 1.5 * (seed % 4 == 0), sinks)
    attend(ops, query, as_bytes(kv_cache, stored), metadata, spec)


@KINDS
@pytest.mark.parametrize("head_dim", some([272, 500, 512], 1))
def test_large_heads_and_contexts_of_several_splits(ops: CpuOps, stored: torch.dtype, head_dim: int) -> None:
    torch.manual_seed(head_dim)
    rows = [(799, 1, list(range(1, 51))), (20, 40, list(range(51, 55)))]
    query = torch.randn(41, 6, head_dim, dtype=ops.dtype)
    cache = as_bytes(torch.randn(55, 1, 2, 2, 16, head_dim), stored)
    attend(ops, query, cache, make_metadata(rows, 16), AttentionSpec(head_dim**-0.5))


@KINDS
@pytest.mark.parametrize("head_dim", [64, 80])
def test_queries_that_are_hard_to_round_have_the_answers_of_their_floats(
    ops: CpuOps, stored: torch.dtype, head_dim: int
) -> None:
    """Heads with an outlier, of zeros, of tiny and of huge magnitudes, and one with nearly equal weights. Those with
    NaN or infinities have answers of NaN, and no other head has."""
    torch.manual_seed(head_dim)
    query = torch.randn(1, 8, head_dim)
    query[0, 0, 5], query[0, 1], query[0, 4] = 90, 0, query[0, 4] * 1e-3
    query[0, 2], query[0, 3] = query[0, 2] * 1e-38, query[0, 3] * 1e3
    query[0, 6, 7], query[0, 7, 9] = torch.nan, torch.inf
    cache = as_bytes(torch.randn(66, 1, 2, 2, 16, head_dim), stored)
    metadata, spec = make_metadata([(998, 1, list(range(1, 64)))], 16), AttentionSpec(head_dim**-0.5)
    query = query.to(ops.dtype)
    answer = ops.paged_attention(query, cache, 0, metadata, spec)[0].view(8, head_dim)
    exact = ReferenceOps().paged_attention(query.float(), cache, 0, metadata, spec)[0].view(8, head_dim)
    assert answer[6:].isnan().all()
    check(answer[:6], exact[:6], atol=2 * BF16_EPS if ops.dtype == torch.bfloat16 else 2e-5)


@KINDS
def test_stale_bytes_past_a_rows_end_count_nothing(ops: CpuOps, stored: torch.dtype) -> None:
    torch.manual_seed(1)
    metadata = make_metadata([(18, 1, [1, 2]), (0, 19, [3, 4])], 16)
    query, cache = torch.randn(20, 4, 64, dtype=ops.dtype), as_bytes(torch.randn(5, 1, 2, 2, 16, 64), stored)
    calm = ops.paged_attention(query, cache, 0, metadata, AttentionSpec(0.1))
    numbers, scales = parts(cache.flatten(-2), 16)
    for block in (2, 4):
        numbers[block, ..., 3:, :] = 0x7E
        scales[block, ..., 3:] = 1e30
    assert torch.equal(ops.paged_attention(query, cache, 0, metadata, AttentionSpec(0.1)), calm)


@KINDS
@pytest.mark.parametrize("seed", some(range(40, 46), 1))
@pytest.mark.parametrize("is_batch_invariant", [False, True])
def test_a_tokens_attention_does_not_depend_on_the_rows_beside_it(
    library: KernelLibrary, kind: tuple[torch.dtype, str], stored: torch.dtype, is_batch_invariant: bool, seed: int
) -> None:
    """That of a decode row; a batch-invariant one not on the size of its chunk either."""
    ops = CpuOps(library, kind[0], is_batch_invariant=is_batch_invariant)
    query, kv_cache, metadata, window, rows, block_size = draw_attention(seed, ops.dtype)
    spec, cache = AttentionSpec(0.1, window), as_bytes(kv_cache, stored)
    together = ops.paged_attention(query, cache, 0, metadata, spec)
    for row, (computed, count, blocks) in enumerate(rows if is_batch_invariant else rows[: metadata.num_decode_rows]):
        for place in range(0, count, 17):
            token = metadata.query_starts_host[row] + place
            alone = make_metadata([(computed + place, 1, blocks)], block_size)
            answer = ops.paged_attention(query[token : token + 1], cache, 0, alone, spec)
            assert torch.equal(answer[0], together[token])


@KINDS
@pytest.mark.parametrize("computed", [9, 250, 505])
def test_a_token_with_drafts_has_the_bits_that_it_has_alone(ops: CpuOps, stored: torch.dtype, computed: int) -> None:
    draw = random.Random(computed)
    torch.manual_seed(computed)
    blocks, spec = list(range(1, 40)), AttentionSpec(0.2, draw.choice([None, 100]))
    cache = as_bytes(torch.randn(41, 1, 2, 1, 16, 64), stored)
    query = torch.randn(5, 3, 64, dtype=ops.dtype)
    metadata = replace(make_metadata([(computed, 5, blocks)], 16), has_drafts=torch.ones(1, dtype=torch.int32))
    together = ops.paged_attention(query, cache, 0, metadata, spec)
    for token in range(5):
        alone = make_metadata([(computed + token, 1, blocks)], 16)
        assert torch.equal(ops.paged_attention(query[token : token + 1], cache, 0, alone, spec)[0], together[token])
