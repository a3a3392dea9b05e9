"""Requests that name LoRA adapters, for benchmarks: random adapters, the figures of requests that run at once, and the
comparison of such runs in turn."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from tokenloom.frontend.client.transport import Transport
from tokenloom.frontend.launcher.options.options import config_from_keywords
from tokenloom.frontend.llm import open_private
from tokenloom.scripts.bench.cases.mixed import Load, between
from tokenloom.scripts.bench.inputs.make_adapter import AdapterShape, write_adapter
from tokenloom.scripts.bench.report import Report, median, percentile
from tokenloom.scripts.bench.runner import Setup

WARM_UP_TOKENS = 2
Run: TypeAlias = "Callable[[int], Figures]"  # of a round's number


@dataclass(frozen=True)
class Figures:
    """Figures of requests that ran at once."""

    seconds: float  # to the last token
    tokens_per_s: float
    decode_tokens_per_s: float  # while all of them decode; nan if they never do
    p99_s: float  # between tokens of one

    @classmethod
    def of(cls, times: Sequence[Sequence[float]], begun: float) -> Figures:
        """Compute the figures from each request's arrival times."""
        ended, num_tokens = max(each[-1] for each in times), sum(map(len, times))
        first, last = max(each[0] for each in times), min(each[-1] for each in times)
        num_decoded = sum(first < when <= last for each in times for when in each)
        gaps = [gap for each in times for gap in between(list(each), 0.0, ended)]
        return cls(
            seconds=ended - begun,
            tokens_per_s=num_tokens / (ended - begun),
            decode_tokens_per_s=num_decoded / (last - first) if last > first else float("nan"),
            p99_s=percentile(gaps, 99),
        )


class Adapters:
    """Random adapters of one checkpoint in the sub-folders of `folder`, written when they are first named."""

    def __init__(self, folder: Path, checkpoint: Path, rank: int) -> None:
        self._folder, self._checkpoint = folder, checkpoint
        self._shape = AdapterShape(rank=rank, alpha=2 * rank, dtype="bfloat16", strength=0.3)

    def path(self, number: int) -> Path:
        """Return the folder of an adapter."""
        folder = self._folder / f"a{number}"
        return folder if folder.exists() else write_adapter(folder, self._checkpoint, self._shape, number)

    def names(self, count: int) -> list[str]:
        return [f"a{number}" for number in range(count)]

    def options(self, count: int, num_slots: int) -> dict[str, object]:
        """Return options of an engine with `num_slots` slots that finds adapters 0 … count - 1 by their names."""
        self._folder.mkdir(exist_ok=True)
        for number in range(count):
            self.path(number)
        sizes = {"max_loras": num_slots, "max_lora_rank": self._shape.rank}
        return {"enable_lora": True, "adapter_folder": str(self._folder), **sizes}


def linked_cache(folder: Path) -> Path:
    """Make `folder` a cache folder, for XDG_CACHE_HOME, whose engines share all but the stores of adapters and the
    folders of GGUF files with those of the user; return it."""
    chosen = os.environ.get("XDG_CACHE_HOME", "")
    shared = (Path(chosen) if os.path.isabs(chosen) else Path.home() / ".cache") / "tokenloom"
    own = folder / "tokenloom"
    own.mkdir(parents=True)
    for path in shared.iterdir() if shared.is_dir() else ():
        if path.name not in ("adapters", "gateway-adapters", "gguf"):
            (own / path.name).symlink_to(path)
    return folder


def open_engine(setup: Setup, **options: object) -> tuple[Transport, Callable[[], None]]:
    """Start an engine for the benchmark's workload; return a transport to it and a function that ends both."""
    workload = setup.workload
    lengths = {"max_model_len": workload.num_in + workload.num_out + 16, "max_num_seqs": workload.num_requests}
    return open_private(config_from_keywords("LLM", setup.folder, {**lengths, **options, **setup.options}))


def run(transport: Transport, prompts: Sequence[list[int]], adapters: Sequence[str], num_out: int) -> Figures:
    """Run prompts at once, prompt i with adapter i modulo their number; without adapters, with the base model."""
    load, begun = Load(transport), time.perf_counter()
    for index, prompt in enumerate(prompts):
        load.submit(prompt, num_out, adapters[index % len(adapters)] if adapters else "")
    load.run_until(lambda: all(len(times) >= num_out for times in load.times))
    return Figures.of(load.times, begun)


def warm_up(transport: Transport, prompts: Sequence[list[int]], adapters: Sequence[str]) -> None:
    """Run prompts without an adapter, and one with each, so that all that fit are in slots."""
    run(transport, prompts, [], WARM_UP_TOKENS)
    for start in range(0, len(adapters), len(prompts)):
        names = adapters[start : start + len(prompts)]
        run(transport, prompts[: len(names)], names, WARM_UP_TOKENS)


def interleave(report: Report, heading: str, runs: dict[str, Run], rounds: int) -> dict[str, list[Figures]]:
    """Measure each run once a round, in an order that rotates; add a row of medians for each."""
    found: dict[str, list[Figures]] = {name: [] for name in runs}
    names = list(runs)
    for number in range(rounds):
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            found[name].append(runs[name](number))
    for name, figures in found.items():
        report.add(
            **{heading: name},
            tokens_per_s=median([each.tokens_per_s for each in figures]),
            decode_tokens_per_s=median([each.decode_tokens_per_s for each in figures]),
            p99_between_tokens_ms=1e3 * median([each.p99_s for each in figures]),
        )
    return found


def note_shares(report: Report, found: dict[str, list[Figures]], base: str) -> None:
    """Note the throughput of each run as a share of the base's."""
    for name, figures in found.items():
        if name != base:
            for what in ("tokens_per_s", "decode_tokens_per_s"):
                pair = [[getattr(each, what) for each in rounds] for rounds in (figures, found[base])]
                report.note_ratios(f"{what} with {name}, of {base}", *pair)
