"""Attention in Triton against the reference, over random steps, in the interpreter.

Tolerances: float32 1e-5 (sums in another order), float16 4e-3 (weights are rounded to it before the second product,
outputs are of size 1). bfloat16 is not tried: its tl.dot is wrong in the interpreter of triton 3.9.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from tokenloom.kernels.byte_cache import is_bytes
from tokenloom.kernels.contract import Rotary
from tokenloom.kernels.gpu.attention.decode import MAX_SPLITS, PLAN_ROWS, decode_attention, plan_decode
from tokenloom.kernels.gpu.batch_invariant import BatchInvariantTritonOps
from tokenloom.kernels.gpu.ops import TritonOps
from tokenloom.kernels.gpu.table import DecodeShape
from tokenloom.kernels.reference import ReferenceOps
from tokenloom.tests.kernels.gpu.shapes import PagedStep, as_bytes, far_away, from_bytes, paged_step
from tokenloom.tests.kernels.spans import with_spans
from tokenloom.tests.kernels.unseen import with_unseen_nan
from tokenloom.tests.support.today import some, some_pairs

TOLERANCES = {torch.float32: 1e-5, torch.float16: 4e-3}
SHAPES = [  # head_dim and query heads per KV head
    (head_dim, group)
    for head_dim in (64, 80, 96, 128, 256, 512)
    for group in (1, 2, 3, 4, 7, 8, 16, 48, 71)
    if TritonOps(90).supports(head_dim, group)
]
BLOCK_SIZES = [16, 32, 64, 128]
WINDOWS = [None, None, 1, 5, 64, 100]
MAX_LENGTH = 700
LENGTHS = [1, 2, 15, 16, 17, 63, 64, 65, 127, 129, 257, 300]


def expected(step: PagedStep) -> torch.Tensor:
    query, kv_cache = step.query.float(), step.kv_cache
    kv_cache = from_bytes(kv_cache) if is_bytes(kv_cache) else kv_cache.float()
    return ReferenceOps().paged_attention(query, kv_cache, 1, step.metadata, step.spec)


def random_step(seed: int) -> PagedStep:
    rng = random.Random(seed)
    decode_lengths = [rng.choice([*LENGTHS, rng.randrange(1, MAX_LENGTH)]) for _ in range(rng.randrange(0, 4))]
    prefill_rows = [
        (rng.choice([0, 0, 1, 63, 64, rng.randrange(200)]), rng.choice([2, 3, 33, 64, 65]))
        for _ in range(rng.randrange(0 if decode_lengths else 1, 3))
    ]
    (head_dim, group), num_kv_heads = rng.choice(SHAPES), rng.choice([1, 2])
    generator = torch.Generator().manual_seed(seed)
    sinks = torch.randn(group * num_kv_heads, generator=generator) * 2
    bias = torch.randn(group * num_kv_heads, 2 * MAX_LENGTH - 1, generator=generator)
    step = paged_step(
        rng,
        decode_lengths,
        prefill_rows,
        dtype=rng.choice([torch.float32, torch.float16]),
        head_dim=head_dim,
        group=group,
        num_kv_heads=num_kv_heads,
        block_size=rng.choice(BLOCK_SIZES),
        window=rng.choice(WINDOWS),
        bytes_of=(torch.int8, torch.uint8, None)[seed % 3],
        softcap=1.5 * (seed % 4 == 1),
        sinks=sinks if seed % 4 >= 2 else None,
        bias=bias if seed % 3 == 2 else None,
    )
    return replace(step, metadata=with_spans(step.metadata, seed)[0]) if seed % 5 < 2 else step


def check_step(step: PagedStep, architecture: int = 90, kind: type[TritonOps] = TritonOps) -> None:
    result = kind(architecture).paged_attention(step.query, step.kv_cache, 1, step.metadata, step.spec)
    tolerance = TOLERANCES[step.query.dtype]
    torch.testing.assert_close(result.float(), expected(step), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("seed", [*some(range(12), 4), *some(range(100, 320), 1)])
def test_attention_is_the_references_over_random_steps(seed: int) -> None:
    """Some have spans of tokens that see each other, as of images."""
    check_step(random_step(seed), kind=(TritonOps, BatchInvariantTritonOps)[seed % 2])


@pytest.mark.parametrize("seed", some(range(40), 2))
def test_nan_behind_the_windows_and_past_the_rows_ends_changes_no_bit(seed: int) -> None:
    step, ops = random_step(seed), (TritonOps, BatchInvariantTritonOps)[seed % 2](90)
    window = step.spec.window or 10
    results = []
    for kv_cache, metadata in (
        (step.kv_cache, step.metadata),
        with_unseen_nan(step.kv_cache, step.metadata, window),
    ):
        results.append(ops.paged_attention(step.query, kv_cache, 1, metadata, replace(step.spec, window=window)))
    assert torch.equal(*results) and results[0].isfinite().all()


LARGE = [(*shape, architecture) for shape in [(512, 8), (512, 16), (64, 71), (128, 48)] for architecture in (80, 90)]


@pytest.mark.parametrize(("head_dim", "group", "architecture"), some(LARGE, 2))
def test_large_heads_and_many_query_heads_per_kv_head(head_dim: int, group: int, architecture: int) -> None:
    dtype = torch.float32 if group in (8, 71) else torch.float16
    check_step(paged_step(random.Random(8), [150], [(30, 3)], dtype, head_dim, group, 1, 16, None), architecture)


def test_shapes_whose_query_heads_exceed_a_programs_registers_run_in_torch() -> None:
    shapes = [(512, 17), (256, 33), (128, 65), (64, 129), (16, 129), (513, 1), (8, 1)]
    assert not any(TritonOps(90).supports(*shape) for shape in shapes)
    assert all(TritonOps(90).supports(*shape) for shape in [(512, 16), (256, 32), (128, 64), (64, 128), (16, 128)])


def decode_alone(step: PagedStep, rows: list[int], shape: DecodeShape) -> torch.Tensor:
    index = torch.tensor(rows)
    lengths, tables = step.metadata.seq_lens[index], step.metadata.block_tables[index]
    query = step.query[index]
    output = torch.full(query.shape, torch.nan, dtype=query.dtype)
    items = plan_decode(lengths, step.spec.window, shape)
    decode_attention(query, step.kv_cache, 1, tables, lengths, items, output, step.spec, shape)
    return output


@pytest.mark.parametrize("window", some([None, 70], 1))
def test_a_rows_result_does_not_depend_on_its_neighbours(window: int | None) -> None:
    lengths = [200, 1, 64, 315, 129]
    step = paged_step(random.Random(1), lengths, [], torch.float16, 64, 4, 1, 16, window)
    shape = DecodeShape(tile=16, min_tiles=2, num_warps=4, num_stages=2)
    together = decode_alone(step, [0, 1, 2, 3, 4], shape)
    for row in range(len(lengths)):
        assert torch.equal(decode_alone(step, [row], shape)[0], together[row])
    assert torch.equal(decode_alone(step, [4, 0, 3], shape), together[[4, 0, 3]])


@pytest.mark.parametrize(("softcap", "window"), [(0.0, None), (2.0, 70)])
def test_a_row_has_one_sink_in_any_number_of_splits(softcap: float, window: int | None) -> None:
    sinks = torch.tensor([3.0, -40.0, 0.5, 8.0])
    lengths = [200, 1, 64, 315]
    step = paged_step(random.Random(6), lengths, [], torch.float32, 64, 4, 1, 16, window, softcap=softcap, sinks=sinks)
    shape = DecodeShape(tile=16, min_tiles=2, num_warps=4, num_stages=2)
    torch.testing.assert_close(decode_alone(step, [0, 1, 2, 3], shape), expected(step), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("rows", "dtype"), some_pairs([([900], []), ([], [(895, 5)])], [torch.int8, torch.uint8], 2), ids=str
)
def test_many_keys_of_small_weight_count_in_half_precision(
    rows: tuple[list[int], list[tuple[int, int]]], dtype: torch.dtype
) -> None:
    """One key has e^8 times the weight of each other; small scales make the others' products smaller still."""
    step = paged_step(random.Random(3), *rows, torch.float16, 64, 2, 1, 16, None)
    generator = torch.Generator().manual_seed(3)
    keys, values = step.kv_cache[:, :, 0], step.kv_cache[:, :, 1]
    keys.copy_(torch.randn(keys.shape, generator=generator) * 0.01)
    values.copy_(torch.rand(values.shape, generator=generator) * 0.02 + 0.01)
    keys[step.metadata.block_tables[0, 0], :, :, 0] = 1.0
    values[step.metadata.block_tables[0, 0], :, :, 0] = 0.0
    step = replace(step, query=torch.ones_like(step.query), kv_cache=as_bytes(step.kv_cache, dtype))
    result = TritonOps(90).paged_attention(step.query, step.kv_cache, 1, step.metadata, step.spec)
    torch.testing.assert_close(result.float(), expected(step), atol=0, rtol=4e-3)


