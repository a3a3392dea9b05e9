"""FairQueue: jobs that wait for a thread, in an order in which no owner's many or long jobs hold up another's.

Start-time fair queueing: an owner's job counts as done when its bytes would be, at BYTES_PER_S, after the owner's
earlier jobs; the job that counts as done first is next. So a short job overtakes a long one that came shortly before,
an owner with many jobs goes behind those with few, and nobody waits for ever. Knows no thread and no clock.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from ...ipc.errors import Overloaded

W = TypeVar("W")

BYTES_PER_S = 1 << 20  # that tokenizing is taken to reach; only the order depends on it
MAX_BYTES = 256 << 20  # of the jobs that wait
MAX_OWNER_BYTES = MAX_BYTES // 2
MAX_JOBS = 1 << 16
NEVER = float("inf")


@dataclass(eq=False)
class Job(Generic[W]):
    """What waits: `work` until it leaves the queue."""

    work: W
    num_bytes: int
    owner: str
    expires_at: float  # monotonic seconds
    refuse: Callable[[Overloaded], None]


@dataclass
class _Owner:
    busy_until: float = 0.0  # when all jobs that came would be done
    num_bytes: int = 0  # of those that wait


class FairQueue(Generic[W]):
    """Each waiting job is here once. Jobs are of the smallest class whose limit they do not pass."""

    def __init__(self, class_bytes: Sequence[int]) -> None:
        """`class_bytes`: the limits, rising."""
        self._class_bytes = class_bytes
        # by when they count as done; those that have left are skipped
        self._heaps: list[list[tuple[float, int, Job[W]]]] = [[] for _ in class_bytes]
        self._waiting: dict[Job[W], None] = {}
        self._owners: dict[str, _Owner] = {}
        self._tie = itertools.count()
        self._num_bytes = 0
        self.next_expiry = NEVER  # monotonic seconds; may be too early, never too late

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, job: Job[W], now: float) -> None:
        """Overloaded if too much waits; `now` in monotonic seconds."""
        owner = self._owners.get(job.owner) or _Owner()
        self._check_room(job, owner)
        self._owners[job.owner] = owner
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
        is_full = len(self) >= MAX_JOBS or self._num_bytes + job.num_bytes > MAX_BYTES
        if is_full or owner.num_bytes + job.num_bytes > MAX_OWNER_BYTES:
            raise Overloaded(
                f"{len(self)} long texts of {self._num_bytes} bytes wait to be read, {owner.num_bytes} of this caller; "
                f"at most {MAX_JOBS} of {MAX_BYTES} bytes may, {MAX_OWNER_BYTES} of one caller: ask again later"
            )

    def pop(self, size_class: int) -> Job[W] | None:
        """The next job of this class or a smaller one; None if there is none."""
        heaps = self._heaps[: size_class + 1]
        for heap in heaps:
            while heap and heap[0][2] not in self._waiting:
                heapq.heappop(heap)
        first = min((heap[0] for heap in heaps if heap), default=None)
        if first is None:
            return None
        self.remove(first[2])
        return first[2]

    def remove(self, job: Job[W]) -> bool:
        """`job` waits no more; False if it did not."""
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
        """Those that have waited too long leave."""
        if now < self.next_expiry:
            return []
        late = [job for job in self._waiting if job.expires_at <= now]
        for job in late:
            self.remove(job)
        self.next_expiry = min((job.expires_at for job in self._waiting), default=NEVER)
        return late

    def clear(self) -> None:
        for job in list(self._waiting):
            self.remove(job)
