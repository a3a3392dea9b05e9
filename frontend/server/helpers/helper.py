"""Helper: one helper process of the frontend, which answers one question at a time within its limits.

Blocks, so it is used in threads (`pool.py`). Knows neither questions nor callers.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
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
    answer if it has grown. One thread at a time calls `ask` and `stop`; any may call `interrupt`."""

    def __init__(self, module: str, spec: EngineSpec, answer_type: object, *, start_s: float, idle_bytes: int) -> None:
        """`start_s`: longest start. `idle_bytes`: limit of the process's memory between two questions."""
        self._process: HelperProcess[A] = HelperProcess(module, spec, answer_type)
        self._start_s = start_s
        self._idle_bytes = idle_bytes
        self.is_interrupted = False  # since the last `stop`
        self.num_lost = 0  # questions that failed by the process, as those who ask count them for the log

    def ask(self, question: bytes, content: Sequence[bytes] = (), *, item_s: float) -> A:
        """Send an encoded question and the bytes that belong to it; block until there is an answer, and return it. On a
        busy machine a process that computes has `item_s` as CPU time.

        Raises HelperUnavailable if no process starts, HelperLost if the process ends or `interrupt` has been called,
        and HelperOverdue if the process hangs or takes too long. There is no process after an error.
        """
        if not self._process.is_alive:  # it was killed while idle
            self._process.stop()
        try:
            self._start()
            self._process.send([question], content)
            answer = self._answer(item_s)
        except BaseException:
            self._process.stop()
            raise
        if self._process.resident_bytes > self._idle_bytes:
            self._process.stop()
        return answer

    def interrupt(self) -> None:
        """Kill the process, so that the current question fails, and each one until `stop`."""
        self.is_interrupted = True
        self._process.interrupt()

    def stop(self) -> None:
        """Kill the process; the next question starts another one."""
        self._process.stop()
        self.is_interrupted = False

    def _start(self) -> None:
        deadline = time.monotonic() + self._start_s
        self._process.start()
        if self.is_interrupted:  # before there was a process to kill
            raise HelperLost("was interrupted", num_answers=0)
        while not self._process.is_ready:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise HelperUnavailable(f"did not start within {self._start_s:g} s at its start: see its log")
            self._process.wait(left_s)
            try:
                self._process.receive()
            except HelperLost as loss:
                if self.is_interrupted:
                    raise
                raise HelperUnavailable(f"{loss} at its start: see its log") from None

    def _answer(self, item_s: float) -> A:
        begun_s = self._process.cpu_s
        for num_waits in range(1, MAX_WAITS + 1):
            deadline = time.monotonic() + item_s
            while (left_s := deadline - time.monotonic()) > 0:
                self._process.wait(left_s)
                for answer in self._process.receive():
                    return answer
            if not may_go_on(self._process.cpu_s - begun_s, num_waits, item_s):
                break
        raise HelperOverdue(f"took longer than {item_s:g} s", num_answers=0)


def may_go_on(cpu_s: float, num_waits: int, item_s: float) -> bool:
    """Return whether a process that has not answered for `num_waits` times `item_s` still computes, within its time."""
    return num_waits * BUSY_SHARE * item_s < cpu_s < item_s
