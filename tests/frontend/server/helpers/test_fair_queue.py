"""FairQueue orders jobs fairly between owners, and bounds their number and bytes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenloom.frontend.server.helpers.fair_queue import FairQueue, Job
from tokenloom.ipc.errors import Overloaded

MB = 1 << 20


def new_job(name: str, num_bytes: int = 1, owner: str = "a", expires_at: float = 1e9) -> Job[str]:
    return Job(name, num_bytes, owner, expires_at, lambda error: None)


def filled(*jobs: Job[str], now: float = 0.0) -> FairQueue[str]:
    queue: FairQueue[str] = FairQueue((MB, 100 * MB))
    for job in jobs:
        queue.add(job, now)
    return queue


def drained(queue: FairQueue[str], size_class: int = 1) -> list[str]:
    found = []
    while (job := queue.pop(size_class)) is not None:
        found.append(job.work)
    return found


def test_jobs_of_equal_length_keep_their_order() -> None:
    assert drained(filled(*(new_job(str(i), 5, owner=str(i)) for i in range(9)))) == [str(i) for i in range(9)]


def test_short_jobs_overtake_long_ones_and_owners_with_few_jobs_those_with_many() -> None:
    queue = filled(new_job("long", 8 * MB, "a"), new_job("short", 1, "b"))
    assert drained(queue) == ["short", "long"]
    queue = filled(*(new_job(f"many {i}", MB, "a") for i in range(50)), new_job("one", MB, "b"))
    assert drained(queue)[:3] == ["many 0", "one", "many 1"]


def test_later_jobs_do_not_starve_an_earlier_one() -> None:
    queue = filled(new_job("long", 8 * MB, "a"))
    queue.add(new_job("short", 1, "b"), now=9.0)
    assert drained(queue) == ["long", "short"]


@pytest.mark.parametrize("num_taken", [0, 1, 5])
def test_owners_of_equal_jobs_take_turns_however_fast_they_are_taken(num_taken: int) -> None:
    queue = filled(*(new_job("a") for _ in range(9)))
    for _ in range(num_taken):
        queue.pop(0)
    for name in ("b0", "b1"):
        queue.add(new_job(name, 1, "b"), 0.0)
    order = drained(queue)
    assert order.index("b0") < 2 <= order.index("b1") < 4


def test_owners_are_forgotten_without_a_clock() -> None:
    queue = filled()
    for number in range(1000):
        queue.add(new_job("x", 1, str(number)), 0.0)
        drained(queue)
    assert len(queue._owners) < 100


def test_a_thread_for_short_jobs_takes_no_long_one() -> None:
    queue = filled(new_job("long", 2 * MB, "a"), new_job("short", 10 * 1024, "b"))
    assert drained(queue, size_class=0) == ["short"] and drained(queue) == ["long"]


def test_waiting_bytes_are_bounded_in_all_and_for_each_owner() -> None:
    queue = filled(new_job("1", 5, "a"), new_job("2", 4, "b"))
    queue.max_bytes, queue.max_owner_bytes = 10, 5
    for refused in (new_job("3", 1, "a"), new_job("4", 2, "c")):
        with pytest.raises(Overloaded, match="2 long texts of 9 bytes wait"):
            queue.add(refused, 0.0)
    queue.add(new_job("5", 1, "c"), 0.0)
    assert sorted(drained(queue)) == ["1", "2", "5"]
    queue.add(new_job("6", 5, "a"), 0.0)
    queue.max_jobs = 1
    with pytest.raises(Overloaded):
        queue.add(new_job("7", 1, "d"), 0.0)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 3 * MB), st.booleans()), max_size=200))
def test_every_job_that_is_not_removed_is_popped_once(specs: list[tuple[str, int, bool]]) -> None:
    jobs = [new_job(str(i), num_bytes, owner) for i, (owner, num_bytes, _) in enumerate(specs)]
    queue = filled(*jobs)
    for job, (_, _, is_removed) in zip(jobs, specs, strict=True):
        assert not is_removed or (queue.remove(job) and not queue.remove(job))
    kept = [job.work for job, (_, _, is_removed) in zip(jobs, specs, strict=True) if not is_removed]
    assert len(queue) == len(kept) and sorted(drained(queue)) == sorted(kept) and len(queue) == 0
