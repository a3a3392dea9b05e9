"""Paced threads together take at most their share of a core while the process is busy, and do not rest otherwise."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from tokenloom.ipc.process.pacer import LOOK_S, MAX_REST_S, MAX_SHARE, SHARE, SLICE_S, Pacer, Pause


class Core:
    """A core with a clock of its own, on which the thread under test works and sleeps. `on_sleep` may run others."""

    def __init__(self) -> None:
        self.now, self.cpu_s = 100.0, 7.0
        self.is_busy, self.num_waiting = True, 1
        self.on_sleep: Callable[[], None] = lambda: None

    def work(self, duration_s: float) -> None:
        self.now += duration_s
        self.cpu_s += duration_s

    def sleep(self, duration_s: float) -> None:
        self.now += duration_s
        self.on_sleep()

    def pacer(self) -> Pacer:
        times = (lambda: self.now, lambda: self.cpu_s, self.sleep)
        return Pacer(lambda: self.is_busy, lambda: self.num_waiting, *times)


def work(core: Core, pause: Pause, rng: random.Random, num_pieces: int) -> None:
    for _ in range(num_pieces):
        core.work(rng.uniform(0.0, 2 * SLICE_S))
        pause()


@pytest.mark.parametrize(("num_waiting", "expected"), [(0, SHARE), (1, SHARE), (3, 3 * SHARE), (100, MAX_SHARE)])
def test_a_thread_takes_its_share_while_the_process_is_busy(num_waiting: int, expected: float) -> None:
    core, rng = Core(), random.Random(num_waiting)
    core.num_waiting = num_waiting
    pause, begun, used = core.pacer().start(), core.now, core.cpu_s
    work(core, pause, rng, 500)
    share = (core.cpu_s - used) / (core.now - begun)
    assert 0.95 * expected < share < 1.05 * expected


def test_each_rest_is_in_proportion_to_the_work_before_it_up_to_a_limit() -> None:
    core = Core()
    pause = core.pacer().start()
    core.work(0.5 * SLICE_S)
    pause()
    assert core.now == 100.0 + 0.5 * SLICE_S  # too little to rest
    for piece_s in (2 * SLICE_S, 5 * SLICE_S, 0.2):
        core.work(piece_s)
        before = core.now
        pause()
        done_s = piece_s + (0.5 * SLICE_S if piece_s == 2 * SLICE_S else 0)
        assert core.now - before == pytest.approx(min(done_s * (1 / SHARE - 1), MAX_REST_S))


def test_threads_share_one_share() -> None:
    core = Core()
    pacer = core.pacer()
    first, second = pacer.start(), pacer.start()
    core.work(2 * SLICE_S)
    rest_s = 2 * SLICE_S * (1 / SHARE - 1)

    def other() -> None:
        """The second thread pauses while the first one rests."""
        core.on_sleep = lambda: None
        before = core.now
        second()
        assert core.now - before > 1.5 * rest_s - LOOK_S

    core.on_sleep = other
    first()
    assert core.on_sleep is not other and core.now >= 100.0 + 2 * rest_s


def test_a_thread_does_not_rest_while_the_process_is_not_busy() -> None:
    core = Core()
    core.is_busy = False
    pause, begun, used = core.pacer().start(), core.now, core.cpu_s
    work(core, pause, random.Random(0), 500)
    assert core.now - begun == pytest.approx(core.cpu_s - used)


def test_a_rest_ends_soon_after_the_process_is_no_longer_busy() -> None:
    core = Core()
    pause = core.pacer().start()
    core.work(1.0)

    def end() -> None:
        core.is_busy = False

    core.on_sleep = end
    pause()
    assert core.now <= 101.0 + LOOK_S
    core.is_busy, core.on_sleep = True, lambda: None
    core.work(2 * SLICE_S)  # owes nothing of the rest that was cut short
    before = core.now
    pause()
    assert core.now - before == pytest.approx(2 * SLICE_S * (1 / SHARE - 1))
