"""Measure whole engines on a GPU beside the roofline, in one run.

    python -m tokenloom.scripts.gpu.engines --json FILE [--models 0.6b]

    one row            decode tokens/s through all processes, and the device's idle share between two steps
    many rows          the same, and the share of a step that sampling takes with all parameters on
    requests           of `lengths` tokens in and out, all at once: out tokens/s
    memory             share of the device in use when the engine is ready, and after its requests
    a long prompt      time to its first token

Random checkpoints in bfloat16, greedy, ignore_eos. The roofline (limits.py) reads weights and cache at the rate
of a copy and multiplies at the rate of the model's own matmuls, both measured beside the engine. The idle share is
1 - (a step without an engine, device_steps.py) / (the engine's step), both at a context of `context` tokens. The file
is written after each row; a row that cannot be measured carries its error.
"""

from __future__ import annotations

import contextlib
import gc
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeAlias

import torch

from tokenloom import LLM, SamplingParams
from tokenloom.ipc.messages.workers import RowSampling
from tokenloom.scripts.bench.limits import LimitsPeer
from tokenloom.scripts.bench.report import machine, median
from tokenloom.scripts.bench.workload import FIRST_ID, find_checkpoint, vocab_size
from tokenloom.scripts.gpu.cases import Cases, Row, new_parser
from tokenloom.scripts.gpu.goal import Goal, with_goals

CASES = {"8b": ("one row", "a long prompt", "memory")}
ALL_CASES = ("one row", "many rows", "requests", "memory")  # of other models
GOALS = (
    Goal("0.6b: one row", "decode_tokens_per_s", least=1000),
    Goal("0.6b: one row", "idle", most=0.05),
    Goal("0.6b: many rows", "idle", most=0.01),
    Goal("0.6b: many rows", "sampling_share", most=0.03),
    Goal("0.6b: requests", "share_of_roofline", least=0.7),
    Goal("8b: one row", "share_of_roofline", least=0.85),
    Goal("8b: a long prompt", "times_roofline", most=1.4),
    *(Goal(f"{model}: memory", "off_by", most=0.02) for model in ("0.6b", "8b")),
)
DTYPE = "bfloat16"
EVERYTHING = RowSampling(temperature=0.8, top_k=50, top_p=0.95, min_p=0.02, seed=1)


@dataclass(frozen=True)
class Sizes:
    """Sizes of all cases."""

    requests: int = 256
    lengths: tuple[int, int] = (100, 1024)  # tokens in and out of a request, least and most
    context: int = 843  # average length of such a request while it runs
    prompt: int = 8192  # tokens of the long prompt
    num_out: int = 128
    rounds: int = 2
    num_steps: int = 50  # timed without an engine
    memory_utilization: float = 0.85  # leaves room for measuring the rates beside the engine
    checkpoint: str | None = None  # in place of every model's
    max_num_batched_tokens: int | None = None


FULL = Sizes()
SMALL = Sizes(
    requests=3,
    lengths=(3, 9),
    context=40,
    prompt=48,
    num_out=5,
    rounds=1,
    num_steps=2,
    memory_utilization=0.2,
    checkpoint="tiny-qwen3",
    max_num_batched_tokens=64,
)

Requests: TypeAlias = list[tuple[int, int]]  # tokens in and out


