"""A shortage is nobody's fault: the caller is to ask again. Every other error is a bug, or one of ours."""

from __future__ import annotations

import errno
import os

import pytest

from tokenloom.ipc.errors import InternalError, Overloaded, RequestError
from tokenloom.ipc.shortages.failure import failure_of


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


def test_too_little_memory_is_an_overload() -> None:
    assert isinstance(failure_of(MemoryError(), "x"), Overloaded)


def test_other_errors_are_faults_and_our_own_stay_as_they_are() -> None:
    assert isinstance(failure_of(OSError(errno.EIO, "I/O error"), "x"), InternalError)
    assert str(failure_of(KeyError("k"), "x")) == "x: KeyError: 'k'"
    refused = RequestError("no")
    assert failure_of(refused, "x") is refused
