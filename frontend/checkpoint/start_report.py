"""Report of the progress of an engine's start: its phases, as log lines.

The command prints all lines on standard output. A program that starts an engine (LLM) prints at most one line per
PROGRAM_INTERVAL_S on standard error, and so none for a usual start.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Collection, Iterable, Sequence

import msgspec

from ...ipc.kv.pool_shape import PoolShape
from ...ipc.messages.supervisor import Initialize, Measured, Phase, PhaseProgress, StartPhase
from ...ipc.process import log
from ...ipc.process.arena import ArenaShape
from ...ipc.process.awake_clock import AwakeClock
from ...ipc.process.machine_memory import gib
from ...ipc.spec.config.engine_spec import EngineSpec
from ...ipc.spec.kv.kv_groups import KVGroup, names_of

SILENCE_S = 5.0  # after this long without a line, the processes that are still starting are named
MIN_INTERVAL_S = 3.0  # between two lines of a ThrottledWriter
PROGRAM_INTERVAL_S = 10.0  # the same for the start of an engine in a program, which is no log


class StartReport:
    """Writer of the lines of a start, with `announce`. `phases`: the phases of the processes that run."""

    def __init__(self, announce: Callable[[str], None], clock: AwakeClock) -> None:
        self._announce, self._clock = announce, clock
        self._announced_at, self._started_at = clock.now, time.monotonic()
        self.phases: list[StartPhase] = []

    def announce(self, process: str, text: str) -> None:
        self._announced_at = self._clock.now
        self._announce(log.info_line(process, text))

    def forget_phases(self, names: Collection[str]) -> None:
        """Drop the phases of the processes with these names, which are about to be started again."""
        self.phases = [phase for phase in self.phases if phase.process not in names]

    def announce_phase(self, process: str, phase: Phase) -> None:
        """Record and announce a phase that has just ended."""
        since_s = time.monotonic() - self._started_at
        self.phases.append(StartPhase(process=process, ended_s=since_s, **msgspec.structs.asdict(phase)))
        detail = f" ({phase.detail})" if phase.detail else ""
        self.announce(process, f"{phase.name} in {phase.duration_s:.2f} s{detail}")

    def announce_sizes(self, spec: EngineSpec, sizes: Initialize, measured: Measured) -> None:
        """Announce the size of the KV pool, and of the arena if there are KV tiers."""
        pool, size, groups = sizes.pool, spec.config.block_size, spec.kv_groups
        length = spec.fitted_model_len(pool)
        if groups[0].is_of_step:
            room = f"{spec.max_num_batched_tokens} tokens of one step"
            text = f"{room}, {gib(pool.num_bytes)} per rank on {measured.device}"
        elif len(groups) == 1:
            room = f"{pool.num_usable} blocks of {size} = {pool.num_usable * size} tokens"
            memory = f"{pool.num_bytes / 2**20:.0f} MiB per rank on {measured.device}"
            text = f"{room}, {memory}"
        else:
            num_fitting = pool.num_fitting(spec.num_held(length), spec.config.max_num_seqs)
            memory = f"{gib(pool.num_bytes)} per rank on {measured.device}"
            text = f"{memory}{describe_groups(groups, pool, size)} · room for {num_fitting} × {length} tokens"
        self.announce("supervisor", f"KV cache: {text}; max_model_len {length}")
        if (arena := sizes.arena) is not None:
            self.announce("supervisor", f"KV tiers: {describe_arena(arena)}, {gib(arena.num_bytes)} of shared memory")

    def announce_progress(self, process: str, progress: PhaseProgress) -> None:
        share, done = progress.num_done / max(progress.num_all, 1), f"{progress.num_done} of {progress.num_all}"
        self.announce(process, f"{progress.name}: {share:.0%}, {done} {progress.unit}")

    def announce_late(self, names: Iterable[str]) -> None:
        """Announce that the processes `names` are still starting, if there was no line for SILENCE_S."""
        if self._clock.now - self._announced_at >= SILENCE_S:
            self.announce("supervisor", f"still starting: {', '.join(names)}")


def kib(num_bytes: int) -> str:
    """Format a size in KiB, or as gib() from 1 MiB."""
    return gib(num_bytes) if num_bytes >= 1 << 20 else f"{num_bytes / 2**10:.0f} KiB"


def describe_groups(groups: Sequence[KVGroup], pool: PoolShape, block_size: int) -> str:
    """Return the slabs of a pool and the size of a block of each KV group, as the rest of a sentence."""
    sizes = [
        f" · {name}, {len(group.layers)} layers: {kib(num_bytes)} a {'row' if group.is_state else 'block'}"
        for name, group, num_bytes in zip(names_of(groups), groups, pool.block_bytes, strict=True)
    ]
    num_before = next((i for i, group in enumerate(groups) if group.is_state), len(groups))
    of_tokens = f" of {block_size} tokens" if num_before else ""
    parts = "".join([*sizes[:num_before], of_tokens, *sizes[num_before:]])
    return f" in {pool.num_slabs} slabs of {kib(pool.slab_bytes)}{parts}"


class ThrottledWriter:
    """Writer of lines that drops each line within `interval_s` of the last written one, or of the writer's creation."""

    def __init__(
        self,
        write: Callable[[str], None],
        monotonic: Callable[[], float] = time.monotonic,
        interval_s: float = MIN_INTERVAL_S,
    ) -> None:
        self._write, self._monotonic = write, monotonic
        self._interval_s = interval_s
        self._shown_at = monotonic()

    def __call__(self, line: str) -> None:
        now = self._monotonic()
        if now - self._shown_at >= self._interval_s:
            self._shown_at = now
            self._write(line)


def write_to_stderr(line: str) -> None:
    log.write_line(line, sys.stderr)


def describe_arena(arena: ArenaShape) -> str:
    """Return the number and size of the slots of an arena."""
    if arena.num_groups == 1:
        return f"{arena.num_slabs} blocks of {arena.slot_bytes[0]} bytes"
    parts = [
        f"{count} block{'s' * (count > 1)} of {kib(size)}"
        for count, size in zip(arena.slots_of_slab, arena.slot_bytes, strict=True)
    ]
    return f"{arena.num_slabs} slabs of {' or '.join(parts)}"
