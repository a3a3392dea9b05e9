"""Measure a GPU's kernels beside their limits of the same run: python -m tokenloom.scripts.gpu.goals --json FILE

    decode attention   against a copy of the same bytes, and torch's SDPA over contiguous keys   ≤ 1.11 × copy, SDPA
                       against the best length of chunks for this batch                          ≤ 1.03 ×
    prefill attention  8k causal, against cuDNN's SDPA                                           ≥ 75 %
    adapters           the products of an 8B layer, 128 rows, rank 16, by distinct adapters,
                       against those of the base                                                ≥ 95, 90, 80, 50 %
    sampling           all filters on, 256 rows of 152k logits                                   time alone
    start              of the command, 135M shape, no kernel compiled before                     ≤ weights + 10 s

bfloat16, head_dim 128, 8 KV heads, 4 query heads each. Medians of triton's do_bench; decode attention is measured in a
CUDA graph, as the engine runs it. Half of a copy's bytes are read, half written. The file is written after each figure.
A case that fails, or that does not fit the device, gets a row with the reason. engines.py measures engines, and
gpu_check runs both.
"""

from __future__ import annotations

import dataclasses
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
import triton.testing
from torch.nn.attention import SDPBackend, sdpa_kernel

from tokenloom.kernels.contract import GATED_SILU, NO_ACTIVATION, AttentionSpec, LowRankPart, LowRankUpdate
from tokenloom.kernels.gpu.attention.decode import decode_attention, plan_decode
from tokenloom.kernels.gpu.attention.prefill import plan_prefill, prefill_attention
from tokenloom.kernels.gpu.ops import TritonOps
from tokenloom.kernels.gpu.sampling.sampling import sample
from tokenloom.kernels.gpu.table import AttentionKind, DecodeShape, decode_shape, prefill_shape
from tokenloom.scripts.bench.engine_process import Engine
from tokenloom.scripts.bench.workload import find_checkpoint
from tokenloom.scripts.gpu.cases import MAX_ERROR, Cases, Row, new_parser
from tokenloom.scripts.gpu.goal import Goal, with_goals
from tokenloom.scripts.gpu.tune_kernels import (
    BLOCK_SIZE,
    NUM_KV_HEADS,
    copy_milliseconds,
    device_architecture,
    metadata_of,
    replay_milliseconds,
)

GOALS = (
    Goal("decode attention", "times_copy", most=1.11),
    Goal("decode attention", "times_sdpa", most=1.0),
    Goal("decode attention", "times_best_chunks", most=1.03),
    Goal("prefill attention", "share_of_cudnn", least=0.75),
    Goal("adapters, 1 ", "share_of_base", least=0.95),
    Goal("adapters, 8 ", "share_of_base", least=0.9),
    Goal("adapters, 32 ", "share_of_base", least=0.8),
    Goal("adapters, 128 ", "share_of_base", least=0.5),
    Goal("start", "beside_weights_s", most=10.0),
)
HEAD_DIM, GROUP = 128, 4
KEY_BYTES = 2 * NUM_KV_HEADS * HEAD_DIM * 2  # bytes of a token's key and value
CHUNK_TILES = (1, 2, 4, 8, 16, 32)
START_S = 120.0


@dataclass(frozen=True)
class Sizes:
    """Sizes of all cases."""

    decode: tuple[tuple[int, int], ...]  # rows, keys of each
    skewed: tuple[int, ...]  # rows; their keys are those of skewed_lengths by turns
    skewed_lengths: tuple[int, ...]
    prompt: int
    hidden: int  # of an 8B layer
    inner: int
    adapter_rows: int
    num_adapters: tuple[int, ...]
    sampling: tuple[int, int]  # rows, logits of each
    start_model: str
    start_flags: tuple[str, ...]


ROWS_AND_KEYS = tuple((num_rows, num_keys) for num_rows in (1, 32, 256) for num_keys in (1024, 8192, 32768))
FULL = Sizes(
    decode=tuple(case for case in ROWS_AND_KEYS if case != (1, 8192)),
    skewed=(8, 64, 256),
    skewed_lengths=(1024, 2048, 4096, 9000),
    prompt=8192,
    hidden=4096,
    inner=14336,
    adapter_rows=128,
    num_adapters=(1, 8, 32, 128),
    sampling=(256, 151_936),
    start_model="135m",
    start_flags=("--max-model-len", "1024", "--num-kv-blocks", "512"),
)
SMALL = Sizes(
    decode=((1, 40), (2, 70)),
    skewed=(3,),
    skewed_lengths=(16, 33, 90),
    prompt=48,
    hidden=64,
    inner=96,
    adapter_rows=8,
    num_adapters=(1, 8),
    sampling=(3, 1000),
    start_model="tiny-llama",
    start_flags=("--max-model-len", "64", "--max-num-batched-tokens", "64", "--max-num-seqs", "2"),
)


