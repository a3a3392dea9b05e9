"""Time the shapes of attention programs on this GPU and write the fastest into kernels/gpu/gpu_table.json.

    python -m tokenloom.scripts.gpu.tune_kernels [--head-dims 128] [--groups 1 2 4 8] [--dry-run]

Decode: 64 rows of skewed lengths around 4k. Prefill: one prompt of 8k. Each time stands beside its limit, measured in
the same run: a copy of the same bytes, or torch's scaled_dot_product_attention. The fastest shapes are then measured
once more in turn with the shape in use, so that a gain is not the luck of one of many times. Needs a GPU.
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
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median
from typing import Any, Generic, TypeVar

import torch
import torch.nn.functional as F
import triton.testing
from torch import Tensor
from triton.runtime.errors import TritonError

from tokenloom.kernels.contract import AttentionMetadata, AttentionSpec
from tokenloom.kernels.gpu.attention.decode import decode_attention, plan_decode
from tokenloom.kernels.gpu.attention.prefill import plan_prefill, prefill_attention
from tokenloom.kernels.gpu.compile import compiling
from tokenloom.kernels.gpu.table import (
    TABLE_PATH,
    AttentionKind,
    DecodeShape,
    PrefillShape,
    decode_shape,
    prefill_shape,
    read_table,
)

Shape = TypeVar("Shape", DecodeShape, PrefillShape)

NUM_KV_HEADS = 8
BLOCK_SIZE = 16
FINALISTS = 3
DECODE_LENGTHS = [1024, 2048, 4096, 9000] * 16
PROMPT = 8192
NUM_ROUNDS = 5  # of the last measurement


@dataclass(frozen=True)
class Best(Generic[Shape]):
    """The fastest shape beside the one that is in use."""

    shape: Shape
    milliseconds: float
    used_milliseconds: float

    @property
    def gain(self) -> float:
        return self.used_milliseconds / self.milliseconds


def device_architecture() -> int:
    """Return the number in the device's sm_… name."""
    major, minor = torch.cuda.get_device_capability()
    return 10 * major + minor


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
    except (TritonError, RuntimeError) as error:  # one that does not compile, or does not fit
        print(f"    skipped: {str(error)[:100]!r}", file=sys.stderr)
        return float("inf")


def replay_milliseconds(run: Callable[[], object]) -> float:
    """Return the median time of `run` in ms as a CUDA graph, which excludes Python's launch cost."""
    return float(triton.testing.do_bench_cudagraph(run, rep=40, return_mode="median"))


def fastest(run_by_shape: dict[Shape, Callable[[], object]], used: Shape) -> Best[Shape]:
    """Compile all shapes in parallel, time them, time the fastest once more beside the one in use; return the best."""
    with suppress(Exception), ThreadPoolExecutor(os.cpu_count()) as threads, compiling(threads):
        for run in run_by_shape.values():  # a shape that fails to compile is skipped when it is timed
            run()
    times: dict[Shape, float] = {shape: milliseconds(run) for shape, run in run_by_shape.items()}
    finalists = list(dict.fromkeys([used, *sorted(times, key=times.__getitem__)[:FINALISTS]]))
    rounds = [{shape: milliseconds(run_by_shape[shape]) for shape in finalists} for _ in range(NUM_ROUNDS)]
    medians = {shape: median(each[shape] for each in rounds) for shape in finalists}
    best = min(finalists, key=medians.__getitem__)
    if medians[best] == float("inf"):
        raise RuntimeError(f"none of {len(run_by_shape)} shapes runs on this GPU, the one in use is {used}")
    return Best(best, medians[best], medians[used])


def tune_decode(query: Tensor, cache: Tensor, metadata: AttentionMetadata, used: DecodeShape) -> Best[DecodeShape]:
    output, spec = torch.empty_like(query), AttentionSpec(query.shape[2] ** -0.5)

    def run_of(shape: DecodeShape) -> Callable[[], object]:
        items = plan_decode(metadata.seq_lens, None, shape)
        lengths, tables = metadata.seq_lens, metadata.block_tables
        return partial(decode_attention, query, cache, 0, tables, lengths, items, output, spec, shape)

    return fastest({shape: run_of(shape) for shape in (used, *decode_candidates())}, used)


