"""Helper: one helper process of the frontend, which answers one question at a time within its limits.

`ask` is a generator, so that the same rules hold in a thread (`wait_for`) and in an event loop (`wait_in_loop`): it
yields the longest time to wait until the process's descriptor is readable, and returns the answer. Knows neither
questions nor callers.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Generator, Sequence
from typing import Generic, TypeVar

from ....ipc.helper_process import HelperLost, HelperProcess, HelperUnavailable
from ....ipc.spec.config.engine_spec import EngineSpec

A = TypeVar("A")

MAX_WAITS = 6  # for an answer, each of the time that it may take, as long as the process computes
BUSY_SHARE = 0.02  # of a wait; a process that computes less hangs


class HelperOverdue(HelperLost):
    """The process took too long, and is gone."""


class Helper(Generic[A]):
    """Owner of one process, which the first question starts. It is killed if an answer takes too long, and after an
    answer if it has grown. One thread calls `ask`; any may call `interrupt`."""

    def __init__(self, module: str, spec: EngineSpec, answer_type: object, *, start_s: float, idle_bytes: int) -> None:
        """`start_s`: longest start. `idle_bytes`: limit of the process's memory between two questions."""
        self._process: HelperProcess[A] = HelperProcess(module, spec, answer_type)
        self._start_s, self._idle_bytes = start_s, idle_bytes
        self.is_interrupted = False  # the last question, or the process since then

    def ask(self, question: bytes, content: Sequence[bytes] = (), *, item_s: float) -> Generator[float, None, A]:
        """Send an encoded question and the bytes that belong to it; return the answer. On a busy machine a process that
        computes has `item_s` as CPU time.

        Raises HelperUnavailable if no process starts, HelperLost if the process ends, and HelperOverdue if it hangs or
        takes too long. There is no process after an error, or once the generator is closed.
        """
        if self.is_interrupted or not self._process.is_alive:
            self._process.stop()  # it was interrupted, or killed while idle
        self.is_interrupted = False
        try:
            yield from self._started()
            self._process.send([question], content)
            answer = yield from self._answer(item_s)
        except BaseException:
            self._process.stop()
            raise
        if self._process.resident_bytes > self._idle_bytes:
            self._process.stop()
        return answer

    def interrupt(self) -> None:
        """Kill the process, so that the current question fails."""
        self.is_interrupted = True
        self._process.interrupt()

    def stop(self) -> None:
        """Kill the process; the next question starts another one."""
        self._process.stop()

    def wait_for(self, asked: Generator[float, None, A]) -> A:
        """Block until a question of `ask` is answered, and return the answer."""
        while True:
            try:
                timeout_s = next(asked)
            except StopIteration as end:
                answer: A = end.value
                return answer
            self._process.wait(timeout_s)

    async def wait_in_loop(self, asked: Generator[float, None, A]) -> A:
        """Return the answer to a question of `ask` once it is there; end the process if the caller is cancelled."""
        try:
            while True:
                try:
                    timeout_s = next(asked)
                except StopIteration as end:
                    answer: A = end.value
                    return answer
                (fd,) = self._process.wakers
                await _readable(fd, timeout_s)
        finally:
            asked.close()

    def _started(self) -> Generator[float, None, None]:
        process, deadline = self._process, time.monotonic() + self._start_s
        process.start()
        while not process.is_ready:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise HelperUnavailable(f"did not start within {self._start_s:g} s at its start: see its log")
            yield left_s
            try:
                process.receive()
            except HelperLost as loss:
                if self.is_interrupted:
                    raise
                raise HelperUnavailable(f"{loss} at its start: see its log") from None

    def _answer(self, item_s: float) -> Generator[float, None, A]:
        begun_s = self._process.cpu_s
        for num_waits in range(1, MAX_WAITS + 1):
            deadline = time.monotonic() + item_s
            while (left_s := deadline - time.monotonic()) > 0:
                yield left_s
                for answer in self._process.receive():
                    return answer
            if not may_go_on(self._process.cpu_s - begun_s, num_waits, item_s):
                break
        raise HelperOverdue(f"took longer than {item_s:g} s", num_answers=0)


def may_go_on(cpu_s: float, num_waits: int, item_s: float) -> bool:
    """Return whether a process that has not answered for `num_waits` times `item_s` still computes, within its time."""
    return num_waits * BUSY_SHARE * item_s < cpu_s < item_s


async def _readable(fd: int, timeout_s: float) -> None:
    """Wait until a descriptor is readable, but at most `timeout_s`."""
    loop, event = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(fd, event.set)
    try:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await event.wait()
    finally:
        loop.remove_reader(fd)
