"""Measure a GPU's kernels beside their limits of the same run: python -m tokenloom.scripts.gpu_goals --json FILE

    decode attention   against a copy of the same bytes, and torch's SDPA over contiguous keys   ≤ 1.11 × copy, SDPA
                       against the best length of chunks for this batch                          ≤ 1.03 ×
    prefill attention  8k causal, against cuDNN's SDPA                                           ≥ 75 %
    adapters           the products of an 8B layer, 128 rows, rank 16, by distinct adapters,
                       against those of the base                                                ≥ 95, 90, 80, 50 %
    sampling           all filters on, 256 rows of 152k logits                                   time alone
    start              of the command, 135M shape, no kernel compiled before                     ≤ weights + 10 s

bfloat16, head_dim 128, 8 KV heads, 4 query heads each. Medians of triton's do_bench; decode attention is measured in a
CUDA graph, as the engine runs it. Half of a copy's bytes are read, half written. The file is written after each figure.
A case that fails, or that does not fit the device, gets a row with the reason. gpu_bench.py measures engines.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import triton.testing
from torch.nn.attention import SDPBackend, sdpa_kernel

from tokenloom.kernels.contract import GATED_SILU, NO_ACTIVATION, AttentionSpec, LowRankPart, LowRankUpdate
from tokenloom.kernels.gpu.attention.decode import decode_attention, plan_decode
from tokenloom.kernels.gpu.attention.prefill import plan_prefill, prefill_attention
from tokenloom.kernels.gpu.ops import TritonOps
from tokenloom.kernels.gpu.sampling.sampling import sample
from tokenloom.kernels.gpu.table import DecodeShape, decode_shape, prefill_shape
from tokenloom.scripts.bench_workload import find_checkpoint
from tokenloom.scripts.engine_process import Engine
from tokenloom.scripts.tune_kernels import (
    BLOCK_SIZE,
    NUM_KV_HEADS,
    PROMPT,
    copy_milliseconds,
    metadata_of,
    replay_milliseconds,
)

HEAD_DIM, GROUP = 128, 4
KEY_BYTES = 2 * NUM_KV_HEADS * HEAD_DIM * 2  # bytes of a token's key and value
CASES = [(1, 1024), (1, 32768), (32, 1024), (32, 8192), (32, 32768), (256, 1024), (256, 8192), (256, 32768)]
SKEWED = [1024, 2048, 4096, 9000] * 16
CHUNK_TILES = (1, 2, 4, 8, 16, 32)
MAX_ERROR = 4000  # characters
NOT_MEASURED = ["speed of two GPUs over NCCL against one"]


def milliseconds(run: Callable[[], object]) -> float:
    """Return the median time of `run` with a cold cache. Raises its errors, unlike tune_kernels.py's function."""
    return float(triton.testing.do_bench(run, warmup=10, rep=40, return_mode="median"))


def architecture() -> int:
    major, minor = torch.cuda.get_device_capability()
    return 10 * major + minor


