"""Background: work too long for the frontend's loop, done in threads, whose results come back to the loop.

Knows nothing of what the work is. `wake` is called from a worker thread and must make the loop call `take` soon.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from ..ipc.errors import Overloaded, TokenloomError

T = TypeVar("T")

MAX_JOBS = 1024  # waiting or running; beyond, the work is refused


class Background:
    """Two threads."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._pool = ThreadPoolExecutor(2, thread_name_prefix="tokenize")
        self._done: deque[Callable[[], None]] = deque()
        self._num_jobs = 0

    def run(self, work: Callable[[], T], then: Callable[[T | TokenloomError], None], *, is_long: bool = True) -> None:
        """Do `work`, if it `is_long` in a thread, else now; `then` gets what it returns or raises, in the loop. Of the
        errors work may raise TokenloomError alone; Overloaded comes at once when too much waits."""
        if not is_long:
            then(_outcome(work))
        elif self._num_jobs >= MAX_JOBS:
            then(Overloaded(f"{self._num_jobs} long prompts wait to be tokenized, at most {MAX_JOBS} may: ask again"))
        else:
            self._num_jobs += 1
            self._pool.submit(self._work, work, then)

    def _work(self, work: Callable[[], T], then: Callable[[T | TokenloomError], None]) -> None:
        self._done.append(partial(then, _outcome(work)))
        self._wake()

    def take(self) -> list[Callable[[], None]]:
        """What is to be done now, in the order in which the jobs ended."""
        completions = [self._done.popleft() for _ in range(len(self._done))]
        self._num_jobs -= len(completions)
        return completions

    def close(self) -> None:
        """Drop what has not begun; what runs ends by itself."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def _outcome(work: Callable[[], T]) -> T | TokenloomError:
    try:
        return work()
    except TokenloomError as error:
        return error
