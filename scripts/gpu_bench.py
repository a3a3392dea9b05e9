"""The short benchmark of gpu_check: decoding through all processes, beside what the device does in the same run.

    python -m tokenloom.scripts.gpu_bench --json FILE

For random checkpoints of the 135M and 0.6B shapes in bfloat16 and batches of 1, 32 and 256 requests (prompts of 64
random tokens, greedy, ignore_eos): decode tokens/s = N (OUT - 1) / (seconds for OUT tokens - seconds for one), and its
share of the limit Σ max(weight bytes / copy rate, flops / matmul rate) of bench_limits.py, the rates measured in a
process of their own just before. The file is written after each figure, so that what was measured survives a stop.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from tokenloom import LLM
from tokenloom.scripts.bench_contestant import Ours
from tokenloom.scripts.bench_limits import LimitsPeer
from tokenloom.scripts.bench_report import Report, median
from tokenloom.scripts.bench_workload import Workload, find_checkpoint, vocab_size

MODELS = ("135m", "0.6b")
BATCHES = (1, 32, 256)
NUM_IN, NUM_OUT = 64, 128
ROUNDS = 2
DTYPE = "bfloat16"
THREADS = 2


def decode_seconds(ours: Ours, workload: Workload, seed: int) -> float:
    """What the answer tokens after the first take."""
    whole = ours.generate(workload.prompts(seed), workload.num_out)
    return whole - ours.generate(workload.prompts(seed + 1), 1)


def measure_model(name: str, options: argparse.Namespace, report: Report) -> None:
    folder = find_checkpoint(name, DTYPE)
    begun = time.perf_counter()
    ours = Ours(LLM(folder, dtype=DTYPE, device=options.device, max_model_len=1024))
    start_s = time.perf_counter() - begun
    limits = LimitsPeer(folder, DTYPE, options.device, THREADS)
    try:
        for batch in options.batches:
            workload = Workload(batch, NUM_IN, options.num_out, vocab_size(folder))
            ours.generate(workload.prompts(seed=-1), 4)
            rates = limits.measure()
            seconds = median([decode_seconds(ours, workload, 2 * seed) for seed in range(ROUNDS)])
            num_tokens = batch * (workload.num_out - 1)
            report.add(
                model=name,
                batch=batch,
                decode_tokens_per_s=num_tokens / seconds,
                step_ms=seconds / (workload.num_out - 1) * 1e3,
                share_of_limit=limits.limits.decode_seconds(workload, rates) / seconds,
                copy_GB_per_s=rates.read_bytes_per_s / 1e9,
                matmul_TFLOP_per_s=rates.flops_per_s / 1e12,
                start_s=start_s,
            )
            write(report.document(), options.json)
    finally:
        limits.close()
        ours.close()


def is_measured(name: str, options: argparse.Namespace, report: Report) -> bool:
    """Whether all of a model's figures could be; the report says why not."""
    try:
        measure_model(name, options, report)
    except Exception as error:  # of any kind: the other model is still worth measuring
        report.note(f"{name} failed", f"{type(error).__name__}: {error}"[:500])
        return False
    return True


def write(document: Any, file: Path | None) -> None:
    if file is not None:
        file.write_text(json.dumps(document, indent=2) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--batches", nargs="+", type=int, default=BATCHES)
    parser.add_argument("--out", type=int, default=NUM_OUT, dest="num_out")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    report = Report("decode", {"in": NUM_IN, "out": options.num_out, "dtype": DTYPE, "device": options.device})
    failed = [name for name in options.models if not is_measured(name, options, report)]
    report.publish(options.json)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
