"""CpuOps against ReferenceOps in float32 on the same numbers, for every instruction level that this machine has.

With AVX512-BF16 and no AMX, the AMX level runs on tiles in plain C.
"""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor

from tokenloom.kernels.contract import (
    GATED_SILU,
    NO_ACTIVATION,
    Activation,
    ActivationKind,
    AttentionMetadata,
    AttentionSpec,
    Rotary,
)
from tokenloom.kernels.cpu.cpu_ops import CpuOps
from tokenloom.kernels.cpu.library import KernelLibrary
from tokenloom.kernels.reference import ReferenceOps
from tokenloom.tests.kernels.cpu.levels import BF16_EPS, check
from tokenloom.tests.kernels.spans import with_spans
from tokenloom.tests.support.norms import head_norms
from tokenloom.tests.support.today import some
from tokenloom.tests.workers.paged_run import make_metadata


def draw_shape(seed: int) -> tuple[int, int, int]:
    draw = random.Random(seed)
    num_rows = draw.choice([1, 2, 7, 8, 15, 16, 17, 31, 32, 33, 48, draw.randint(1, 300)])
    return num_rows, draw.randint(1, 200), draw.choice([1, 15, 32, 33, 64, draw.randint(1, 400)])


@pytest.mark.parametrize("seed", some(range(24), 6))
def test_linear_is_the_reference_linear(ops: CpuOps, seed: int) -> None:
    torch.manual_seed(seed)
    num_rows, num_outputs, num_inputs = draw_shape(seed)
    x = torch.randn(num_rows, num_inputs + 5, dtype=ops.dtype)[:, :num_inputs]  # rows apart
    weight = (torch.randn(2 * num_outputs, num_inputs) / num_inputs**0.5).to(ops.dtype)
    bias = torch.randn(2 * num_outputs, dtype=ops.dtype) if seed % 2 else None
    reference, float_bias = ReferenceOps(), None if bias is None else bias.float()
    for activation in (NO_ACTIVATION, GATED_SILU):
        exact = reference.linear(x.float(), reference.pack_linear(weight.float(), float_bias, activation))
        packed = ops.pack_linear(weight, bias, activation)
        assert (packed.in_features, packed.out_features) == (num_inputs, exact.shape[1])
        check(ops.linear(x, packed), exact)
        if not activation.is_gated:
            check(ops.logits(x, packed), exact)


@pytest.mark.parametrize("name", ["gelu", "gelu_tanh", "quick_gelu", "silu", "relu", "relu2"])
def test_an_activation_is_exact_to_float32(ops: CpuOps, name: ActivationKind) -> None:
    x = torch.cat((torch.linspace(-12, 12, 5001), torch.tensor([0.0, 1e-20, 30, -30, torch.inf, torch.nan])))[:, None]
    x = x.to(ops.dtype)
    answer = ops.linear(x, ops.pack_linear(torch.ones(1, 1, dtype=ops.dtype), None, Activation(name)))
    exact = ReferenceOps().activate(x.double(), Activation(name))
    allowed = 2e-7 if ops.dtype == torch.float32 else BF16_EPS
    scale = x.double().abs().clamp(min=1) ** (2 if name == "relu2" else 1)
    assert answer[-2] == torch.inf and answer[-1].isnan()
    assert ((answer.double() - exact).abs() / scale)[:-2].amax() < allowed


