"""Shortages of this process, as contexts: the kernel, or Python, refuses threads and descriptors inside them."""

from __future__ import annotations

import contextlib
import os
import resource
import threading
from collections.abc import Iterator

import pytest


@contextlib.contextmanager
def few_threads(num_left: int = 0) -> Iterator[None]:
    """Refuse to start a thread after the next `num_left` ones, with the error of Python at a limit of tasks."""
    left, start = [num_left], threading.Thread.start

    def start_or_refuse(thread: threading.Thread) -> None:
        if not left[0]:
            raise RuntimeError("can't start new thread")
        left[0] -= 1
        start(thread)

    with pytest.MonkeyPatch.context() as context:
        context.setattr(threading.Thread, "start", start_or_refuse)
        yield


@contextlib.contextmanager
def few_descriptors(num_left: int = 0) -> Iterator[None]:
    """Let the kernel refuse descriptors after the next `num_left` ones."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)  # the lowest number that is free
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free + num_left, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def num_descriptors() -> int:
    """Return the number of descriptors that this process has open."""
    return len(os.listdir("/proc/self/fd"))
