"""HelperPool: runs work that is too long for a loop in a few threads, with helper processes, and returns the results.

Each thread takes jobs up to a size, so that short jobs do not wait for the longest. A job is lent a helper, whose
process starts with the first question: the one that was used last, so that there are no more processes than jobs at
once. A cancelled job is dropped or its question interrupted; a job that waits too long for a thread is refused, and at
once while no thread can be started. Knows nothing of the work itself.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Generic, Protocol, TypeAlias, TypeVar

from ....ipc.errors import Overloaded, TokenloomError
from ....ipc.notes.deadly import NONE, ReadingNote
from ....ipc.shortages.threads import start_thread
from .fair_queue import FairQueue, Job
from .task import Then, error_of

T = TypeVar("T")

ANY_SIZE = 1 << 40
THREAD_BYTES = (1 << 20, 8 << 20, ANY_SIZE)  # the largest job of each thread
WAIT_S = 120.0  # limit of a job's wait for a thread


class PoolHelper(Protocol):
    """Interface of the helper that is lent to a job: a Helper (helper.py), or NoHelper."""

    @property
    def is_interrupted(self) -> bool: ...

    def interrupt(self) -> None:
        """Abort the current question; callable from any thread."""

    def stop(self) -> None:
        """End the process, and forget an interruption."""


class NoHelper:
    """Helper without a process, for jobs that need none."""

    is_interrupted = False

    def interrupt(self) -> None: ...

    def stop(self) -> None: ...


H = TypeVar("H", bound=PoolHelper)
Work: TypeAlias = Callable[[H], Callable[[], None]]  # runs in a thread; the loop calls its result
PoolJob: TypeAlias = Job[Work[H]]


class HelperPool(Generic[H]):
    """Owner of the threads, which start with the first job, of the helpers and of the queue. Only the loop calls public
    methods."""

    def __init__(
        self,
        wake: Callable[[], None],
        new_helper: Callable[[], H],
        thread_bytes: Sequence[int] = THREAD_BYTES,
        *,
        monotonic: Callable[[], float] = time.monotonic,
        note: ReadingNote | None = None,
        first_slot: int = 1,
    ) -> None:
        """`wake` is called from a thread and must make the loop call `take` soon. `thread_bytes`: the largest job of
        each thread, ascending. `note`: where the threads note the requests that they work for, in slots from
        `first_slot` on."""
        self._wake = wake
        self._new_helper = new_helper
        self._thread_bytes = thread_bytes
        self._monotonic = monotonic
        self._note = note
        self._first_slot = first_slot
        self._done: deque[Callable[[], None]] = deque()
        self._changed = threading.Condition()  # guards the next four
        self._queue: FairQueue[Work[H]] = FairQueue(thread_bytes)
        self._running: dict[PoolJob[H], H] = {}
        self._idle: list[H] = []
        self._is_closed = False
        self._threads: dict[int, threading.Thread] = {}  # by size class

    def run(
        self,
        work: Callable[[H], T],
        then: Then[T],
        *,
        num_bytes: int = 0,
        owner: str = "",
        wait_s: float = WAIT_S,
    ) -> PoolJob[H] | None:
        """Run `work` in a thread, with a helper, and return its job; the loop later calls `then` with the result or
        error, or with Overloaded after `wait_s`, at most WAIT_S, in the queue. A job that is dropped while it waits has
        no outcome.

        Returns None if `then` has been called already, with Overloaded because the queue is full or there is no
        thread."""
        key = NONE
        if self._note is not None:
            then, key = self._note.bound(then), self._note.current
        now = self._monotonic()

        def work_on(helper: H) -> Callable[[], None]:
            return partial(then, _outcome_of(work, helper))

        job: PoolJob[H] = Job(work_on, num_bytes, owner, now + min(wait_s, WAIT_S), then, key)
        try:
            self._start_missing()
            with self._changed:
                self._queue.add(job, now)
                self._changed.notify_all()
        except Overloaded as error:
            then(error.with_traceback(None))
            return None
        return job

    def cancel(self, job: PoolJob[H] | None) -> None:
        """Drop a waiting job, or interrupt the question of a running one, which still calls `then`. Ignores None and
        jobs that have ended."""
        if job is not None:
            with self._changed:
                if not self._queue.remove(job) and job in self._running:
                    self._running[job].interrupt()

    def drop(self, job: PoolJob[H] | None) -> None:
        """Drop a waiting job. Ignores None, and jobs that run or have ended."""
        if job is not None:
            with self._changed:
                self._queue.remove(job)

    def take(self) -> list[Callable[[], None]]:
        """Return the callbacks of ended jobs, for the loop to call, in the order of their ends."""
        return [self._done.popleft() for _ in range(len(self._done))]

    @property
    def next_expiry(self) -> float:
        """Return the time at which to call `expire` next, in monotonic seconds; inf without jobs."""
        return self._queue.next_expiry

    def expire(self, now: float) -> None:
        """Refuse the jobs that have waited too long. `now`: monotonic seconds."""
        if now < self._queue.next_expiry:
            return
        with self._changed:
            late, num_left = self._queue.take_expired(now), len(self._queue)
        for job in late:
            job.refuse(
                Overloaded(
                    f"{job.num_bytes} bytes of text were not tokenized in time, {num_left} more texts wait: ask again "
                    "later, or allow more time",
                    retry_after_s=5.0,
                )
            )

    def close(self, error: TokenloomError | None = None, wait_s: float = 0.0) -> None:
        """Drop the waiting jobs, which get `error` if there is one, and interrupt the questions; running work ends by
        itself. Wait at most `wait_s` for the ends of the processes."""
        with self._changed:
            self._is_closed = True
            waiting = self._queue.clear()
            for helper in self._running.values():
                helper.interrupt()
            self._changed.notify_all()
        if error is not None:
            for job in waiting:
                job.refuse(error)
        deadline = time.monotonic() + wait_s
        for thread in self._threads.values():
            thread.join(max(0.0, deadline - time.monotonic()))

    # ── threads ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _start_missing(self) -> None:
        """Start the threads that do not run yet, first the one that takes jobs of all sizes; Overloaded without it."""
        for size_class in reversed(range(len(self._thread_bytes))):
            if size_class not in self._threads:
                try:
                    self._threads[size_class] = start_thread(f"helper-pool-{size_class}", self._serve, size_class)
                except Overloaded:
                    if not self._threads:
                        raise
                    return  # the next job tries again

    def _serve(self, size_class: int) -> None:
        while (begun := self._begin(size_class)) is not None:
            job, helper = begun
            self._hold(size_class, job.key)
            rest = job.work(helper)
            self._hold(size_class, NONE)
            self._end(job, helper)
            self._done.append(rest)
            del begun, job, rest  # frees the body before the next wait
            self._wake()

    def _begin(self, size_class: int) -> tuple[PoolJob[H], H] | None:
        """Wait for the next job and return it with a helper; None once the pool is closed."""
        with self._changed:
            while not self._is_closed:
                job = self._queue.pop(size_class)
                if job is not None:
                    helper = self._running[job] = self._idle.pop() if self._idle else self._new_helper()
                    return job, helper
                self._changed.wait()
            idle, self._idle = self._idle, []
        for helper in idle:
            helper.stop()
        return None

    def _end(self, job: PoolJob[H], helper: H) -> None:
        """Take a helper back from a job."""
        with self._changed:
            del self._running[job]
        if helper.is_interrupted:
            helper.stop()
        with self._changed:
            self._idle.append(helper)

    def _hold(self, size_class: int, key: bytes) -> None:
        if self._note is not None:
            self._note.hold(self._first_slot + size_class, key)


def _outcome_of(work: Callable[[H], T], helper: H) -> T | TokenloomError:
    """Return the result of work on one request, or its `error_of`."""
    try:
        return work(helper)
    except Exception as error:
        return error_of(error)
