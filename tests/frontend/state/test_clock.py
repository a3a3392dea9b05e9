"""The clock of ages goes on over boots, whatever the wall clock says meanwhile."""

from __future__ import annotations

import sqlite3
import time

import pytest

from tokenloom.frontend.state.clock import StateClock, boot_id, boot_time
from tokenloom.frontend.state.schema import TABLES


class Machine:
    """A machine that boots, with a wall clock that can be set, and one database."""

    def __init__(self) -> None:
        self.boots, self.booted_at, self.now, self.wall_error = 0, 1000.0, 1000.0, 0.0
        self.database = sqlite3.connect(":memory:")
        self.database.executescript(TABLES)

    def boot(self) -> None:
        self.boots += 1
        self.booted_at = self.now

    def opened(self) -> StateClock:
        clock = StateClock(
            lambda: self.now - self.booted_at, lambda: self.now + self.wall_error, lambda: str(self.boots)
        )
        clock.begin(self.database)
        return clock


@pytest.fixture
def machine() -> Machine:
    return Machine()


def test_time_off_counts_by_the_wall_clock(machine: Machine) -> None:
    first = machine.opened()
    assert first.now() == 1000
    machine.now += 50
    machine.boot()
    machine.now += 5
    assert machine.opened().now() == 1055


def test_within_a_boot_no_setting_of_the_wall_clock_counts(machine: Machine) -> None:
    first = machine.opened()
    for error in (1e9, -900.0):
        machine.wall_error = error
        machine.now += 10
        assert machine.opened().now() == first.now() == machine.now


def test_a_machine_that_boots_in_the_past_does_not_go_back(machine: Machine) -> None:
    machine.now += 500
    machine.opened()
    machine.boot()
    machine.wall_error = -machine.now
    clock = machine.opened()
    assert clock.now() == 1500
    machine.wall_error = 0.0  # the network has corrected it
    machine.now += 7
    assert clock.now() == machine.opened().now() == 1507


def test_the_clocks_of_this_machine_agree() -> None:
    assert boot_id() == boot_id() and boot_time() == pytest.approx(time.clock_gettime(time.CLOCK_BOOTTIME), abs=10)
