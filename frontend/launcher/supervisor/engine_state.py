"""EngineState: a snapshot of the engine, formatted as log lines on SIGUSR1."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ....ipc.messages.supervisor import Progress
from .children import Child

_NUMBERS = {"worker": "generation", "core": "epoch", "frontend": "number", "tier": "number", "launcher": "number"}


class EngineState(NamedTuple):
    """Snapshot of the engine, made from the supervisor's own state and the cores' last Progress."""

    places: Sequence[str]  # addresses at which it serves
    uptime_s: float
    phase: str  # starting, serving or draining
    children: Sequence[Child]
    progress: Progress  # including the fields that the supervisor sets
    progress_age_s: float
    num_restarts: Mapping[str, int]  # by the name of the unit


def state_lines(state: EngineState) -> list[str]:
    """Return the state as log lines: one for the engine, one for each process, one for the work, and one for the last
    failure, if there was any."""
    restarts = ", ".join(f"{count} of the {role}" for role, count in state.num_restarts.items() if count)
    where = f" at {' and '.join(state.places)}" if state.places else ""
    lines = [f"state: {state.phase}{where}, up {_duration(state.uptime_s)}; restarts: {restarts or 'none'}"]
    for child in state.children:
        phase = "ready" if child.is_ready else "starting"
        size = child.process.resident_bytes() >> 20
        number = f"{_NUMBERS[child.spec.unit.role]} {child.spec.number}"
        lines.append(f"state: {child.spec.name}: {child.process.place}, {phase}, {number}, {size} MiB")
    lines.append(f"state: {_work(state)}")
    if state.progress.last_failure:
        lines.append(f"state: last failure: {state.progress.last_failure}")
    return lines


def _work(state: EngineState) -> str:
    progress, num_blocks = state.progress, max(state.progress.num_blocks, 1)
    if not progress.step:
        return "no step has ended yet"
    age_s = progress.step_age_s + state.progress_age_s
    return (
        f"step {progress.step}, {age_s:.1f} s ago; {progress.num_running} running, "
        f"{progress.num_waiting} waiting; KV {(progress.num_blocks - progress.num_free_blocks) / num_blocks:.0%} used"
        + ("; paused" if progress.is_paused else "")
        + ("; asleep" if progress.is_asleep else "")
    )


def _duration(seconds: float) -> str:
    minutes, hours = int(seconds) // 60, int(seconds) // 3600
    if hours >= 48:
        return f"{hours // 24} days {hours % 24} h"
    if hours:
        return f"{hours} h {minutes % 60} min"
    return f"{minutes} min {int(seconds) % 60} s" if minutes else f"{seconds:.1f} s"
