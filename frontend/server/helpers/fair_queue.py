"""FairQueue: waiting jobs in an order that is fair to their owners.

Fair queueing by virtual time, which is now, or later if jobs are taken faster than BYTES_PER_S: then it is the start of
the job taken last, or its finish once none waits. A job starts when its owner's previous one finishes, or now if that
is later, and finishes after its bytes at BYTES_PER_S; the job with the earliest finish is next. So a short job
overtakes a long one that came shortly before, owners with few jobs overtake those with many, owners of equal jobs take
turns, and no job starves. Knows no thread and no clock.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from ....ipc.errors import Overloaded, TokenloomError
from ....ipc.notes.deadly import NONE

W = TypeVar("W")

BYTES_PER_S = 1 << 20  # assumed speed of tokenizing; only the order depends on it
MAX_BYTES = 256 << 20  # of all waiting jobs
MAX_OWNER_BYTES = MAX_BYTES // 2
MAX_JOBS = 1 << 16
NEVER = float("inf")


@dataclass(eq=False)
class Job(Generic[W]):
    """Work of a given size; `refuse` is called if it is not to be done."""

    work: W
    num_bytes: int
    owner: str
    expires_at: float  # monotonic seconds
    refuse: Callable[[TokenloomError], None]
    key: bytes = NONE  # of the request in a ReadingNote


@dataclass
class _Owner:
    busy_until: float = 0.0  # virtual finish time of the last job
    num_bytes: int = 0  # of the waiting jobs


class FairQueue(Generic[W]):
    """Queue of waiting jobs, fair to their owners. A job waits in the smallest size class that it fits."""

    def __init__(self, class_bytes: Sequence[int]) -> None:
        """`class_bytes`: largest job of each size class, ascending."""
        self._class_bytes = class_bytes
        self.max_bytes, self.max_owner_bytes, self.max_jobs = MAX_BYTES, MAX_OWNER_BYTES, MAX_JOBS
        # (virtual finish time, tie, job); removed jobs stay until they are popped
        self._heaps: list[list[tuple[float, int, Job[W]]]] = [[] for _ in class_bytes]
        self._waiting: dict[Job[W], None] = {}
        self._owners: dict[str, _Owner] = {}
        self._tie = itertools.count()
        self._num_bytes = 0
        self._now = 0.0  # virtual time, unless the clock is ahead of it
        self._last_finish = 0.0  # of the jobs that were taken
        self.next_expiry = NEVER  # monotonic seconds; may be too early, never too late; NEVER without jobs

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, job: Job[W], now: float) -> None:
        """Add a job; Overloaded if the queue, or the owner's share of it, is full. `now`: monotonic seconds."""
        owner = self._owners.get(job.owner) or _Owner()
        self._check_room(job, owner)
        self._owners[job.owner] = owner
        now = max(now, self._now)
        owner.busy_until = max(now, owner.busy_until) + job.num_bytes / BYTES_PER_S
        owner.num_bytes += job.num_bytes
        self._num_bytes += job.num_bytes
        self._waiting[job] = None
        self.next_expiry = min(self.next_expiry, job.expires_at)
        size_class = bisect.bisect_left(self._class_bytes, job.num_bytes)
        heapq.heappush(self._heaps[size_class], (owner.busy_until, next(self._tie), job))
        if len(self._owners) > 2 * len(self._waiting) + 64:
            self._owners = {
                name: each for name, each in self._owners.items() if each.num_bytes or each.busy_until > now
            }

    def _check_room(self, job: Job[W], owner: _Owner) -> None:
        is_full = len(self) >= self.max_jobs or self._num_bytes + job.num_bytes > self.max_bytes
        if is_full or owner.num_bytes + job.num_bytes > self.max_owner_bytes:
            raise Overloaded(
                f"{len(self)} long texts of {self._num_bytes} bytes wait to be read, {owner.num_bytes} of this caller; "
                f"at most {self.max_jobs} of {self.max_bytes} bytes may, {self.max_owner_bytes} of one caller: "
                "ask again later"
            )

    def pop(self, size_class: int) -> Job[W] | None:
        """Remove and return the next job of this size class or a smaller one; None if there is none."""
        heaps = self._heaps[: size_class + 1]
        for heap in heaps:
            while heap and heap[0][2] not in self._waiting:
                heapq.heappop(heap)
        first = min((heap[0] for heap in heaps if heap), default=None)
        if first is None:
            if not self._waiting:
                self._now = self._last_finish
            return None
        finish, _, job = first
        self._now = max(self._now, finish - job.num_bytes / BYTES_PER_S)
        self._last_finish = max(self._last_finish, finish)
        self.remove(job)
        return job

    def remove(self, job: Job[W]) -> bool:
        """Remove a job; False if it does not wait here."""
        if job not in self._waiting:
            return False
        del self._waiting[job]
        self._num_bytes -= job.num_bytes
        self._owners[job.owner].num_bytes -= job.num_bytes
        for heap in self._heaps:
            if len(heap) > 2 * len(self._waiting) + 64:
                heap[:] = [entry for entry in heap if entry[2] in self._waiting]
                heapq.heapify(heap)
        return True

    def take_expired(self, now: float) -> list[Job[W]]:
        """Remove and return the jobs with an `expires_at` up to `now`."""
        if now < self.next_expiry:
            return []
        late = [job for job in self._waiting if job.expires_at <= now]
        for job in late:
            self.remove(job)
        self.next_expiry = min((job.expires_at for job in self._waiting), default=NEVER)
        return late

    def clear(self) -> list[Job[W]]:
        """Remove and return all jobs."""
        jobs = list(self._waiting)
        for job in jobs:
            self.remove(job)
        return jobs