def test_nan_and_infinity_do_not_spread_to_other_rows(ops: CpuOps) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(20, 64, dtype=ops.dtype), torch.randn(64, 64, dtype=ops.dtype)
    packed = ops.pack_linear(weight, None, GATED_SILU)
    calm = ops.linear(x, packed)
    x[7, 3], x[8, 3] = torch.nan, torch.inf
    answer = ops.linear(x, packed)
    assert answer[7].isnan().all() and not answer[8].isfinite().all()
    x[7:9] = 0
    answer[7:9] = calm[7:9]
    assert torch.equal(answer, calm)


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "block_size", "has_norms"),
    [(3, 1, 64, 16, False), (8, 8, 128, 8, True), (6, 2, 80, 32, True), (2, 1, 6, 5, False)],
)
def test_qk_norm_rope_cache_is_the_references(
    ops: CpuOps, num_heads: int, num_kv_heads: int, head_dim: int, block_size: int, has_norms: bool
) -> None:
    torch.manual_seed(head_dim)
    metadata = make_metadata([(9, 1, [3, 4, 5]), (0, 11, [2, 6, 7])], block_size)
    metadata.slots[3] = -1
    heads = torch.randn(12, num_heads + 2 * num_kv_heads, head_dim, dtype=ops.dtype)
    angles = torch.rand(50, head_dim // 2) * 7
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1)
    norms = (torch.randn(head_dim, dtype=ops.dtype), torch.randn(head_dim, dtype=ops.dtype)) if has_norms else None
    heads[5, -1, 3], heads[6, num_heads, 1] = torch.nan, torch.inf  # a value, a key
    kv_cache = torch.randn(8, 3, 2, num_kv_heads, block_size, head_dim, dtype=ops.dtype)
    exact_cache, exact_norms = kv_cache.float(), None if norms is None else (norms[0].float(), norms[1].float())
    exact = ReferenceOps().qk_norm_rope_cache(
        heads.float(), head_norms(exact_norms, 1e-6), Rotary(cos_sin), exact_cache, 1, metadata
    )
    before = kv_cache.clone()
    query = ops.qk_norm_rope_cache(heads, head_norms(norms, 1e-6), Rotary(cos_sin), kv_cache, 1, metadata)
    check(query, exact, atol=1e-5)
    check(kv_cache[1:], exact_cache[1:], atol=1e-5)
    assert kv_cache.isfinite().all()
    assert torch.equal(kv_cache[:, ::2], before[:, ::2])  # other layers
    assert torch.equal(kv_cache[0], before[0])  # slot -1


LONGEST = 1000  # tokens of a row