def milliseconds(run: Callable[[], object]) -> float:
    """Return the median time of `run` with a cold cache. Raises its errors, unlike tune_kernels.py's function."""
    return float(triton.testing.do_bench(run, warmup=10, rep=40, return_mode="median"))


def attention_kind() -> AttentionKind:
    return AttentionKind(device_architecture(), HEAD_DIM, GROUP, torch.bfloat16.itemsize)


def decode_row(lengths: list[int]) -> Row:
    needed, (free, _) = sum(lengths) * KEY_BYTES, torch.cuda.mem_get_info()
    if 2.2 * needed > free:  # beside the cache: a copy's two halves, or SDPA's keys and values
        return {"not_measured": f"takes {2.2 * needed / 2**30:.1f} GiB, {free / 2**30:.1f} are free"}
    metadata = metadata_of(lengths, [1] * len(lengths))
    num_blocks = int(metadata.block_tables.max()) + 1
    cache = torch.randn(num_blocks, 1, 2, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    query = torch.randn(len(lengths), GROUP * NUM_KV_HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    output, rule = torch.empty_like(query), decode_shape(attention_kind())

    def time_of(shape: DecodeShape) -> float:
        items = plan_decode(metadata.seq_lens, None, shape)
        where = (metadata.block_tables, metadata.seq_lens, items, output, AttentionSpec(HEAD_DIM**-0.5), shape)
        return replay_milliseconds(lambda: decode_attention(query, cache, 0, *where))

    ours = time_of(rule)
    copied = copy_milliseconds(needed, replay_milliseconds)
    row: Row = {"ms": ours, "copy_ms": copied, "times_copy": ours / copied}
    if len(set(lengths)) == 1:
        try:
            row["sdpa_ms"] = decode_sdpa_milliseconds(len(lengths), lengths[0])
            row["times_sdpa"] = ours / row["sdpa_ms"]
        except RuntimeError as error:  # this SDPA backend does not support every shape
            row["sdpa_error"] = str(error)[:MAX_ERROR]
    else:
        others = [dataclasses.replace(rule, min_tiles=tiles) for tiles in CHUNK_TILES if tiles != rule.min_tiles]
        row["times_best_chunks"] = ours / min(ours, *(time_of(shape) for shape in others))
    return row


def decode_sdpa_milliseconds(num_rows: int, length: int) -> float:
    query = torch.randn(num_rows, GROUP * NUM_KV_HEADS, 1, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    key, value = torch.randn(2, num_rows, NUM_KV_HEADS, length, HEAD_DIM, device="cuda", dtype=torch.bfloat16).unbind()
    return replay_milliseconds(lambda: F.scaled_dot_product_attention(query, key, value, enable_gqa=True))


def prefill_row(prompt: int) -> Row:
    metadata = metadata_of([prompt], [prompt])
    num_heads, num_blocks = GROUP * NUM_KV_HEADS, int(metadata.block_tables.max()) + 1
    cache = torch.randn(num_blocks, 1, 2, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    query = torch.randn(prompt, num_heads, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    output, shape = torch.empty_like(query), prefill_shape(attention_kind())
    tiles = plan_prefill(metadata, GROUP, shape)
    ours = milliseconds(
        lambda: prefill_attention(query, cache, 0, metadata, tiles, output, AttentionSpec(HEAD_DIM**-0.5), shape)
    )
    q, k, v = (torch.randn(1, num_heads, prompt, HEAD_DIM, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        theirs = milliseconds(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True))
    flops = 2 * num_heads * HEAD_DIM * prompt**2  # the causal half of two products
    row = {"ms": ours, "cudnn_ms": theirs, "share_of_cudnn": theirs / ours}
    return {**row, "TFLOP_per_s": flops / ours / 1e9}


def adapters_row(num_adapters: int, sizes: Sizes) -> Row:
    """Time the four products of a layer of Llama's 8B shape with and without adapters of rank 16 in all of them."""
    ops, num_rows, hidden, inner = TritonOps(device_architecture()), sizes.adapter_rows, sizes.hidden, sizes.inner
    space, slots = (
        ops.adapter_space(max(sizes.num_adapters), 16),
        torch.arange(num_rows, device="cuda", dtype=torch.int32) % num_adapters + 1,
    )
    layers = []
    for num_outputs, num_inputs, num_parts, activation in (
        (hidden * 3 // 2, hidden, 3, NO_ACTIVATION),
        (hidden, hidden, 1, NO_ACTIVATION),
        (2 * inner, hidden, 2, GATED_SILU),
        (hidden, inner, 1, NO_ACTIVATION),
    ):
        weight = torch.randn(num_outputs, num_inputs, device="cuda", dtype=torch.bfloat16) / num_inputs**0.5
        packed, size = ops.pack_linear(weight, None, activation), num_outputs // num_parts
        filled = space.attach(packed, num_parts)
        parts = [
            LowRankPart(part * size, torch.randn(16, num_inputs), torch.randn(size, 16)) for part in range(num_parts)
        ]
        for slot in range(1, num_adapters + 1):
            filled.fill(slot, LowRankUpdate(parts))
        layers.append((torch.randn(num_rows, num_inputs, device="cuda", dtype=torch.bfloat16), packed))
    space.wait_for_fills()

    def time_of(step_slots: torch.Tensor | None) -> float:
        space.begin_step(step_slots)
        return replay_milliseconds(lambda: [ops.linear(x, packed) for x, packed in layers])

    base, adapted = time_of(None), time_of(slots)
    return {"ms": adapted, "base_ms": base, "share_of_base": base / adapted}


def sampling_row(num_rows: int, vocab_size: int) -> Row:
    logits = torch.randn(num_rows, vocab_size, device="cuda") * 2
    rows = torch.arange(num_rows, device="cuda")
    ones = torch.ones(num_rows, device="cuda")
    seeds = torch.randint(0, 1 << 30, (num_rows, 2), device="cuda", dtype=torch.int32)
    columns = (0.8 * ones, 50 * ones.int(), 0.95 * ones.double(), 0.02 * ones.double(), seeds)
    ms = milliseconds(lambda: sample(logits, rows, columns, rows.int()))
    return {"ms": ms}


def start_row(model: str, more: tuple[str, ...]) -> Row:
    flags = ["--model", str(find_checkpoint(model, "bfloat16")), "--device", "cuda", *more]
    with tempfile.TemporaryDirectory() as folder:
        begun = time.perf_counter()
        environment = {"TRITON_CACHE_DIR": f"{folder}/kernels"}
        with Engine(Path(folder), flags, environment, has_faults=False) as engine:
            engine.wait_ready(START_S)
            ready_s = time.perf_counter() - begun
            engine.stop()
    phases = [line for line in engine.lines if not line.startswith("Ready")]
    weights_s = sum(float(seconds) for seconds in re.findall(r"load weights in ([\d.]+) s", "\n".join(phases)))
    return {"ready_s": ready_s, "weights_s": weights_s, "beside_weights_s": ready_s - weights_s, "phases": phases}


def rows(sizes: Sizes) -> Iterator[tuple[str, Callable[[], Row]]]:
    """Yield each case's name and its measurement."""
    for num_rows, length in sizes.decode:
        yield f"decode attention {num_rows} x {length}", partial(decode_row, [length] * num_rows)
    for num_rows in sizes.skewed:
        lengths = [sizes.skewed_lengths[row % len(sizes.skewed_lengths)] for row in range(num_rows)]
        yield f"decode attention {num_rows} skewed", partial(decode_row, lengths)
    yield f"prefill attention of {sizes.prompt}", partial(prefill_row, sizes.prompt)
    for num_adapters in sizes.num_adapters:
        yield f"adapters, {num_adapters} distinct", partial(adapters_row, num_adapters, sizes)
    num_rows, vocab_size = sizes.sampling
    yield f"sampling with all filters, {num_rows} x {vocab_size}", partial(sampling_row, num_rows, vocab_size)
    yield (
        f"start, {sizes.start_model}, no kernel compiled before",
        partial(start_row, sizes.start_model, sizes.start_flags),
    )


def held_to_goals(case: str, measure: Callable[[], Row]) -> Row:
    return with_goals({"case": case, **measure()}, GOALS)


def main() -> int:
    parser = new_parser(__doc__)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("gpu.goals: no GPU is visible", file=sys.stderr)
        return 2
    measures = dict(rows(SMALL if options.small else FULL))
    cases = Cases.of_options(options, list(measures), torch.cuda.synchronize)
    with torch.inference_mode():
        for case, measure in measures.items():
            cases.measure(case, partial(held_to_goals, case, measure))
            torch.cuda.empty_cache()
    return int(cases.has_failed)


if __name__ == "__main__":
    sys.exit(main())