def device_step(folder: Path, num_rows: int, sizes: Sizes, has_sampling: bool) -> Row:
    """Time a decode step in this process, in ms; `has_sampling`: also with all parameters on, and sampling alone."""
    from tokenloom.scripts.gpu.device_steps import DeviceSteps
    from tokenloom.scripts.gpu.goals import sampling_row

    steps = DeviceSteps(folder, getattr(torch, DTYPE), num_rows, sizes.context, sizes.num_steps)
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
        self, folder: Path, device: str, sizes: Sizes, has_long_prompt: bool, device_steps: dict[int, Row]
    ) -> None:
        """Start the engine. device_steps: results of `device_step` by number of rows."""
        self._folder, self._device, self._sizes, self._vocab_size = folder, device, sizes, vocab_size(folder)
        self._device_steps, self._draw = device_steps, random.Random(0)
        lengths = [self._draw.randint(*sizes.lengths) for _ in range(2 * sizes.requests)]
        self._requests = list(zip(lengths[::2], lengths[1::2], strict=True))
        self._has_served = False
        longest = sizes.prompt + 1 if has_long_prompt else 2 * sizes.lengths[1]
        begun = time.perf_counter()
        self._llm = LLM(
            folder,
            dtype=DTYPE,
            device=device,
            max_model_len=max(longest, sizes.context + sizes.num_out),
            max_num_seqs=sizes.requests,
            max_num_batched_tokens=sizes.max_num_batched_tokens,
            gpu_memory_utilization=sizes.memory_utilization,
        )
        self.start_s = time.perf_counter() - begun
        self._used_at_start, before = self._used(), self._free_bytes()
        try:
            self._limits = LimitsPeer(folder, DTYPE, device, 0)
        except BaseException:
            self._llm.close()
            raise
        self._peer_bytes = before - self._free_bytes()
        self.measures: dict[str, Callable[[], Row]] = {
            "one row": lambda: self._decode(1),
            "many rows": lambda: self._decode(sizes.requests),
            "requests": self._serve,
            "memory": self._memory,
            "a long prompt": self._first_token,
        }

    def close(self) -> None:
        self._llm.close()
        self._limits.close()

    def _free_bytes(self) -> int:
        return torch.cuda.mem_get_info()[0] if self._device == "cuda" else 0

    def _used(self, peer_bytes: int = 0) -> float:
        """Return the share of the device in use, by all processes but the peer."""
        if self._device != "cuda":
            return 0.0
        free, total = torch.cuda.mem_get_info()
        return (total - free - peer_bytes) / total

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
        num_out = self._sizes.num_out
        num_in = max(self._sizes.context - num_out // 2, 1)
        whole, first = [(num_in, num_out)] * num_rows, [(num_in, 1)] * num_rows
        self._seconds([(num_in, 4)] * num_rows)  # records the CUDA graph of this size
        seconds = median([self._seconds(whole) - self._seconds(first) for _ in range(self._sizes.rounds)])
        whole_s, first_s = self._roofline(whole, first)
        step_ms, device = seconds / (num_out - 1) * 1e3, self._device_steps.get(num_rows, {})
        idle = {"idle": 1 - device["device_ms"] / step_ms} if "device_ms" in device else {}
        rates = {"decode_tokens_per_s": num_rows / step_ms * 1e3, "share_of_roofline": (whole_s - first_s) / seconds}
        return {**rates, "step_ms": step_ms, **device, **idle}

    def _serve(self) -> Row:
        self._seconds(self._requests[: -(-len(self._requests) // 4)])
        self._has_served = True
        seconds = min(self._seconds(self._requests) for _ in range(self._sizes.rounds))
        (limit_s,) = self._roofline(self._requests)
        num_out = sum(num_out for _, num_out in self._requests)
        return {"seconds": seconds, "out_tokens_per_s": num_out / seconds, "share_of_roofline": limit_s / seconds}

    def _memory(self) -> Row:
        """Compare the memory in use with the share that the engine may take."""
        if not self._has_served:
            self._seconds(self._requests)
        asked, after = self._sizes.memory_utilization, self._used(self._peer_bytes)
        used = {"asked": asked, "used_at_start": self._used_at_start, "used_after_requests": after}
        return {**used, "off_by": max(abs(self._used_at_start - asked), after - asked), "start_s": self.start_s}

    def _first_token(self) -> Row:
        prompt: Requests = [(self._sizes.prompt, 1)]
        self._seconds(prompt)
        seconds = median([self._seconds(prompt) for _ in range(2 * self._sizes.rounds + 1)])
        (limit_s,) = self._roofline(prompt)
        return {"first_token_s": seconds, "times_roofline": seconds / limit_s}


def model_cases(name: str) -> list[str]:
    """Return the names of a model's cases. Steps without an engine are measured before it takes the memory."""
    cases = CASES.get(name, ALL_CASES)
    steps = ("steps of one row", "steps of many rows") if "many rows" in cases else ()
    return [f"{name}: {case}" for case in (*steps, *cases)]


def measure_model(name: str, device: str, sizes: Sizes, cases: Cases) -> None:
    """Measure a model's cases that are wanted. If the engine does not start, this is the error of each of them."""
    wanted = [case for case in model_cases(name) if cases.wants(case)]
    if not wanted:
        return
    folder, device_steps = find_checkpoint(sizes.checkpoint or name, DTYPE), dict[int, Row]()
    for words, num_rows in (("one row", 1), ("many rows", sizes.requests)):
        step_case, is_needed = f"{name}: steps of {words}", cases.wants(f"{name}: {words}")

        def measure_steps(num_rows: int = num_rows) -> Row:
            if device == "cpu":
                return {"not_measured": "of a GPU alone"}
            device_steps[num_rows] = device_step(folder, num_rows, sizes, num_rows > 1)
            return device_steps[num_rows]

        if cases.measure(step_case, measure_steps) is None and is_needed and step_case in model_cases(name):
            measure_steps()  # that were measured in an earlier run
    wanted = [case for case in wanted if "steps of" not in case]
    with contextlib.ExitStack() as stack:
        bench: ModelBench | None = None

        def measure(case: str) -> Row:
            nonlocal bench
            if bench is None:
                has_long_prompt = f"{name}: a long prompt" in model_cases(name)
                bench = ModelBench(folder, device, sizes, has_long_prompt, device_steps)
                stack.callback(bench.close)
            return with_goals({"case": case, **bench.measures[case.removeprefix(f"{name}: ")]()}, GOALS)

        for case in wanted:
            row = cases.measure(case, partial(measure, case))
            if bench is None and row is not None:  # it did not start
                for other in wanted[wanted.index(case) + 1 :]:
                    cases.measure(other, partial(dict, error=row["error"]))
                return


def main() -> int:
    parser = new_parser(__doc__)
    parser.add_argument("--models", nargs="+", default=["0.6b"])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options = parser.parse_args()
    sizes = SMALL if options.small else FULL
    names = [case for model in options.models for case in model_cases(model)]
    check = torch.cuda.synchronize if options.device == "cuda" else lambda: None
    cases = Cases.of_options(options, names, check)
    settings = {"dtype": DTYPE, "device": options.device, "requests": sizes.requests}
    cases.note({"benchmark": "gpu", "settings": settings, "machine": machine()})
    print(f"gpu: {settings}", flush=True)
    for model in options.models:
        measure_model(model, options.device, sizes, cases)
    return int(cases.has_failed)


if __name__ == "__main__":
    sys.exit(main())