def decode_row(lengths: list[int]) -> dict[str, Any]:
    needed, (free, _) = sum(lengths) * KEY_BYTES, torch.cuda.mem_get_info()
    if 2.2 * needed > free:  # beside the cache: a copy's two halves, or SDPA's keys and values
        return {"not_measured": f"takes {2.2 * needed / 2**30:.1f} GiB, {free / 2**30:.1f} are free"}
    metadata = metadata_of(lengths, [1] * len(lengths))
    num_blocks = int(metadata.block_tables.max()) + 1
    cache = torch.randn(num_blocks, 1, 2, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    query = torch.randn(len(lengths), GROUP * NUM_KV_HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    output, rule = torch.empty_like(query), decode_shape(architecture(), HEAD_DIM, GROUP, 2)

    def time_of(shape: DecodeShape) -> float:
        items = plan_decode(metadata.seq_lens, None, shape)
        where = (metadata.block_tables, metadata.seq_lens, items, output, AttentionSpec(HEAD_DIM**-0.5), shape)
        return replay_milliseconds(lambda: decode_attention(query, cache, 0, *where))

    ours = time_of(rule)
    copied = copy_milliseconds(needed, replay_milliseconds)
    row = {"ms": ours, "copy_ms": copied, "times_copy": ours / copied}
    goal, is_met = "at most 1.11 x copy", ours <= 1.11 * copied
    if len(set(lengths)) == 1:
        try:
            sdpa = row["sdpa_ms"] = decode_sdpa_milliseconds(len(lengths), lengths[0])
            goal, is_met = f"{goal} and SDPA", is_met and ours <= sdpa
        except RuntimeError as error:  # this SDPA backend does not support every shape
            return {**row, "goal": goal, "is_met": is_met, "sdpa_error": str(error)[:MAX_ERROR]}
    else:
        others = [dataclasses.replace(rule, min_tiles=tiles) for tiles in CHUNK_TILES if tiles != rule.min_tiles]
        row["times_best_chunks"] = ours / min(ours, *(time_of(shape) for shape in others))
        goal, is_met = f"{goal}, 1.03 x the best chunks", is_met and row["times_best_chunks"] <= 1.03
    return {**row, "goal": goal, "is_met": is_met}


def decode_sdpa_milliseconds(num_rows: int, length: int) -> float:
    query = torch.randn(num_rows, GROUP * NUM_KV_HEADS, 1, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    key, value = torch.randn(2, num_rows, NUM_KV_HEADS, length, HEAD_DIM, device="cuda", dtype=torch.bfloat16).unbind()
    return replay_milliseconds(lambda: F.scaled_dot_product_attention(query, key, value, enable_gqa=True))


def prefill_row() -> dict[str, Any]:
    metadata = metadata_of([PROMPT], [PROMPT])
    num_heads, num_blocks = GROUP * NUM_KV_HEADS, int(metadata.block_tables.max()) + 1
    cache = torch.randn(num_blocks, 1, 2, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    query = torch.randn(PROMPT, num_heads, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    output, shape = torch.empty_like(query), prefill_shape(architecture(), HEAD_DIM, GROUP, 2)
    tiles = plan_prefill(metadata, GROUP, shape)
    ours = milliseconds(
        lambda: prefill_attention(query, cache, 0, metadata, tiles, output, AttentionSpec(HEAD_DIM**-0.5), shape)
    )
    full = [torch.randn(1, num_heads, PROMPT, HEAD_DIM, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        theirs = milliseconds(lambda: F.scaled_dot_product_attention(*full, is_causal=True))
    flops = 2 * num_heads * HEAD_DIM * PROMPT**2  # the causal half of two products
    row = {"ms": ours, "cudnn_ms": theirs, "share_of_cudnn": theirs / ours}
    return {**row, "TFLOP_per_s": flops / ours / 1e9, "goal": "at least 0.75 of cuDNN", "is_met": theirs >= 0.75 * ours}


def adapters_row(num_adapters: int, goal: float, num_rows: int = 128) -> dict[str, Any]:
    """Time the four products of a layer of Llama's 8B shape with and without adapters of rank 16 in all of them."""
    ops, hidden, inner = TritonOps(architecture()), 4096, 14336
    space, slots = (
        ops.adapter_space(128, 16),
        torch.arange(num_rows, device="cuda", dtype=torch.int32) % num_adapters + 1,
    )
    layers = []
    for num_outputs, num_inputs, num_parts, activation in (
        (6144, hidden, 3, NO_ACTIVATION),
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
    row = {"ms": adapted, "base_ms": base, "share_of_base": base / adapted}
    return {**row, "goal": f"at least {goal} of the base", "is_met": base >= goal * adapted}


def sampling_row(num_rows: int = 256, vocab_size: int = 151_936) -> dict[str, Any]:
    logits = torch.randn(num_rows, vocab_size, device="cuda") * 2
    rows = torch.arange(num_rows, device="cuda")
    ones = torch.ones(num_rows, device="cuda")
    seeds = torch.randint(0, 1 << 30, (num_rows, 2), device="cuda", dtype=torch.int32)
    columns = (0.8 * ones, 50 * ones.int(), 0.95 * ones.double(), 0.02 * ones.double(), seeds)
    ms = milliseconds(lambda: sample(logits, rows, columns, rows.int()))
    return {"ms": ms}


def start_row() -> dict[str, Any]:
    flags = ["--model", str(find_checkpoint("135m", "bfloat16")), "--device", "cuda", "--max-model-len", "1024"]
    with tempfile.TemporaryDirectory() as folder:
        begun = time.perf_counter()
        environment = {"TRITON_CACHE_DIR": f"{folder}/kernels"}
        flags += ["--num-kv-blocks", "512"]
        with Engine(Path(folder), flags, environment, has_faults=False) as engine:
            engine.wait_ready()
            ready_s = time.perf_counter() - begun
            engine.stop()
    phases = [line for line in engine.lines if not line.startswith("Ready")]
    weights_s = sum(float(seconds) for seconds in re.findall(r"load weights in ([\d.]+) s", "\n".join(phases)))
    row = {"ready_s": ready_s, "weights_s": weights_s, "phases": phases}
    return {**row, "goal": "at most 10 s beside the weights", "is_met": ready_s - weights_s <= 10}


def rows() -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """Yield each case's name and its measurement."""
    for num_rows, length in CASES:
        yield f"decode attention {num_rows} x {length}", partial(decode_row, [length] * num_rows)
    for num_rows in (8, 64, 256):
        yield f"decode attention {num_rows} skewed", partial(decode_row, (SKEWED * 4)[:num_rows])
    yield "prefill attention 8k", prefill_row
    for num_adapters, goal in ((1, 0.95), (8, 0.9), (32, 0.8), (128, 0.5)):
        yield f"adapters, {num_adapters} distinct", partial(adapters_row, num_adapters, goal)
    yield "sampling with all filters, 256 x 152k", sampling_row
    yield "start, 135m, no kernel compiled before", start_row


def measured(case: str, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        return {"case": case, **measure()}
    except Exception:  # one failed case must not keep the others from running
        return {"case": case, "error": traceback.format_exc()[-MAX_ERROR:]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("gpu_goals: no GPU is visible", file=sys.stderr)
        return 2
    document: dict[str, Any] = {"rows": [], "not_measured": NOT_MEASURED}
    with torch.inference_mode():
        for case, measure in rows():
            row = measured(case, measure)
            document["rows"].append(row)
            print(json.dumps(row), flush=True)
            if options.json is not None:
                options.json.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
            torch.cuda.empty_cache()
    return int(any("error" in row for row in document["rows"]))


if __name__ == "__main__":
    sys.exit(main())
