"""Losses: mends in the background after faults of the chaos harness, and the time that lost processes live.

A link is healed, a stopped process goes on, a killed one is started again as a process manager would. The next fault
waits for that.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import psutil

ZOMBIE_S = 4.0  # from the loss of a host or a supervisor to the end of the last process that it had started
MEND_S = 60.0
NUM_MENDS = 8  # at the same time


class Losses:
    """Owns the mends. `zombies` lists the processes that outlived a loss by ZOMBIE_S, and mends that went wrong."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(NUM_MENDS)
        self._mends: list[Future[None]] = []
        self.zombies: list[str] = []
        self.longest_end_s = 0.0  # from a loss to the end of its last process

    def mend(self, work: Callable[[], None]) -> None:
        """Do `work` in the background."""
        self._mends.append(self._pool.submit(work))

    def wait(self) -> None:
        """Wait for all mends. TimeoutError after MEND_S, or the error of a mend."""
        while self._mends:
            self._mends.pop().result(MEND_S)

    def watch_end(self, cause: str, processes: Sequence[psutil.Process], lost_at: float) -> None:
        """Note how long the processes live that were lost with `cause` at `lost_at` (monotonic seconds)."""
        _, alive = psutil.wait_procs(processes, timeout=max(lost_at + ZOMBIE_S - time.monotonic(), 0))
        if processes:
            self.longest_end_s = max(self.longest_end_s, time.monotonic() - lost_at)
        self.zombies += [f"{process} lives {ZOMBIE_S} s after the loss of {cause}" for process in alive]

    def close(self) -> None:
        """Wait for all mends; none may follow."""
        self.wait()
        self._pool.shutdown()
