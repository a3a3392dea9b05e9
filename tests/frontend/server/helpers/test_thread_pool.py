"""Long work leaves the loop free; cancelled jobs are dropped, and jobs that wait too long refused."""

from __future__ import annotations

import errno
import gc
import math
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence

import pytest

from tokenloom.frontend.checkpoint.resolve import DEMO_FOLDER
from tokenloom.frontend.server.helpers.thread_pool import THREAD_BYTES, ThreadPool
from tokenloom.frontend.server.text.tokenizer import Tokenizer
from tokenloom.ipc.errors import InternalError, Overloaded, RequestError
from tokenloom.ipc.messages.intake import IntakeAnswer, IntakeQuestion, PromptRead, ReadPrompt
from tokenloom.tests.support.shortages import few_threads

DEADLINE_S = 20.0
QUESTION = ReadPrompt(prompt="x")


class FakeHost:
    """Answers when `may_answer` is set, or fails when interrupted."""

    def __init__(self) -> None:
        self.is_asked, self.may_answer = threading.Event(), threading.Event()
        self.was_interrupted = self.was_stopped = False

    def ask(self, question: IntakeQuestion, body: Sequence[bytes] = ()) -> IntakeAnswer:
        self.is_asked.set()
        assert self.may_answer.wait(DEADLINE_S)
        if self.was_interrupted:
            raise RequestError("interrupted")
        return PromptRead(token_ids=b"".join(body))

    def interrupt(self) -> None:
        self.was_interrupted = True
        self.may_answer.set()

    def stop(self) -> None:
        self.was_stopped = True


class Bench:
    """Holds a ThreadPool with a fake clock, one host for all threads, and the test as its loop."""

    def __init__(self) -> None:
        self.now = 100.0
        self.host = FakeHost()
        self.outcomes: list[object] = []
        self._is_awake = threading.Event()
        self.thread_pool = ThreadPool(self._is_awake.set, lambda: self.host, lambda: self.now)

    def occupy(self) -> Callable[[], None]:
        """Occupy each thread with a job; returns the function that ends them."""
        end, begun = threading.Event(), threading.Semaphore(0)

        def work() -> None:
            begun.release()
            assert end.wait(DEADLINE_S)

        for _ in THREAD_BYTES:
            self.thread_pool.run(work, self.outcomes.append)
        assert all(begun.acquire(timeout=DEADLINE_S) for _ in THREAD_BYTES)
        return end.set

    def wait(self, num_outcomes: int) -> list[object]:
        while len(self.outcomes) < num_outcomes:
            assert self._is_awake.wait(DEADLINE_S)
            self._is_awake.clear()
            for complete in self.thread_pool.take():
                complete()
        return self.outcomes


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.thread_pool.close()


def test_the_result_of_work_returns_to_the_loop(bench: Bench) -> None:
    bench.thread_pool.run(lambda: 1, bench.outcomes.append)
    assert bench.outcomes == [] and bench.wait(1) == [1]


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
        bench.thread_pool.run(fail, bench.outcomes.append)
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
        bench.thread_pool.run(fail, bench.outcomes.append)
        bench.wait(1)
        assert [text() for text in texts] == [None]
    finally:
        gc.enable()


def test_cancel_interrupts_the_question_of_the_job_only(bench: Bench) -> None:
    ask = bench.thread_pool.ask
    job = ask(QUESTION, [b"1234"], lambda answer: answer, bench.outcomes.append, num_bytes=4)
    assert bench.host.is_asked.wait(DEADLINE_S)
    bench.thread_pool.cancel(job)
    assert bench.host.was_interrupted
    bench.wait(1)
    bench.host.was_interrupted = False
    bench.thread_pool.cancel(job)
    assert not bench.host.was_interrupted
    ask(QUESTION, [b"12", b"34"], lambda answer: answer, bench.outcomes.append, num_bytes=4)
    assert bench.wait(2)[1] == PromptRead(token_ids=b"1234")


def test_close_drops_waiting_jobs_and_stops_the_intake_processes(bench: Bench) -> None:
    bench.thread_pool.ask(QUESTION, [], lambda answer: answer, bench.outcomes.append, num_bytes=4)
    assert bench.host.is_asked.wait(DEADLINE_S)
    bench.thread_pool.close()
    assert bench.host.was_interrupted


def test_tokenizing_a_long_text_releases_the_gil() -> None:
    tokenizer = Tokenizer.load(DEMO_FOLDER)
    assert tokenizer is not None
    text, has_begun, has_ended = "a word " * 100_000, threading.Event(), threading.Event()

    def encode() -> None:
        has_begun.set()
        tokenizer.encode(text)
        has_ended.set()

    thread = threading.Thread(target=encode)
    thread.start()
    assert has_begun.wait(DEADLINE_S)
    num_turns = 0
    while not has_ended.wait(0.001):
        num_turns += 1
    thread.join()
    assert num_turns > 20


def test_without_a_thread_a_job_is_refused_and_one_thread_takes_jobs_of_each_size(bench: Bench) -> None:
    with few_threads():
        for number in range(2):
            assert bench.thread_pool.run(lambda: 1, bench.outcomes.append, num_bytes=9) is None
            refusal = bench.outcomes[number]
            assert isinstance(refusal, Overloaded) and "can't start new thread" in str(refusal)
        assert bench.thread_pool.next_expiry == math.inf, "no job waits"
    with few_threads(1):
        for size in (1, *THREAD_BYTES[:-1], THREAD_BYTES[-2] + 1):
            bench.thread_pool.run(lambda: 1, bench.outcomes.append, num_bytes=size)
        assert bench.wait(len(THREAD_BYTES) + 3)[2:] == [1] * (len(THREAD_BYTES) + 1)
    bench.occupy()()  # every thread runs
