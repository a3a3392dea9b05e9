"""Which silence of a child counts as a hang. The test sets the times, and no process runs."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import cast

import pytest

from tokenloom.frontend.launcher.supervisor.children import Child, Children
from tokenloom.frontend.launcher.supervisor.health_monitor import HealthMonitor
from tokenloom.frontend.launcher.supervisor.launcher import CORE, FRONTEND, ProcessSpec, UnstartedProcess

TIMEOUT_S = 60.0


class Starved(UnstartedProcess):
    """A process that had no CPU for so long."""

    def __init__(self, seconds: float) -> None:
        super().__init__("core", OSError())
        self._seconds = seconds

    def take_starved_s(self) -> float:
        return self._seconds


def is_hang(*, silent_s: float, ping_late_s: float = 0.0, starved_s: float = 0.0) -> bool:
    """Whether a ready core that was silent for so long hangs when its ping is sent so late."""
    core = Child(ProcessSpec(CORE), Starved(starved_s), is_ready=True)
    monitor = HealthMonitor(cast(Children, SimpleNamespace(all=[core], send=lambda *_: None)), TIMEOUT_S)
    monitor.begin(first_start_s=1.0)
    now = time.monotonic()
    core.last_sign_at, monitor.next_at = now - silent_s, now - ping_late_s
    found = monitor.check()
    assert found is None or found == (core, f"core hangs: no sign of life for {silent_s:.1f} s")
    assert monitor.next_at > now
    return found is not None


@pytest.mark.parametrize(
    ("silent_s", "ping_late_s", "starved_s", "expected"),
    [(59.0, 0.0, 0.0, False), (61.0, 0.0, 0.0, True), (61.0, 5.0, 0.0, False), (61.0, 0.0, 5.0, False)],
)
def test_a_late_ping_and_a_busy_cpu_are_no_hang(
    silent_s: float, ping_late_s: float, starved_s: float, expected: bool
) -> None:
    assert is_hang(silent_s=silent_s, ping_late_s=ping_late_s, starved_s=starved_s) == expected


@pytest.mark.parametrize(("answers_pings", "has_core", "expected"), [(True, False, True), (False, True, False)])
def test_a_starting_frontend_hangs_like_a_ready_one_once_its_loop_runs(
    answers_pings: bool, has_core: bool, expected: bool
) -> None:
    core = Child(ProcessSpec(CORE), Starved(0.0), is_ready=has_core)
    frontend = Child(ProcessSpec(FRONTEND), Starved(0.0), answers_pings=answers_pings)
    monitor = HealthMonitor(cast(Children, SimpleNamespace(all=[core, frontend], send=lambda *_: None)), TIMEOUT_S)
    monitor.begin(first_start_s=1.0)
    now = monitor.next_at = time.monotonic()
    frontend.last_sign_at = now - TIMEOUT_S - 1
    assert (monitor.check() is not None) == expected
