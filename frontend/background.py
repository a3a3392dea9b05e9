"""Background: work too long for the frontend's loop, done in threads, whose results come back to the loop.

Knows nothing of what the work is. `wake` is called from a worker thread and must make the loop call `take` soon.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from ..ipc.errors import Overloaded

MAX_JOBS = 1024  # waiting or running; beyond, the work is refused

Completion = Callable[[], None]  # runs in the loop


class Background:
    """Two threads. Jobs return what is to be done with their result in the loop."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._pool = ThreadPoolExecutor(2, thread_name_prefix="tokenize")
        self._done: deque[Completion] = deque()
        self._num_jobs = 0

    def submit(self, job: Callable[[], Completion]) -> None:
        """Run `job` in a thread, and what it returns in the loop; `job` must not raise."""
        if self._num_jobs >= MAX_JOBS:
            raise Overloaded(f"{self._num_jobs} long prompts wait to be tokenized, at most {MAX_JOBS} may: ask again")
        self._num_jobs += 1
        self._pool.submit(self._run, job)

    def _run(self, job: Callable[[], Completion]) -> None:
        self._done.append(job())
        self._wake()

    def take(self) -> list[Completion]:
        """What is to be done now, in the order in which the jobs ended."""
        completions = [self._done.popleft() for _ in range(len(self._done))]
        self._num_jobs -= len(completions)
        return completions

    def close(self) -> None:
        """Drop what has not begun; what runs ends by itself."""
        self._pool.shutdown(wait=False, cancel_futures=True)
