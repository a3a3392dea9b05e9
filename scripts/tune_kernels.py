"""Time the shapes of attention programs on this GPU and write the fastest into kernels/gpu/gpu_table.json.

    scripts/tune_kernels.py [--head-dims 128] [--groups 1 2 4 8] [--dry-run]

Decode: 64 rows of skewed lengths around 4k. Prefill: one prompt of 8k. Each time is printed beside its limit, measured
in the same run: a copy of the same bytes, or torch's scaled_dot_product_attention. Needs a GPU; nothing in CI runs it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from typing import TypeVar

import torch
import torch.nn.functional as F
import triton.testing
from torch import Tensor

from tokenloom.kernels.contract import AttentionMetadata, AttentionSpec
from tokenloom.kernels.gpu.attention.decode import decode_attention, plan_decode
from tokenloom.kernels.gpu.attention.prefill import plan_prefill, prefill_attention
from tokenloom.kernels.gpu.compile import compiling
from tokenloom.kernels.gpu.table import (
    TABLE_PATH,
    DecodeShape,
    PrefillShape,
    decode_shape,
    prefill_shape,
    read_table,
    table_key,
)

Shape = TypeVar("Shape", DecodeShape, PrefillShape)

NUM_KV_HEADS = 8
BLOCK_SIZE = 16
PROMPT = 8192
DECODE_LENGTHS = [1024, 2048, 4096, 9000] * 16


def decode_candidates() -> Iterator[DecodeShape]:
    for tile, chunk, num_warps, num_stages in itertools.product((32, 64, 128), (256, 512), (4, 8), (3, 5, 7)):
        yield DecodeShape(tile, chunk // tile, num_warps, num_stages)


def prefill_candidates(group: int) -> Iterator[PrefillShape]:
    for block_m, tile, num_warps, num_stages in itertools.product((64, 128), (32, 64, 128), (4, 8), (3, 5)):
        if block_m >= group:
            yield PrefillShape(block_m, tile, num_warps, num_stages)


def metadata_of(lengths: list[int], counts: list[int]) -> AttentionMetadata:
    """Return the metadata of rows with blocks scattered over a pool; slots are not needed here."""
    starts = [0, *itertools.accumulate(counts)]
    num_blocks = [-(-length // BLOCK_SIZE) for length in lengths]
    ids = torch.randperm(sum(num_blocks)).int() + 1
    tables = torch.zeros(len(lengths), max(num_blocks), dtype=torch.int32)
    for row, part in enumerate(ids.split(num_blocks)):
        tables[row, : len(part)] = part
    positions = [torch.arange(length - count, length) for length, count in zip(lengths, counts, strict=True)]
    return AttentionMetadata(
        positions=torch.cat(positions).cuda(),
        slots=torch.full((starts[-1],), -1).cuda(),
        query_starts=torch.tensor(starts, dtype=torch.int32).cuda(),
        seq_lens=torch.tensor(lengths, dtype=torch.int32).cuda(),
        block_tables=tables.cuda(),
        num_decode_rows=len(lengths) if max(counts) == 1 else 0,
        query_starts_host=starts,
        seq_lens_host=lengths,
    )


def milliseconds(run: Callable[[], object]) -> float:
    """Return the median time of `run`; infinite if it fails, as for a shape that does not fit the chip."""
    try:
        return float(triton.testing.do_bench(run, warmup=10, rep=40, return_mode="median"))
    except (triton.OutOfResources, RuntimeError) as error:
        print(f"    skipped: {str(error).splitlines()[0][:100]}", file=sys.stderr)
        return float("inf")


def replay_milliseconds(run: Callable[[], object]) -> float:
    """Return the median time of `run` in ms as a CUDA graph, which excludes Python's launch cost."""
    return float(triton.testing.do_bench_cudagraph(run, rep=40, return_mode="median"))


def fastest(run_by_shape: dict[Shape, Callable[[], object]]) -> tuple[Shape, float]:
    """Compile all shapes in parallel, time them, and return the fastest and its milliseconds."""
    with suppress(Exception), ThreadPoolExecutor(os.cpu_count()) as threads, compiling(threads):
        for run in run_by_shape.values():  # a shape that fails to compile is skipped when it is timed
            run()
    times = {shape: milliseconds(run) for shape, run in run_by_shape.items()}
    best = min(times, key=times.__getitem__)
    return best, times[best]


