"""Measure whole engines on a GPU beside the roofline and transformers, in one run.

    python -m tokenloom.scripts.gpu_bench --json FILE [--models 0.6b] [--requests 256]

    one row            decode tokens/s through all processes, and the device's idle share between two steps
    many rows          the same, and the share of a step that sampling takes with all parameters on
    requests           of LENGTHS tokens in and out, all at once: out tokens/s
    transformers       its continuous batching on the same requests
    a long prompt      time to its first token

Random checkpoints in bfloat16, greedy, ignore_eos. The roofline (bench_limits.py) reads weights and cache at the rate
of a copy and multiplies at the rate of the model's own matmuls, both measured beside the engine. The idle share is
1 - (a step without an engine, gpu_step.py) / (the engine's step), both at a context of CONTEXT tokens. The file is
written after each row; a row that cannot be measured carries its error.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import torch

from tokenloom import LLM, SamplingParams
from tokenloom.ipc.messages.workers import RowSampling
from tokenloom.scripts.bench_contestant import transformers_peer
from tokenloom.scripts.bench_limits import LimitsPeer
from tokenloom.scripts.bench_report import Report, median
from tokenloom.scripts.bench_workload import FIRST_ID, find_checkpoint, vocab_size

CASES = {"8b": ("one row", "a long prompt"), "14b": ("requests",)}
ALL_CASES = ("one row", "many rows", "requests", "transformers")  # of other models
GOALS = (  # model, case, column, at least, at most
    ("0.6b", "one row", "decode_tokens_per_s", 1000, None),
    ("0.6b", "one row", "idle", None, 0.05),
    ("0.6b", "many rows", "idle", None, 0.01),
    ("0.6b", "many rows", "sampling_share", None, 0.03),
    ("0.6b", "requests", "share_of_roofline", 0.7, None),
    ("0.6b", "transformers", "ours_times_it", 10, None),
    ("8b", "one row", "share_of_roofline", 0.88, None),
    ("8b", "a long prompt", "times_roofline", None, 1.4),
    ("14b", "requests", "share_of_roofline", 0.7, None),
)
MIN_MEMORY_BYTES = {"14b": 100 << 30}  # weights, and the cache of all concurrent requests
MEMORY_UTILIZATION = 0.85  # leaves room for measuring the rates beside the engine
LENGTHS = (100, 1024)
CONTEXT = 843  # average length of such a request while it runs
NUM_OUT = 128
ROUNDS = 2
MAX_ERROR = 4000  # characters
DTYPE = "bfloat16"
EVERYTHING = RowSampling(temperature=0.8, top_k=50, top_p=0.95, min_p=0.02, seed=1)

Requests: TypeAlias = list[tuple[int, int]]  # tokens in and out
Row: TypeAlias = dict[str, Any]


def device_step(folder: Path, num_rows: int, context: int, has_sampling: bool) -> Row:
    """Time a decode step in this process, in ms; `has_sampling`: also with all parameters on, and sampling alone."""
    from tokenloom.scripts.gpu_goals import sampling_row
    from tokenloom.scripts.gpu_step import DeviceSteps

    steps = DeviceSteps(folder, getattr(torch, DTYPE), num_rows, context)
    row = {"device_ms": steps.milliseconds(RowSampling())}
    if has_sampling:
        row["everything_on_ms"] = steps.milliseconds(EVERYTHING)
    del steps
    gc.collect()  # CUDA graphs are in reference cycles
    torch.cuda.empty_cache()
    if has_sampling:
        row["sampling_ms"] = sampling_row(num_rows, vocab_size(folder))["ms"]
        row["sampling_share"] = row["sampling_ms"] / row["everything_on_ms"]
        torch.cuda.empty_cache()
    return row


class ModelBench:
    """Owns the engine of one checkpoint and the peer that measures the machine's rates."""

    def __init__(
        self, folder: Path, cases: tuple[str, ...], options: argparse.Namespace, device_steps: dict[int, Row]
    ) -> None:
        """Start the engine. device_steps: results of `device_step` by number of rows."""
        self._folder, self._options, self._vocab_size = folder, options, vocab_size(folder)
        self._device_steps, self._draw = device_steps, random.Random(0)
        lengths = [self._draw.randint(*options.lengths) for _ in range(2 * options.requests)]
        self._requests = list(zip(lengths[::2], lengths[1::2], strict=True))
        longest = options.prompt + 1 if "a long prompt" in cases else 2 * options.lengths[1]
        self._llm = LLM(
            folder,
            dtype=DTYPE,
            device=options.device,
            max_model_len=max(longest, options.context + NUM_OUT),
            max_num_seqs=options.requests,
            gpu_memory_utilization=MEMORY_UTILIZATION,
        )
        try:
            self._limits = LimitsPeer(folder, DTYPE, options.device, 0)
        except BaseException:
            self._llm.close()
            raise
        self.measures: dict[str, Callable[[], Row]] = {
            "one row": lambda: self._decode(1),
            "many rows": lambda: self._decode(options.requests),
            "requests": self._serve,
            "transformers": self._beside_transformers,
            "a long prompt": self._first_token,
        }

    def close(self) -> None:
        self._llm.close()
        self._limits.close()

    def _prompts(self, requests: Requests) -> list[list[int]]:
        ids = range(min(FIRST_ID, self._vocab_size - 1), self._vocab_size)
        return [self._draw.choices(ids, k=num_in) for num_in, _ in requests]

    def _seconds(self, requests: Requests) -> float:
        """Submit these requests at once, with new prompts; return the seconds until all are answered."""
        prompts = self._prompts(requests)
        params = [SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=num_out) for _, num_out in requests]
        begun = time.perf_counter()
        outputs = self._llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - begun
        assert [len(output.outputs[0].token_ids) for output in outputs] == [num_out for _, num_out in requests]
        return seconds

    def _roofline(self, *workloads: Requests) -> list[float]:
        """Measure the machine's rates and return the roofline seconds of each workload at them."""
        rates = self._limits.measure()
        return [self._limits.limits.roofline_seconds(requests, rates) for requests in workloads]

    def _decode(self, num_rows: int) -> Row:
        num_in = max(self._options.context - NUM_OUT // 2, 1)
        whole, first = [(num_in, NUM_OUT)] * num_rows, [(num_in, 1)] * num_rows
        self._seconds([(num_in, 4)] * num_rows)  # records the CUDA graph of this size
        seconds = median([self._seconds(whole) - self._seconds(first) for _ in range(ROUNDS)])
        whole_s, first_s = self._roofline(whole, first)
        step_ms, device = seconds / (NUM_OUT - 1) * 1e3, self._device_steps.get(num_rows, {})
        idle = {"idle": 1 - device["device_ms"] / step_ms} if device else {}
        rates = {"decode_tokens_per_s": num_rows / step_ms * 1e3, "share_of_roofline": (whole_s - first_s) / seconds}
        return {**rates, "step_ms": step_ms, **device, **idle}

    def _serve(self) -> Row:
        self._seconds(self._requests[: -(-len(self._requests) // 4)])
        seconds = self._served_s = min(self._seconds(self._requests) for _ in range(ROUNDS))
        (limit_s,) = self._roofline(self._requests)
        num_out = sum(num_out for _, num_out in self._requests)
        return {"seconds": seconds, "out_tokens_per_s": num_out / seconds, "share_of_roofline": limit_s / seconds}

    def _beside_transformers(self) -> Row:
        """Run transformers on the same requests after our engine has freed the device."""
        self._llm.close()
        prompts, counts = self._prompts(self._requests), [num_out for _, num_out in self._requests]
        peer = transformers_peer(self._folder, DTYPE, self._options.device, 0)
        try:
            peer.ask({"prompts": prompts[:4], "max_tokens": [4] * len(prompts[:4])})
            answer = peer.ask({"prompts": prompts, "max_tokens": counts})
        finally:
            peer.close()
        assert answer["num_tokens"] == sum(counts), answer
        seconds = float(answer["seconds"])
        ratio = seconds / self._served_s
        return {"seconds": seconds, "out_tokens_per_s": sum(counts) / seconds, "ours_times_it": ratio}

    def _first_token(self) -> Row:
        prompt: Requests = [(self._options.prompt, 1)]
        self._seconds(prompt)
        seconds = median([self._seconds(prompt) for _ in range(2 * ROUNDS + 1)])
        (limit_s,) = self._roofline(prompt)
        return {"first_token_s": seconds, "times_roofline": seconds / limit_s}


def with_goals(row: Row) -> Row:
    """Return the row with the goals of its case, if it has any, and whether it meets them."""
    goals = [goal for goal in GOALS if goal[:2] == (row["model"], row["case"]) and goal[2] in row]
    words = [f"{name} at {'least' if low is not None else 'most'} {low or high}" for _, _, name, low, high in goals]
    is_met = [row[name] >= low if low is not None else row[name] <= high for _, _, name, low, high in goals]
    return {**row, "goal": ", ".join(words), "is_met": all(is_met)} if goals else row


def measure_model(name: str, options: argparse.Namespace, add: Callable[[Row], None]) -> bool:
    """Measure a model's rows; return whether all succeeded or the device is too small. A failed row has its error."""
    needed = MIN_MEMORY_BYTES.get(name, 0)
    if options.device == "cuda" and torch.cuda.get_device_properties(0).total_memory < needed:
        add({"model": name, "case": "all", "not_measured": f"takes a device of {needed >> 30} GiB"})
        return True
    cases, bench, num_measured = CASES.get(name, ALL_CASES), None, 0
    folder, device_steps = find_checkpoint(name, DTYPE), dict[int, Row]()
    for num_rows in (1, options.requests) if options.device == "cuda" and "many rows" in cases else ():
        with reported(name, f"steps of {num_rows} rows without an engine", add):
            device_steps[num_rows] = device_step(folder, num_rows, options.context, num_rows > 1)
    begun = time.perf_counter()
    try:
        bench = ModelBench(folder, cases, options, device_steps)
        add({"model": name, "case": "start", "seconds": time.perf_counter() - begun})
        for case in cases:
            with reported(name, case, add):
                add(with_goals({"model": name, "case": case, **bench.measures[case]()}))
                num_measured += 1
    finally:
        if bench is not None:
            bench.close()
    return num_measured == len(cases)


@contextmanager
def reported(name: str, case: str, add: Callable[[Row], None]) -> Iterator[None]:
    """Catch an error of any kind inside the `with` and add it as a row, so that other rows are still measured."""
    try:
        yield
    except Exception:
        add({"model": name, "case": case, "error": traceback.format_exc()[-MAX_ERROR:]})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["0.6b"])
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--lengths", type=int, nargs=2, default=LENGTHS, metavar=("LEAST", "MOST"))
    parser.add_argument("--context", type=int, default=CONTEXT)
    parser.add_argument("--prompt", type=int, default=8192, help="tokens of the long prompt")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    report = Report("gpu", {"dtype": DTYPE, "device": options.device, "requests": options.requests})
    num_failed = 0

    def add(row: Row) -> None:
        report.add(**row)
        print(json.dumps(row), flush=True)
        if options.json is not None:
            options.json.write_text(json.dumps(report.document(), indent=2) + "\n", encoding="utf-8")

    for name in options.models:
        is_measured = False
        with reported(name, "all", add):
            is_measured = measure_model(name, options, add)
        num_failed += not is_measured
    report.publish(options.json)
    return int(num_failed > 0)


if __name__ == "__main__":
    sys.exit(main())
