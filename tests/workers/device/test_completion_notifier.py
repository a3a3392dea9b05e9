"""A completion makes the descriptor readable, once it happens and not before; errors of a wait are not lost ends."""

from __future__ import annotations

import select
import threading

import pytest

from tokenloom.ipc.errors import Overloaded
from tokenloom.tests.support.shortages import few_threads
from tokenloom.workers.device.completion_notifier import CompletionNotifier

DEADLINE_S = 20.0


def is_readable(watch: CompletionNotifier, timeout_s: float) -> bool:
    return bool(select.select([watch.fd], [], [], timeout_s)[0])


def test_the_descriptor_is_readable_after_a_wait_returns() -> None:
    watch, over = CompletionNotifier(), threading.Event()
    watch.add(lambda: over.wait(DEADLINE_S) and None)
    assert not is_readable(watch, 0.05)
    over.set()
    assert is_readable(watch, DEADLINE_S)
    watch.clear()
    assert not is_readable(watch, 0)
    watch.clear()  # of nothing


def test_the_descriptor_is_readable_after_a_wait_raises() -> None:
    def fail() -> None:
        raise RuntimeError("the device is gone")

    watch = CompletionNotifier()
    watch.add(fail)
    assert is_readable(watch, DEADLINE_S)


def test_a_thread_that_could_not_start_is_started_for_the_next_wait() -> None:
    watch = CompletionNotifier()
    with few_threads(), pytest.raises(Overloaded):
        watch.add(lambda: None)
    watch.add(lambda: None)
    assert is_readable(watch, DEADLINE_S)