def tune_decode(query: Tensor, cache: Tensor, metadata: AttentionMetadata) -> tuple[DecodeShape, float]:
    output, spec = torch.empty_like(query), AttentionSpec(query.shape[2] ** -0.5)

    def run_of(shape: DecodeShape) -> Callable[[], object]:
        items = plan_decode(metadata.seq_lens, None, shape)
        lengths, tables = metadata.seq_lens, metadata.block_tables
        return partial(decode_attention, query, cache, 0, tables, lengths, items, output, spec, shape)

    return fastest({shape: run_of(shape) for shape in decode_candidates()})


def tune_prefill(query: Tensor, cache: Tensor, metadata: AttentionMetadata) -> tuple[PrefillShape, float]:
    output, group = torch.empty_like(query), query.shape[1] // NUM_KV_HEADS
    spec = AttentionSpec(query.shape[2] ** -0.5)

    def run_of(shape: PrefillShape) -> Callable[[], object]:
        tiles = plan_prefill(metadata, group, shape)
        return partial(prefill_attention, query, cache, 0, metadata, tiles, output, spec, shape)

    return fastest({shape: run_of(shape) for shape in prefill_candidates(group)})


def copy_milliseconds(num_bytes: int, measure: Callable[[Callable[[], object]], float] = milliseconds) -> float:
    """Time a copy that reads half of `num_bytes` and writes the other half."""
    source = torch.empty(num_bytes // 2, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return measure(lambda: target.copy_(source))


def sdpa_milliseconds(num_heads: int, head_dim: int, dtype: torch.dtype) -> float:
    query = torch.randn(1, num_heads, PROMPT, head_dim, device="cuda", dtype=dtype)
    key, value = (torch.randn(1, NUM_KV_HEADS, PROMPT, head_dim, device="cuda", dtype=dtype) for _ in range(2))
    return milliseconds(
        lambda: F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=num_heads > NUM_KV_HEADS)
    )


def tune(architecture: int, head_dim: int, group: int, dtype: torch.dtype) -> tuple[DecodeShape, PrefillShape]:
    torch.manual_seed(0)
    decode, prefill = metadata_of(DECODE_LENGTHS, [1] * len(DECODE_LENGTHS)), metadata_of([PROMPT], [PROMPT])
    num_blocks = int(max(decode.block_tables.max(), prefill.block_tables.max())) + 1
    cache = torch.randn(num_blocks, 1, 2, NUM_KV_HEADS, BLOCK_SIZE, head_dim, device="cuda", dtype=dtype)
    queries = [
        torch.randn(count, group * NUM_KV_HEADS, head_dim, device="cuda", dtype=dtype)
        for count in (len(DECODE_LENGTHS), PROMPT)
    ]
    decode_best, decode_ms = tune_decode(queries[0], cache, decode)
    prefill_best, prefill_ms = tune_prefill(queries[1], cache, prefill)
    copy_ms = copy_milliseconds(sum(DECODE_LENGTHS) * 2 * NUM_KV_HEADS * head_dim * dtype.itemsize)
    sdpa_ms = sdpa_milliseconds(group * NUM_KV_HEADS, head_dim, dtype)
    print(f"{table_key(architecture, head_dim, group, dtype.itemsize)}")
    print(f"  decode  {decode_ms:8.3f} ms, a copy of the bytes {copy_ms:8.3f} ms  {decode_best}")
    print(f"  prefill {prefill_ms:8.3f} ms, torch SDPA         {sdpa_ms:8.3f} ms  {prefill_best}", flush=True)
    key = (architecture, head_dim, group, dtype.itemsize)
    return (
        decode_best if decode_ms < float("inf") else decode_shape(*key),
        prefill_best if prefill_ms < float("inf") else prefill_shape(*key),
    )


def write_entry(key: str, shapes: tuple[DecodeShape, PrefillShape]) -> None:
    """Write one entry of the table's file; keep the others."""
    merged = read_table() | {key: {"decode": asdict(shapes[0]), "prefill": asdict(shapes[1])}}
    TABLE_PATH.write_text(json.dumps(merged, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    read_table.cache_clear()


def main() -> int:
    parser = argparse.ArgumentParser(description="Write the fastest shapes of attention programs on this GPU.")
    parser.add_argument("--head-dims", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--groups", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--dry-run", action="store_true", help="print, write nothing")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("tune_kernels: no GPU is visible: run it on the machine that the table is for", file=sys.stderr)
        return 2
    major, minor = torch.cuda.get_device_capability()
    architecture = 10 * major + minor
    for head_dim, group in itertools.product(options.head_dims, options.groups):
        shapes = tune(architecture, head_dim, group, torch.bfloat16)
        if not options.dry_run:
            write_entry(table_key(architecture, head_dim, group, 2), shapes)
    return 0


if __name__ == "__main__":
    sys.exit(main())