def tune_prefill(query: Tensor, cache: Tensor, metadata: AttentionMetadata, used: PrefillShape) -> Best[PrefillShape]:
    output, group = torch.empty_like(query), query.shape[1] // NUM_KV_HEADS
    spec = AttentionSpec(query.shape[2] ** -0.5)

    def run_of(shape: PrefillShape) -> Callable[[], object]:
        tiles = plan_prefill(metadata, group, shape)
        return partial(prefill_attention, query, cache, 0, metadata, tiles, output, spec, shape)

    return fastest({shape: run_of(shape) for shape in (used, *prefill_candidates(group))}, used)


def copy_milliseconds(num_bytes: int, measure: Callable[[Callable[[], object]], float] = milliseconds) -> float:
    """Time a copy that reads half of `num_bytes` and writes the other half."""
    source = torch.empty(num_bytes // 2, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return measure(lambda: target.copy_(source))


def sdpa_milliseconds(prompt: int, num_heads: int, head_dim: int, dtype: torch.dtype) -> float:
    query = torch.randn(1, num_heads, prompt, head_dim, device="cuda", dtype=dtype)
    key, value = (torch.randn(1, NUM_KV_HEADS, prompt, head_dim, device="cuda", dtype=dtype) for _ in range(2))
    return milliseconds(
        lambda: F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=num_heads > NUM_KV_HEADS)
    )


def tune(kind: AttentionKind, dtype: torch.dtype) -> dict[str, Any]:
    """Return the entry of one kind in the table, with its times beside those in use and their limits."""
    torch.manual_seed(0)
    head_dim, group = kind.head_dim, kind.group
    lengths = DECODE_LENGTHS
    decode, prefill = metadata_of(lengths, [1] * len(lengths)), metadata_of([PROMPT], [PROMPT])
    num_blocks = int(max(decode.block_tables.max(), prefill.block_tables.max())) + 1
    cache = torch.randn(num_blocks, 1, 2, NUM_KV_HEADS, BLOCK_SIZE, head_dim, device="cuda", dtype=dtype)
    queries = [
        torch.randn(count, group * NUM_KV_HEADS, head_dim, device="cuda", dtype=dtype)
        for count in (len(lengths), PROMPT)
    ]
    decode_best = tune_decode(queries[0], cache, decode, decode_shape(kind))
    prefill_best = tune_prefill(queries[1], cache, prefill, prefill_shape(kind))
    row: dict[str, Any] = {"entry": {"decode": asdict(decode_best.shape), "prefill": asdict(prefill_best.shape)}}
    for name, best in (("decode", decode_best), ("prefill", prefill_best)):
        row |= {f"{name}_ms": best.milliseconds, f"{name}_used_ms": best.used_milliseconds, f"{name}_gain": best.gain}
    row["copy_ms"] = copy_milliseconds(sum(lengths) * 2 * NUM_KV_HEADS * head_dim * dtype.itemsize)
    row["sdpa_ms"] = sdpa_milliseconds(PROMPT, group * NUM_KV_HEADS, head_dim, dtype)
    return row


def write_entry(key: str, entry: dict[str, dict[str, int]]) -> None:
    """Write an entry into the table's file; keep the others."""
    merged = read_table() | {key: entry}
    TABLE_PATH.write_text(json.dumps(merged, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    read_table.cache_clear()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--head-dims", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--groups", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--dry-run", action="store_true", help="print, write nothing into the table")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("tune_kernels: no GPU is visible: run it on the machine that the table is for", file=sys.stderr)
        return 2
    for head_dim, group in itertools.product(options.head_dims, options.groups):
        kind = AttentionKind(device_architecture(), head_dim, group, torch.bfloat16.itemsize)
        found = tune(kind, torch.bfloat16)
        print(f"{kind.key}: {json.dumps(found)}", flush=True)
        if not options.dry_run:
            write_entry(kind.key, found["entry"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
