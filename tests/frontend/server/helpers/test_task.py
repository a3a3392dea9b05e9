"""A coroutine goes on inside the callback of its job, and gives up what it holds when it is closed, also by a handler
that is cancelled."""

from __future__ import annotations

import asyncio
import gc

import pytest

from tokenloom.frontend.server.helpers.task import Reply, Task, Then, in_event_loop, reply_of, run
from tokenloom.ipc.errors import RequestError


class Jobs:
    """Two jobs for a coroutine, which end when the test calls back; `known` are the outcomes that come at once."""

    def __init__(self, *known: int | RequestError) -> None:
        self.known = [*known]
        self.thens: list[Then[int]] = []
        self.cancelled: list[int] = []
        self.found: list[object] = []

    def start(self, then: Then[int]) -> int:
        self.thens.append(then)
        if self.known:
            then(self.known.pop(0))
        return len(self.thens)

    async def work(self) -> None:
        try:
            for _ in range(2):
                self.found.append(await reply_of(self.start, self.cancelled.append))
        except RequestError as error:
            self.found.append(str(error))


def waiting(jobs: Jobs) -> Task:
    task = run(jobs.work())
    assert task is not None
    return task


def test_a_coroutine_that_never_waits_is_over_at_once() -> None:
    jobs = Jobs(1, 2)
    assert run(jobs.work()) is None
    assert jobs.found == [1, 2]


def test_a_coroutine_goes_on_inside_the_callback_and_takes_the_first_outcome_alone() -> None:
    jobs = Jobs()
    waiting(jobs)
    for number in (1, 2):
        jobs.thens[-1](number)
        jobs.thens[0](9)
        assert jobs.found == [1, 2][:number]
    assert len(jobs.thens) == 2


def test_an_error_is_raised_where_its_job_is_awaited() -> None:
    jobs = Jobs(1)
    waiting(jobs)
    jobs.thens[-1](RequestError("no"))
    assert jobs.found == [1, "no"]


def test_closing_cancels_the_job_and_what_it_brings_later_is_ignored() -> None:
    jobs = Jobs(1)
    task = waiting(jobs)
    assert jobs.cancelled == [1], "harmless, since it has ended"
    task.close()
    assert jobs.cancelled == [1, 2]
    task.close()
    jobs.thens[-1](2)
    assert (jobs.found, jobs.cancelled, len(jobs.thens)) == ([1], [1, 2], 2)


def test_a_coroutine_that_closes_its_own_task_goes_on_to_its_end() -> None:
    tasks: list[Task | None] = []
    jobs = Jobs()

    async def work() -> None:
        jobs.found.append(await reply_of(jobs.start, jobs.cancelled.append))
        assert tasks[0] is not None
        tasks[0].close()
        jobs.found.append("end")

    tasks.append(run(work()))
    jobs.thens[0](1)
    assert jobs.found == [1, "end"]


def test_neither_an_error_nor_a_closed_coroutine_leaves_a_cycle_of_objects() -> None:
    gc.disable()
    gc.freeze()
    try:
        for known in ((), (1,), (RequestError("no"),)):
            for ends_by_error in (False, True):
                jobs = Jobs(*known)
                task = run(jobs.work())
                if task is not None and ends_by_error:
                    jobs.thens[-1](RequestError("no"))
                elif task is not None:
                    task.close()
                del jobs, task
        assert gc.collect() == 0
    finally:
        gc.unfreeze()
        gc.enable()


@pytest.mark.parametrize("comes_meanwhile", [False, True])
def test_a_cancelled_handler_closes_the_coroutine_that_it_awaits(comes_meanwhile: bool) -> None:
    reply: Reply[int] = Reply()
    ends: list[str] = []

    async def work() -> int:
        try:
            return await reply
        finally:
            ends.append("closed")

    async def cancelled() -> None:
        handler = asyncio.ensure_future(in_event_loop(work()))
        await asyncio.sleep(0)
        handler.cancel()
        if comes_meanwhile:
            reply.bring(1)
        with pytest.raises(asyncio.CancelledError):
            await handler
        assert ends == ["closed"]
        reply.bring(2)

    asyncio.run(cancelled())
