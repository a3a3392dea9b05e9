"""Reports: messages of the tier process's threads for the core, and jobs whose blocks are reported in batches."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

from ...ipc.codec import encode_ids
from ...ipc.messages.tier import BlocksLoaded, BlocksStored, TierToCore

BATCH = 16  # number of ended blocks that are reported at once
BATCH_S = 0.005  # longest time until a block's end is reported


class Reports:
    """Queue of the reports. Owns the descriptor that wakes the loop. Threads call `put` and `note`, the loop calls
    `take`."""

    def __init__(self) -> None:
        self.wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self.due: float | None = None  # time at which to report jobs, monotonic s; None: none to report
        self._lock = threading.Lock()
        self._messages: list[TierToCore] = []
        self._jobs: dict[Job, None] = {}
        self._is_awake = False  # the loop was woken and will call `take`

    def put(self, message: TierToCore) -> None:
        with self._lock:
            self._messages.append(message)
            self._wake()

    def touch(self) -> None:
        """Wake the loop, which then compares the sources' states."""
        with self._lock:
            self._wake()

    def note(self, job: Job, is_urgent: bool) -> None:
        """Let the loop report a job: at once if it is urgent, otherwise within BATCH_S."""
        with self._lock:
            self._jobs[job] = None
            if is_urgent:
                self.due = 0.0
                self._wake()
            elif self.due is None:
                self.due = time.monotonic() + BATCH_S
                self._wake()

    def take(self) -> list[TierToCore]:
        """Return the messages to send now."""
        with self._lock:
            if self._is_awake:
                os.eventfd_read(self.wake_fd)
                self._is_awake = False
            messages, self._messages = self._messages, []
            jobs: list[Job] = []
            if self.due is not None and time.monotonic() >= self.due:
                jobs, self._jobs, self.due = list(self._jobs), {}, None
        return messages + [report for job in jobs if (report := job.take()) is not None]

    def _wake(self) -> None:
        if not self._is_awake:
            self._is_awake = True
            os.eventfd_write(self.wake_fd, 1)


class Job:
    """The blocks of one order. Each block ends once with a result, and is then reported with its slot."""

    def __init__(self, number: int, num_blocks: int, reports: Reports) -> None:
        self.number = number
        self._num_left = num_blocks
        self._reports = reports
        self._lock = threading.Lock()
        self._ended: list[tuple[int, int]] = []  # slot and result of blocks not reported yet
        self._is_over = False  # whether the last report was taken
        if not num_blocks:
            reports.note(self, is_urgent=True)

    def end(self, slot: int, result: int) -> None:
        """End a block with a result."""
        with self._lock:
            self._ended.append((slot, result))
            self._num_left -= 1
            is_urgent = not self._num_left or len(self._ended) >= BATCH
        self._reports.note(self, is_urgent)

    def take(self) -> TierToCore | None:
        """Return the report of the blocks that have ended since the last report; None if there is nothing to report."""
        with self._lock:
            ended, self._ended = self._ended, []
            if self._is_over or (self._num_left and not ended):
                return None
            self._is_over = not self._num_left
            return self._report(ended, self._is_over)

    def _report(self, ended: list[tuple[int, int]], is_last: bool) -> TierToCore:
        raise NotImplementedError


class LoadJob(Job):
    """The blocks of one LoadBlocks. The result of a block is 1 if it is in its slot, else 0."""

    def __init__(self, number: int, num_blocks: int, reports: Reports, deadline: float) -> None:
        super().__init__(number, num_blocks, reports)
        self.deadline = deadline  # monotonic s; no read starts after it
        self.is_cancelled = False

    def _report(self, ended: list[tuple[int, int]], is_last: bool) -> BlocksLoaded:
        good, bad = ([slot for slot, result in ended if result == wanted] for wanted in (1, 0))
        return BlocksLoaded(job=self.number, slots=encode_ids(good), bad_slots=encode_ids(bad), is_last=is_last)


class StoreJob(Job):
    """The blocks of one StoreBlocks. The result of a block has the bits of the places where it now is. A block ends
    when all its writes have ended."""

    def __init__(self, number: int, num_blocks: int, reports: Reports, on_end: Callable[[int], None]) -> None:
        """`on_end` is called with the slot when a block ends for which `expect` was called."""
        super().__init__(number, num_blocks, reports)
        self._on_end = on_end
        self._writes: dict[int, list[int]] = {}  # by slot: number of open writes, bits of successful ones

    def expect(self, slot: int, num_writes: int) -> None:
        """Let a block end after `num_writes` calls of `written`."""
        self._writes[slot] = [num_writes, 0]

    def written(self, slot: int, bit: int) -> None:
        """End one write of a block. `bit`: the bit of the place, or 0 if the write failed."""
        with self._lock:
            state = self._writes[slot]
            state[0] -= 1
            state[1] |= bit
            has_ended = state[0] == 0
        if has_ended:
            self._on_end(slot)
            self.end(slot, state[1])

    def _report(self, ended: list[tuple[int, int]], is_last: bool) -> BlocksStored:
        slots, targets = (list(column) for column in zip(*ended, strict=True)) if ended else ([], [])
        return BlocksStored(job=self.number, slots=encode_ids(slots), targets=bytes(targets), is_last=is_last)
