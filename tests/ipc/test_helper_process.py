"""Messages to a helper process never wait; its answers arrive in order, and its end after them, once."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Iterator
from typing import TypeAlias

import psutil
import pytest

from tokenloom.ipc.codec import encode
from tokenloom.ipc.helper_process import HelperLost, HelperProcess, HelperUnavailable
from tokenloom.tests.ipc.echo_helper import MODULE
from tokenloom.tests.support.engine_specs import new_spec
from tokenloom.tests.support.shortages import few_descriptors, num_descriptors
from tokenloom.tests.support.waiting import WAIT_S, wait_until

Answer: TypeAlias = list[str | int]


@pytest.fixture
def helper() -> Iterator[HelperProcess[Answer]]:
    helper: HelperProcess[Answer] = HelperProcess(MODULE, new_spec(), Answer)
    yield helper
    helper.stop()


def ask(helper: HelperProcess[Answer], question: str, content: bytes = b"") -> None:
    helper.start()
    helper.send([encode(question)], [content])


def answers(helper: HelperProcess[Answer], count: int) -> list[Answer]:
    """Wait for so many answers."""
    found = list[Answer]()
    while len(found) < count:
        assert select.select(helper.wakers, [], [], 10 * WAIT_S)[0], "a waker tells that there is something to do"
        found += helper.receive()
    return found


def process_of_test() -> psutil.Process:
    (process,) = (each for each in psutil.Process().children() if "echo" in " ".join(each.cmdline()))
    return process


def test_questions_larger_than_the_sockets_buffer_are_sent_at_once_and_answered_in_order(
    helper: HelperProcess[Answer],
) -> None:
    ask(helper, "first", bytes(20 << 20))  # returns before the process has been imported
    assert not helper.is_ready and helper.receive() == []
    ask(helper, "second")
    assert answers(helper, 2) == [["first", 20 << 20], ["second", 0]]
    assert helper.is_ready and helper.is_alive and helper.cpu_s > 0 and helper.resident_bytes > 1 << 20


@pytest.mark.parametrize(
    ("end", "how"),
    [("end", "exited with code 3"), ("close", "closed its socket"), ("kill", "was ended by SIGKILL")],
)
def test_an_end_is_reported_once_after_the_answers_before_it(helper: HelperProcess[Answer], end: str, how: str) -> None:
    ask(helper, "first")
    assert answers(helper, 1) == [["first", 0]]
    before, process = num_descriptors(), process_of_test()
    if end == "kill":
        process.send_signal(signal.SIGSTOP)
        ask(helper, "never read", bytes(1 << 20))
        helper.interrupt()
    else:
        ask(helper, "second")
        ask(helper, end)
        if end == "end":
            wait_until(lambda: process.status() == psutil.STATUS_ZOMBIE)
        assert answers(helper, 1) == [["second", 0]]
    with pytest.raises(HelperLost, match=how) as caught:
        answers(helper, 1)
    assert caught.value.num_answers == (1 if end == "kill" else 2)
    assert helper.receive() == [] and not helper.is_alive and num_descriptors() < before
    ask(helper, "third")
    assert answers(helper, 1) == [["third", 0]], "another process answers it"


def test_a_stopped_process_is_gone_with_what_it_was_asked(helper: HelperProcess[Answer]) -> None:
    before = num_descriptors()
    ask(helper, "first", bytes(1 << 20))
    process = process_of_test()
    helper.stop()
    assert not process.is_running() and num_descriptors() == before
    ask(helper, "second")
    assert answers(helper, 1) == [["second", 0]]


def test_a_process_that_cannot_be_started_leaves_nothing_open(helper: HelperProcess[Answer]) -> None:
    before = num_descriptors()
    for num_left in range(7):
        with few_descriptors(num_left), pytest.raises(HelperUnavailable, match=r"could not be started: .* \(ulimit -n"):
            helper.start()
        assert num_descriptors() <= before and not helper.is_alive


def test_the_kernel_ends_a_helper_before_any_other_process(helper: HelperProcess[Answer]) -> None:
    ask(helper, "first")
    answers(helper, 1)
    pid = process_of_test().pid
    with open(f"/proc/{pid}/oom_score_adj") as file:
        assert file.read() == "1000\n"
    assert os.getpriority(os.PRIO_PROCESS, pid) > os.getpriority(os.PRIO_PROCESS, 0)