def test_a_row_without_tokens_gives_zeros_and_does_not_affect_others() -> None:
    step = paged_step(random.Random(2), [100, 40], [], torch.float32, 64, 2, 2, 16, None)
    shape = DecodeShape(tile=32, min_tiles=1, num_warps=4, num_stages=2)
    calm = decode_alone(step, [0, 1], shape)
    step.metadata.seq_lens[0] = 0
    padded = decode_alone(step, [0, 1], shape)
    assert torch.equal(padded[0], torch.zeros_like(padded[0]))
    assert torch.equal(padded[1], calm[1])


@pytest.mark.parametrize("times", [1, PLAN_ROWS // 8 + 1])
def test_the_plan_lists_every_split_of_every_row_once(times: int) -> None:
    lengths = torch.tensor([1, 0, 32, 33, 100_000, 0, 64, 65] * times, dtype=torch.int32)
    shape = DecodeShape(tile=32, min_tiles=2, num_warps=4, num_stages=2)
    items = plan_decode(lengths, None, shape).tolist()
    chunks = [1, 0, 1, 1, MAX_SPLITS, 0, 1, 2] * times
    wanted = [row * MAX_SPLITS + chunk for row, count in enumerate(chunks) for chunk in range(count)]
    assert items[0] == len(wanted)
    assert items[1 : 1 + len(wanted)] == wanted


def test_stale_values_past_a_rows_end_are_masked() -> None:
    step = paged_step(random.Random(4), [18], [(0, 19)], torch.float32, 64, 2, 1, 32, None)
    check_step(step)
    before = TritonOps(90).paged_attention(step.query, step.kv_cache, 1, step.metadata, step.spec)
    step.kv_cache[step.metadata.block_tables[0, 0], :, :, :, 18:] = 1e30
    step.kv_cache[step.metadata.block_tables[1, 0], :, :, :, 19:] = 1e30
    after = TritonOps(90).paged_attention(step.query, step.kv_cache, 1, step.metadata, step.spec)
    assert torch.equal(before, after)


@pytest.mark.parametrize(
    ("bytes_of", "block_size"),  # some blocks in a tile of keys, one tile in a block
    some([(None, 16), (torch.int8, 128), (None, 128), (torch.uint8, 16)], 2),
)
def test_a_cache_may_have_more_elements_than_32_bits_count(bytes_of: torch.dtype | None, block_size: int) -> None:
    near = paged_step(random.Random(5), [40], [(20, 21)], torch.float16, 64, 2, 2, block_size, None, bytes_of)
    far = far_away(near)
    rows, ops = len(near.kv_cache), TritonOps(90)
    cos_sin = torch.rand(64, 64)
    heads = torch.randn(near.metadata.query_starts_host[-1], 4 + 2 * 2, 64).half()
    results = []
    for step in (near, far):
        query = ops.qk_norm_rope_cache(heads.clone(), None, Rotary(cos_sin), step.kv_cache, 1, step.metadata)
        results.append((query, ops.paged_attention(query, step.kv_cache, 1, step.metadata, step.spec)))
    (query, attended), (far_query, far_attended) = results
    assert torch.equal(far_query, query)
    assert torch.equal(far.kv_cache[-rows:], near.kv_cache)
    assert torch.equal(far_attended, attended)
