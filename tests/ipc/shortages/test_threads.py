"""A shortage is nobody's fault: the caller is to ask again. A thread that may not start leaves nothing behind."""

from __future__ import annotations

import errno
import os
import threading

import pytest

from tokenloom.ipc.errors import InternalError, Overloaded, RequestError
from tokenloom.ipc.shortages.failure import failure_of
from tokenloom.ipc.shortages.threads import Threads, start_thread
from tokenloom.tests.support.shortages import few_threads


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.EMFILE, "ulimit -n"),
        (errno.ENFILE, "fs.file-max"),
        (errno.EAGAIN, "ulimit -u"),
        (errno.ENOMEM, "free memory"),
        (errno.ENOSPC, "free space"),
        (errno.EDQUOT, "quota"),
    ],
)
def test_a_shortage_is_an_overload_with_its_remedy(number: int, remedy: str) -> None:
    failure = failure_of(OSError(number, os.strerror(number)), "the work failed")
    assert isinstance(failure, Overloaded) and failure.retry_after_s > 0
    assert str(failure).startswith(f"the work failed: {os.strerror(number)}: ") and remedy in str(failure)


def test_too_little_memory_is_an_overload_other_errors_are_faults_and_our_own_stay_as_they_are() -> None:
    assert isinstance(failure_of(MemoryError(), "x"), Overloaded)
    assert isinstance(failure_of(OSError(errno.EIO, "I/O error"), "x"), InternalError)
    assert str(failure_of(KeyError("k"), "x")) == "x: KeyError: 'k'"
    refused = RequestError("no")
    assert failure_of(refused, "x") is refused


DEADLINE_S = 20.0


def test_a_refused_thread_is_an_overload_that_names_the_limit() -> None:
    ran = threading.Event()
    with few_threads(), pytest.raises(Overloaded, match=r"«x» cannot be started: can't start new thread: raise .*pids"):
        start_thread("x", ran.set)
    start_thread("x", ran.set).join(DEADLINE_S)
    assert ran.is_set()


def test_work_that_is_refused_never_runs_and_later_work_does() -> None:
    ran: list[int] = []
    with Threads(2, "t") as threads:
        with few_threads(), pytest.raises(Overloaded, match="cannot be started"):
            threads.submit(ran.append, 1)
        threads.submit(ran.append, 2).result(DEADLINE_S)
    assert ran == [2]


def test_a_thread_that_has_started_goes_on_working_while_no_other_can() -> None:
    release, begun = threading.Event(), threading.Event()
    with Threads(2, "t") as threads:

        def wait() -> bool:
            begun.set()
            return release.wait(DEADLINE_S)

        first = threads.submit(wait)
        assert begun.wait(DEADLINE_S)
        with few_threads(), pytest.raises(Overloaded):
            threads.submit(int)
        release.set()
        assert first.result(DEADLINE_S) and threads.submit(int).result(DEADLINE_S) == 0


def test_an_error_of_the_work_is_its_own() -> None:
    def fail() -> None:
        raise RuntimeError("mine")

    with Threads(1, "t") as threads, pytest.raises(RuntimeError, match="mine"):
        threads.submit(fail).result(DEADLINE_S)
