"""Long work leaves the loop free; cancelled jobs are dropped, and jobs that wait too long refused."""

from __future__ import annotations

import errno
import gc
import math
import threading
import weakref
from collections.abc import Callable, Iterator

import pytest

from tokenloom.frontend.checkpoint.resolve import DEMO_FOLDER
from tokenloom.frontend.server.helpers.pool import THREAD_BYTES, HelperPool, PoolJob
from tokenloom.frontend.server.text.tokenizer import Tokenizer
from tokenloom.ipc.errors import InternalError, Overloaded, RequestError
from tokenloom.tests.support.shortages import few_threads
from tokenloom.tests.support.waiting import wait_until

DEADLINE_S = 20.0


class FakeHelper:
    """Answers when `may_answer` is set, or fails when interrupted."""

    def __init__(self) -> None:
        self.may_answer = threading.Event()
        self.is_interrupted = False
        self.num_stops = 0

    def ask(self) -> int:
        assert self.may_answer.wait(DEADLINE_S)
        if self.is_interrupted:
            raise RequestError("interrupted")
        return 4

    def interrupt(self) -> None:
        self.is_interrupted = True
        self.may_answer.set()

    def stop(self) -> None:
        self.is_interrupted = False
        self.num_stops += 1


class Bench:
    """Holds a HelperPool with a clock that stands still and fake helpers, and the test as its loop."""

    def __init__(self) -> None:
        self.helpers: list[FakeHelper] = []
        self.outcomes: list[object] = []
        self._is_awake = threading.Event()
        self.pool = HelperPool(self._is_awake.set, self.new_helper, monotonic=lambda: 100.0)

    def new_helper(self) -> FakeHelper:
        self.helpers.append(FakeHelper())
        return self.helpers[-1]

    def ask(self) -> PoolJob[FakeHelper] | None:
        job = self.pool.run(FakeHelper.ask, self.outcomes.append)
        wait_until(lambda: job in self.pool._running)
        return job

    def run(self, work: Callable[[], object] = int, num_bytes: int = 0) -> object:
        return self.pool.run(lambda _: work(), self.outcomes.append, num_bytes=num_bytes)

    def occupy(self) -> Callable[[], None]:
        """Occupy each thread with a job; returns the function that ends them."""
        end, begun = threading.Event(), threading.Semaphore(0)

        def work() -> None:
            begun.release()
            assert end.wait(DEADLINE_S)

        for _ in THREAD_BYTES:
            self.run(work)
        assert all(begun.acquire(timeout=DEADLINE_S) for _ in THREAD_BYTES)
        return end.set

    def wait(self, num_outcomes: int) -> list[object]:
        while len(self.outcomes) < num_outcomes:
            assert self._is_awake.wait(DEADLINE_S)
            self._is_awake.clear()
            for complete in self.pool.take():
                complete()
        return self.outcomes


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.pool.close()


def test_the_result_of_work_returns_to_the_loop(bench: Bench) -> None:
    bench.run()
    assert bench.outcomes == [] and bench.wait(1) == [0]


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (RequestError("no"), RequestError, "no"),
        (KeyError("odd"), InternalError, "odd"),
        (OSError(errno.EMFILE, "Too many open files"), Overloaded, "ulimit -n"),
    ],
)
def test_an_error_is_returned_as_outcome_and_the_thread_goes_on(
    bench: Bench, error: Exception, kind: type[Exception], words: str
) -> None:
    def fail() -> None:
        raise error

    for number in range(2 * len(THREAD_BYTES)):
        bench.run(fail)
        found = bench.wait(number + 1)[number]
        assert isinstance(found, kind) and words in str(found)


def test_an_error_that_is_returned_keeps_nothing_of_its_work(bench: Bench) -> None:
    class Text:
        pass

    def fail() -> None:
        text = Text()
        texts.append(weakref.ref(text))
        raise RequestError("no")

    texts: list[weakref.ref[Text]] = []
    gc.disable()
    try:
        bench.run(fail)
        bench.wait(1)
        assert [text() for text in texts] == [None]
    finally:
        gc.enable()


def test_cancel_interrupts_the_question_of_the_job_only(bench: Bench) -> None:
    job = bench.ask()
    (helper,) = bench.helpers
    bench.pool.cancel(job)
    assert isinstance(bench.wait(1)[0], RequestError)
    bench.pool.cancel(job)
    assert helper.num_stops == 1 and not helper.is_interrupted, "it serves the next job"
    bench.pool.run(FakeHelper.ask, bench.outcomes.append)
    assert bench.wait(2)[1] == 4 and bench.helpers == [helper]


def test_there_are_no_more_helpers_than_jobs_at_once_and_close_stops_them(bench: Bench) -> None:
    for number in range(8):
        bench.run()
        bench.wait(number + 1)
    assert len(bench.helpers) == 1
    bench.ask()
    bench.ask()
    bench.pool.close(wait_s=DEADLINE_S)
    assert len(bench.helpers) == 2 and all(helper.num_stops for helper in bench.helpers)


def test_tokenizing_a_long_text_releases_the_gil() -> None:
    tokenizer = Tokenizer.load(DEMO_FOLDER)
    assert tokenizer is not None
    thread = threading.Thread(target=tokenizer.encode, args=("a word " * 100_000,))
    thread.start()
    num_turns = 0
    while thread.is_alive():
        thread.join(0.001)
        num_turns += 1
    assert num_turns > 20


def test_without_a_thread_a_job_is_refused_and_one_thread_takes_jobs_of_each_size(bench: Bench) -> None:
    with few_threads():
        for number in range(2):
            assert bench.run(num_bytes=9) is None
            refusal = bench.outcomes[number]
            assert isinstance(refusal, Overloaded) and "can't start new thread" in str(refusal)
        assert bench.pool.next_expiry == math.inf, "no job waits"
    with few_threads(1):
        for size in (1, *THREAD_BYTES[:-1], THREAD_BYTES[-2] + 1):
            bench.run(num_bytes=size)
        assert bench.wait(len(THREAD_BYTES) + 3)[2:] == [0] * (len(THREAD_BYTES) + 1)
    bench.occupy()()  # every thread runs