def draw_attention(
    seed: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, AttentionMetadata, int | None, list[tuple[int, int, list[int]]], int]:
    """Query, cache, metadata, window, rows, block size of a random step."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    num_kv_heads, group = draw.choice([1, 2, 3]), draw.choice([1, 3, 8, 20])
    head_dim, block_size = draw.choice([16, 32, 40, 64, 80, 128, 256]), draw.choice([5, 8, 16, 24, 32])
    lengths = [draw.choice([1, 2, 16, 255, 256, 257, draw.randint(1, LONGEST)]) for _ in range(draw.randint(1, 6))]
    counts = [1 if draw.random() < 0.5 else draw.randint(1, length) for length in lengths]
    num_blocks = 1 + sum(-(-length // block_size) for length in lengths)
    free = list(range(1, num_blocks))
    draw.shuffle(free)
    rows = sorted(
        (
            (length - count, count, [free.pop() for _ in range(-(-length // block_size))])
            for length, count in zip(lengths, counts, strict=True)
        ),
        key=lambda row: row[1] != 1,
    )
    query = torch.randn(sum(counts), num_kv_heads * group, head_dim, dtype=dtype)
    kv_cache = torch.randn(num_blocks, 2, 2, num_kv_heads, block_size, head_dim).to(dtype)
    window = draw.choice([None, None, 1, 48, 300])
    return query, kv_cache, make_metadata(rows, block_size), window, rows, block_size


def attend(
    ops: CpuOps, query: Tensor, kv_cache: Tensor, layer: int, metadata: AttentionMetadata, spec: AttentionSpec
) -> Tensor:
    """Return the kernels' attention, which is the reference's within rounding."""
    exact = ReferenceOps().paged_attention(query.float(), kv_cache.float(), layer, metadata, spec)
    answer = ops.paged_attention(query, kv_cache, layer, metadata, spec)
    # In prefill the weights of a sum are rounded to bf16, too, before values of deviation 1 are added.
    check(answer, exact, atol=2 * BF16_EPS if ops.dtype == torch.bfloat16 else 1e-5)
    return answer


@pytest.mark.parametrize("seed", some(range(24), 8))
def test_paged_attention_is_the_reference_attention(
    library: KernelLibrary, kind: tuple[torch.dtype, str], seed: int
) -> None:
    """Some steps have spans of tokens that see each other. Scores deviate by 2: a cap and most sinks matter."""
    ops = CpuOps(library, kind[0], is_batch_invariant=seed % 5 == 0)
    query, kv_cache, metadata, window, _, _ = draw_attention(seed, ops.dtype)
    if seed % 2:
        metadata, _ = with_spans(metadata, seed)
    sinks = torch.randn(query.shape[1]) * 3 + 4 if seed % 3 == 0 else None
    bias = torch.randn(query.shape[1], 2 * LONGEST - 1) if seed % 2 else None
    spec = AttentionSpec(2 * query.shape[2] ** -0.5, window, 1.5 * (seed % 4 == 0), sinks, bias)
    attend(ops, query, kv_cache, 1, metadata, spec)


@pytest.mark.parametrize("window", some([None, 300], 1))
def test_an_image_of_256_tokens_behind_a_long_context(ops: CpuOps, window: int | None) -> None:
    """Some strips of queries see keys of a later group of staged keys, others do not."""
    torch.manual_seed(0)
    see_until = torch.arange(900, 1600, dtype=torch.int32)
    see_until[100:356], see_until[360:616] = 1255, 1515
    metadata = replace(make_metadata([(900, 700, list(range(1, 102)))], 16), see_until=see_until)
    query, kv_cache = torch.randn(700, 8, 64, dtype=ops.dtype), torch.randn(102, 1, 2, 2, 16, 64).to(ops.dtype)
    attend(ops, query, kv_cache, 0, metadata, AttentionSpec(0.2, window))


SHAPES = [  # heads, KV heads, elements of a head, tokens of each row: computed, new
    *((6, 2, head_dim, [(299, 1), (20, 40)]) for head_dim in (272, 500, 512)),
    (4, 2, 64, [(4999, 1), (2000, 600)]),
    # a block of a prompt has up to 512 query rows; its last block is one token with a context of several splits
    *((num_heads, 1, 64, [(700, count)]) for num_heads, count in [(20, 26), (20, 51), (3, 2), (3, 5), (1, 513)]),
]


@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim", "sizes"), some(SHAPES, 4))
def test_large_heads_long_contexts_and_blocks_of_one_token_are_the_references(
    ops: CpuOps, num_heads: int, num_kv_heads: int, head_dim: int, sizes: list[tuple[int, int]]
) -> None:
    torch.manual_seed(head_dim)
    free, rows = 1, []
    for computed, count in sizes:
        num_blocks = -(-(computed + count) // 16)
        rows.append((computed, count, list(range(free, free + num_blocks))))
        free += num_blocks
    query = torch.randn(sum(count for _, count in sizes), num_heads, head_dim, dtype=ops.dtype)
    kv_cache = torch.randn(free, 1, 2, num_kv_heads, 16, head_dim).to(ops.dtype)
    spec = AttentionSpec(head_dim**-0.5, sinks=torch.randn(num_heads) if head_dim > 64 else None)
    attend(ops, query, kv_cache, 0, make_metadata(rows, 16), spec)


def test_a_sink_of_minus_infinity_changes_nothing(ops: CpuOps) -> None:
    query, kv_cache, metadata, _, _, _ = draw_attention(61, ops.dtype)
    sinks = torch.full((query.shape[1],), -torch.inf)
    plain = ops.paged_attention(query, kv_cache, 0, metadata, AttentionSpec(0.1))
    assert torch.equal(ops.paged_attention(query, kv_cache, 0, metadata, AttentionSpec(0.1, sinks=sinks)), plain)


@pytest.mark.parametrize("seed", some(range(40, 46), 2))
@pytest.mark.parametrize("is_batch_invariant", [False, True])
def test_a_tokens_attention_does_not_depend_on_the_rows_beside_it(
    library: KernelLibrary, kind: tuple[torch.dtype, str], is_batch_invariant: bool, seed: int
) -> None:
    """That of a decode row; a batch-invariant one not on the size of its chunk either."""
    ops = CpuOps(library, kind[0], is_batch_invariant=is_batch_invariant)
    query, kv_cache, metadata, window, rows, block_size = draw_attention(seed, ops.dtype)
    spec = AttentionSpec(0.1, window)
    together = ops.paged_attention(query, kv_cache, 0, metadata, spec)
    for row, (computed, count, blocks) in enumerate(rows if is_batch_invariant else rows[: metadata.num_decode_rows]):
        for place in range(0, count, 17):
            token = metadata.query_starts_host[row] + place
            alone = make_metadata([(computed + place, 1, blocks)], block_size)
            assert torch.equal(
                ops.paged_attention(query[token : token + 1], kv_cache, 0, alone, spec)[0], together[token]
            )


FORMS = list(product([(3, 1), (8, 1), (40, 1), (4, 4)], [None, 100], [0, 9, 240, 250, 500, 505, 1017]))


@pytest.mark.parametrize(("heads", "window", "computed"), some(FORMS, 8))
def test_a_token_with_drafts_has_the_bits_that_it_has_alone(
    ops: CpuOps, heads: tuple[int, int], window: int | None, computed: int
) -> None:
    """Contexts are cut every 256 keys: tokens stand on both sides of a cut, and so do the begins of their windows."""
    torch.manual_seed(computed)
    (num_heads, num_kv_heads), head_dim, block_size = heads, 64, 16
    blocks = list(range(1, 70))
    kv_cache = torch.randn(71, 1, 2, num_kv_heads, block_size, head_dim).to(ops.dtype)
    spec = AttentionSpec(0.2, window, sinks=torch.randn(num_heads) if computed % 2 else None)
    for count in (2, 5, 16):
        query = torch.randn(count, num_heads, head_dim, dtype=ops.dtype)
        metadata = replace(
            make_metadata([(computed, count, blocks)], block_size), has_drafts=torch.ones(1, dtype=torch.int32)
        )
        together = ops.paged_attention(query, kv_cache, 0, metadata, spec)
        for token in range(count):
            alone = make_metadata([(computed + token, 1, blocks)], block_size)
            answer = ops.paged_attention(query[token : token + 1], kv_cache, 0, alone, spec)
            assert torch.equal(answer[0], together[token])


def test_tokens_beyond_the_rows_and_empty_rows_get_zeros(ops: CpuOps) -> None:
    metadata = make_metadata([(4, 1, [3]), (0, 5, [2]), (0, 0, [])], 8)
    query, kv_cache = torch.randn(9, 2, 16, dtype=ops.dtype), torch.randn(20, 1, 2, 1, 8, 16).to(ops.dtype)
    output = ops.paged_attention(query, kv_cache, 0, metadata, AttentionSpec(1.0, None))
    assert output[:6].abs().amin() > 0
    assert output[6:].abs().amax() == 0


def test_a_nan_query_does_not_affect_other_tokens(ops: CpuOps) -> None:
    query, kv_cache, metadata, _, _, _ = draw_attention(3, ops.dtype)
    calm = ops.paged_attention(query, kv_cache, 0, metadata, AttentionSpec(0.1, None))
    query[0] = torch.nan
    answer = ops.paged_attention(query, kv_cache, 0, metadata, AttentionSpec(0.1, None))
    assert answer[0].isnan().all()
    assert torch.equal(answer[1:], calm[1:])
