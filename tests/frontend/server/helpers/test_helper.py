"""A helper has so much time and memory as its questions may take."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

import psutil
import pytest

from tokenloom.frontend.server.helpers.helper import MAX_WAITS, Helper, HelperOverdue, may_go_on
from tokenloom.ipc.codec import encode
from tokenloom.ipc.helper_process import HelperLost
from tokenloom.tests.ipc.echo_helper import MODULE
from tokenloom.tests.support.engine_specs import new_spec
from tokenloom.tests.support.waiting import WAIT_S, Deadline

Answer: TypeAlias = list[str | int]


@pytest.fixture
def helper() -> Iterator[Helper[Answer]]:
    helper: Helper[Answer] = Helper(MODULE, new_spec(), Answer, start_s=60.0, idle_bytes=1 << 40)
    yield helper
    helper.stop()


def ask(helper: Helper[Answer], question: str = "a", content: bytes = b"", item_s: float = 10 * WAIT_S) -> Answer:
    return helper.ask(encode(question), [content], item_s=item_s)


def pids() -> list[int]:
    return [each.pid for each in psutil.Process().children() if "echo" in " ".join(each.cmdline())]


def test_a_process_that_computes_has_its_time_as_cpu_time(helper: Helper[Answer]) -> None:
    ask(helper)
    assert may_go_on(1.0, 1, 10.0) and may_go_on(9.9, 5, 10.0)
    assert not may_go_on(0.0, 1, 10.0), "it hangs"
    assert not may_go_on(0.3, 3, 10.0), "it hangs after a while"
    assert not may_go_on(10.0, 1, 10.0), "it takes too long"
    with pytest.raises(HelperOverdue, match=r"took longer than 0\.2 s"):
        ask(helper, "compute", bytes(60_000), item_s=0.2)
    assert pids() == []


def test_a_process_that_hangs_has_its_time_once(helper: Helper[Answer]) -> None:
    ask(helper)
    limit = Deadline(MAX_WAITS - 1.0)
    with pytest.raises(HelperOverdue):
        ask(helper, "hang", item_s=1.0)
    assert not limit.has_passed() and pids() == []


def test_a_process_that_has_grown_ends_after_its_answer(helper: Helper[Answer]) -> None:
    helper._idle_bytes = 1 << 20
    for _ in range(2):
        assert ask(helper) == ["a", 0] and pids() == []


def test_an_interruption_fails_the_question_even_if_it_comes_before_the_process(helper: Helper[Answer]) -> None:
    """A job may be cancelled between its begin and its question."""
    helper.interrupt()
    with pytest.raises(HelperLost, match="was interrupted"):
        ask(helper, "hang")
    assert pids() == []
    helper.stop()
    assert ask(helper) == ["a", 0]


def test_a_question_that_ends_the_process_leaves_none(helper: Helper[Answer]) -> None:
    with pytest.raises(HelperLost, match="exited with code 3"):
        ask(helper, "end")
    assert pids() == [] and ask(helper) == ["a", 0]
