"""ThreadPool: runs work that is too long for the frontend's loop in a few threads, and returns results to the loop.

Each thread takes jobs up to a size, so that short jobs never wait for the longest, and has an intake process of its own
(`host.py`), started when needed. A cancelled job is dropped or interrupted; a job that waits too long for a thread is
refused, and at once while no thread can be started. Knows nothing of the work itself.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol, TypeAlias, TypeVar

from ....ipc.errors import InternalError, Overloaded, TokenloomError
from ....ipc.messages.intake import IntakeAnswer, IntakeQuestion
from ....ipc.notes.deadly import NONE, ReadingNote
from ....ipc.shortages.failure import failure_of
from ....ipc.shortages.threads import start_thread
from .fair_queue import FairQueue, Job

T = TypeVar("T")

logger = logging.getLogger("tokenloom.frontend")

THREAD_BYTES = (1 << 20, 8 << 20, 1 << 40)  # the largest job of each thread
WAIT_S = 120.0  # limit of a job's wait for a thread


class Host(Protocol):
    """A thread's intake process."""

    def ask(self, question: IntakeQuestion, body: Sequence[bytes] = ()) -> IntakeAnswer: ...

    def interrupt(self) -> None:
        """Abort the current question; callable from any thread."""

    def stop(self) -> None: ...


Then: TypeAlias = Callable[[T | TokenloomError], None]
Work: TypeAlias = Callable[[Host], Callable[[], None]]  # runs in a thread; the loop calls its result
PoolJob: TypeAlias = Job[Work]


class ThreadPool:
    """Owner of the threads, which start with the first job, and of the queue. Only the loop calls public methods."""

    def __init__(
        self,
        wake: Callable[[], None],
        new_host: Callable[[], Host],
        monotonic: Callable[[], float] = time.monotonic,
        note: ReadingNote | None = None,
        first_slot: int = 1,
    ) -> None:
        """`wake` is called from a thread and must make the loop call `take` soon. `note`: where the threads note the
        requests that they work for, in slots from `first_slot` on; default: in memory."""
        self._note, self._first_slot = note or ReadingNote(), first_slot
        self._wake = wake
        self._new_host = new_host
        self._monotonic = monotonic
        self._done: deque[Callable[[], None]] = deque()
        self._changed = threading.Condition()  # guards the next two
        self._queue: FairQueue[Work] = FairQueue(THREAD_BYTES)
        self._running: dict[PoolJob, Host] = {}
        self._is_closed = False
        self._threads: dict[int, threading.Thread] = {}  # by size class

    def run(
        self,
        work: Callable[[], T],
        then: Then[T],
        *,
        num_bytes: int = 0,
        owner: str = "",
        wait_s: float = WAIT_S,
    ) -> PoolJob | None:
        """Run `work` in a thread and return its job; the loop later calls `then` with the result or error, or with
        Overloaded after `wait_s`, at most WAIT_S, in the queue.

        Returns None if `then` has been called already, with Overloaded because the queue is full or there is no
        thread."""
        bound = self._note.bound(then)
        return self._add(lambda _: partial(bound, outcome_of(work)), bound, num_bytes, owner, wait_s)

    def ask(
        self,
        question: IntakeQuestion,
        body: Sequence[bytes],
        read: Callable[[IntakeAnswer], T],
        then: Then[T],
        *,
        num_bytes: int,
        owner: str = "",
        wait_s: float = WAIT_S,
    ) -> PoolJob | None:
        """Send a question to an intake process in a thread, where `read` converts the answer. Otherwise as `run`."""

        bound = self._note.bound(then)

        def work(host: Host) -> Callable[[], None]:
            return partial(bound, outcome_of(lambda: read(host.ask(question, body))))

        return self._add(work, bound, num_bytes, owner, wait_s)

    def _add(
        self, work: Work, refuse: Callable[[Overloaded], None], num_bytes: int, owner: str, wait_s: float
    ) -> PoolJob | None:
        now = self._monotonic()
        job = Job(work, num_bytes, owner, now + min(wait_s, WAIT_S), refuse, self._note.current)
        try:
            self._start_missing()
            with self._changed:
                self._queue.add(job, now)
                self._changed.notify_all()
        except Overloaded as error:
            refuse(error.with_traceback(None))
            return None
        return job

    def cancel(self, job: PoolJob | None) -> None:
        """Drop a waiting job, or interrupt the question of a running one, which still calls `then`. Ignores None and
        jobs that have ended."""
        if job is not None:
            with self._changed:
                if not self._queue.remove(job) and job in self._running:
                    self._running[job].interrupt()

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

    def close(self) -> None:
        """Drop the waiting jobs and interrupt the questions; running work ends by itself."""
        with self._changed:
            self._is_closed = True
            self._queue.clear()
            for host in self._running.values():
                host.interrupt()
            self._changed.notify_all()

    # ── threads ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _start_missing(self) -> None:
        """Start the threads that do not run yet, first the one that takes jobs of all sizes; Overloaded without it."""
        for size_class in reversed(range(len(THREAD_BYTES))):
            if size_class not in self._threads:
                try:
                    self._threads[size_class] = start_thread(f"thread-pool-{size_class}", self._serve, size_class)
                except Overloaded:
                    if not self._threads:
                        raise
                    return  # the next job tries again

    def _serve(self, size_class: int) -> None:
        host = self._new_host()
        while (job := self._next(size_class, host)) is not None:
            self._note.hold(self._first_slot + size_class, job.key)
            rest = job.work(host)
            self._note.hold(self._first_slot + size_class, NONE)
            with self._changed:
                del self._running[job]
            self._done.append(rest)
            del job, rest  # frees the body before the next wait
            self._wake()
        host.stop()

    def _next(self, size_class: int, host: Host) -> PoolJob | None:
        with self._changed:
            while not self._is_closed:
                job = self._queue.pop(size_class)
                if job is not None:
                    self._running[job] = host
                    return job
                self._changed.wait()
        return None


def outcome_of(work: Callable[[], T]) -> T | TokenloomError:
    """Return the result of work on one request, or its `error_of`."""
    try:
        return work()
    except Exception as error:
        return error_of(error)


def error_of(error: Exception) -> TokenloomError:
    """Return the error of work on one request, from where it is caught; without its traceback, whose frames hold the
    request's text. A bug becomes an InternalError: it must end neither the thread nor the loop, with the requests of
    others."""
    failure = failure_of(error, "the request could not be carried out")
    if isinstance(failure, InternalError) and failure is not error:
        logger.exception("work on a request failed")
    return failure.with_traceback(None)
