"""InProcessTransport: transport to an engine in this process, with the messages of the socket.

A thread in `wait` runs the engine turn by turn, so that a debugger or a profiler sees everything. For an event loop,
which must not wait, `in_background` runs the engine in a daemon thread instead.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from queue import Empty, SimpleQueue
from types import FrameType
from typing import Protocol, TypeVar

from ...ipc.errors import InternalError, Overloaded, RequestError, TokenloomError
from ...ipc.messages.client import ClientMessage, FrontendMessage
from ...ipc.shortages.threads import start_thread
from ..client.protocol import ClientProtocol
from ..client.transport import Transport, wait_for_end

T = TypeVar("T")

TURN_S = 0.05  # longest wait in one turn of the engine
_TIMEOUT_S = 3600.0  # long, since the engine cannot be lost, only be slow under a debugger


class Engine(Protocol):
    """Engine in this process: `send` passes it a message, `step` runs one turn and returns its messages."""

    def send(self, message: ClientMessage) -> None: ...

    def step(self, timeout_s: float) -> list[FrontendMessage]: ...

    def close(self) -> None: ...


class InProcessTransport(Transport):
    """Transport that owns its engine. Invariant: only the holder of `_turn_lock` uses engine and ClientProtocol."""

    def __init__(self, engine: Engine, *, in_background: bool = False) -> None:
        super().__init__(ClientProtocol("in-process", engine.send, _TIMEOUT_S, _TIMEOUT_S))
        self._engine = engine
        self._callbacks: deque[Callable[[], None]] = deque()
        self._turn_lock = threading.Lock()
        self._has_work = threading.Condition()  # guards _is_closed and the end of _commands
        self._is_closed = False
        self._thread: threading.Thread | None = None
        self._protocol.greet(time.monotonic())
        if in_background:
            try:
                self._thread = start_thread("tokenloom engine", self._run)
            except Overloaded:
                engine.close()
                raise

    def wait(self, queue: SimpleQueue[T], timeout_s: float | None = None) -> T:
        if self._thread is not None:
            return queue.get(timeout=timeout_s)
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            with contextlib.suppress(Empty):
                if self._turn_lock.acquire(blocking=False):
                    try:
                        return self._get_or_turn(queue)
                    finally:
                        self._turn_lock.release()
                        self._run_callbacks()
                return queue.get(timeout=TURN_S)  # another thread runs the engine
            if deadline is not None and time.monotonic() >= deadline:
                raise Empty

    def call_later(self, function: Callable[[], None]) -> None:
        self._callbacks.append(function)

    def close(self) -> None:
        with self._has_work:
            if self._is_closed:
                return
            self._is_closed = True
            self._has_work.notify()
        wait_for_end(self._thread)
        with self._turn_lock:
            self._run_commands()
            self._protocol.end(RequestError("the engine was closed while the request was open"))
            self._engine.close()
        self._run_callbacks()

    def _command(self, command: Callable[[], None]) -> None:
        with self._has_work:
            if self._is_closed:
                raise RequestError("this engine is closed: create a new one")
            self._commands.append(command)
            self._has_work.notify()

    def _get_or_turn(self, queue: SimpleQueue[T]) -> T:
        """Return the next item of `queue`; if it is empty, run one turn first. Raises Empty if there is still none."""
        with contextlib.suppress(Empty):
            return queue.get_nowait()
        if not self._is_closed:
            with _delayed_interrupt():
                self._turn()  # outside `suppress`, so that its errors do not get the empty queue as their context
        return queue.get_nowait()

    def _turn(self) -> None:
        """Run one turn of the engine and handle its messages. If it raises a TokenloomError, every request ends with
        it."""
        self._run_commands()
        try:
            messages = self._engine.step(TURN_S)
        except TokenloomError as error:
            self._protocol.end(error)
            return
        now = time.monotonic()
        for message in messages:
            self._protocol.receive(message, now)
        if self._protocol.needs_reconnect:
            self._protocol.greet(now)
        self._protocol.tick(now)

    def _run_callbacks(self) -> None:
        """Run user callbacks outside the lock: they may use the engine again."""
        while True:
            try:
                callback = self._callbacks.popleft()
            except IndexError:
                return
            callback()

    def _run(self) -> None:
        """Run turns while a request or command is open, else block. Target of the background thread."""
        while not self._is_closed:
            with self._has_work:
                while not (self._commands or self._protocol.is_busy or self._is_closed):
                    self._has_work.wait()
            with self._turn_lock:
                try:
                    self._turn()
                except Exception as error:  # callers wait in other threads
                    self._protocol.end(InternalError(f"the engine failed: {type(error).__name__}: {error}"))
            self._run_callbacks()


@contextlib.contextmanager
def _delayed_interrupt() -> Iterator[None]:
    """Delay Ctrl-C to the end of the turn: within it frontend, core and worker would become inconsistent.

    A second Ctrl-C takes effect at once.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    interrupted: list[FrameType | None] = []

    def record(number: int, frame: FrameType | None) -> None:
        interrupted.append(frame)
        signal.signal(signal.SIGINT, handler)

    signal.signal(signal.SIGINT, record)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if interrupted:
            handler(signal.SIGINT, interrupted[0])
