"""A helper has so much time and memory as its questions may take, in a thread as in an event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import TypeAlias

import psutil
import pytest

from tokenloom.frontend.server.helpers.helper import MAX_WAITS, Helper, HelperOverdue, may_go_on
from tokenloom.ipc.codec import encode
from tokenloom.ipc.helper_process import HelperLost
from tokenloom.tests.ipc.echo_helper import MODULE
from tokenloom.tests.support.engine_specs import new_spec
from tokenloom.tests.support.waiting import WAIT_S

Answer: TypeAlias = list[str | int]


def new_helper(idle_bytes: int = 1 << 40) -> Helper[Answer]:
    return Helper(MODULE, new_spec(), Answer, start_s=10 * WAIT_S, idle_bytes=idle_bytes)


@pytest.fixture
def helper() -> Iterator[Helper[Answer]]:
    helper = new_helper()
    yield helper
    helper.stop()


def ask(helper: Helper[Answer], question: str = "a", content: bytes = b"", item_s: float = 10 * WAIT_S) -> Answer:
    return helper.wait_for(helper.ask(encode(question), [content], item_s=item_s))


def pids() -> list[int]:
    return [each.pid for each in psutil.Process().children() if "echo" in " ".join(each.cmdline())]


def test_one_process_answers_a_thread_and_an_event_loop(helper: Helper[Answer]) -> None:
    assert ask(helper, content=bytes(9)) == ["a", 9]
    before = pids()
    assert asyncio.run(helper.wait_in_loop(helper.ask(encode("b"), item_s=10 * WAIT_S))) == ["b", 0]
    assert len(before) == 1 and pids() == before


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
    begun = time.monotonic()
    with pytest.raises(HelperOverdue):
        ask(helper, "hang", item_s=1.0)
    assert time.monotonic() - begun < MAX_WAITS - 1 and pids() == []


def test_a_process_that_has_grown_ends_after_its_answer() -> None:
    helper = new_helper(idle_bytes=1 << 20)
    assert ask(helper) == ["a", 0] and pids() == []
    assert ask(helper) == ["a", 0] and pids() == []


def test_a_caller_that_is_cancelled_ends_the_process(helper: Helper[Answer]) -> None:
    ask(helper)

    async def cancel() -> None:
        task = asyncio.create_task(helper.wait_in_loop(helper.ask(encode("compute"), [bytes(60_000)], item_s=60.0)))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])

    asyncio.run(cancel())
    assert pids() == []


def test_a_question_that_ends_the_process_leaves_none(helper: Helper[Answer]) -> None:
    with pytest.raises(HelperLost, match="exited with code 3"):
        ask(helper, "end")
    assert pids() == [] and ask(helper) == ["a", 0]
