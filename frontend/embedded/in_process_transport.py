"""InProcessTransport: a Transport to an engine inside this process, over the same messages as the socket.

Whoever waits runs the engine in its own thread, turn by turn, so that a debugger or a profiler sees everything. For
an event loop, which must not wait, `in_background` runs it in a daemon thread instead.
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

from ...ipc.errors import InternalError, RequestError, TokenloomError
from ...ipc.messages.client import ClientMessage, FrontendMessage
from ..client.protocol import ClientProtocol
from ..client.transport import Transport, wait_for_end

T = TypeVar("T")

TURN_S = 0.05  # longest wait inside one turn of the engine
_PATIENCE_S = 3600.0  # the engine is here: it cannot be lost, only be slow under a debugger


class Engine(Protocol):
    """An engine in this process: `send` hands it a message, `step` runs one turn and returns what it says."""

    def send(self, message: ClientMessage) -> None: ...

    def step(self, timeout_s: float) -> list[FrontendMessage]: ...

    def close(self) -> None: ...


class InProcessTransport(Transport):
    """Invariant: engine and conversation are touched only by the holder of `_turn_lock`."""

    def __init__(self, engine: Engine, *, in_background: bool = False) -> None:
        super().__init__(ClientProtocol("in-process", engine.send, _PATIENCE_S, _PATIENCE_S))
        self._engine = engine
        self._callbacks: deque[Callable[[], None]] = deque()
        self._turn_lock = threading.Lock()
        self._has_work = threading.Condition()  # guards _is_closed and the end of _commands
        self._is_closed = False
        self._thread: threading.Thread | None = None
        self._protocol.greet(time.monotonic())
        if in_background:
            self._thread = threading.Thread(target=self._run, name="tokenloom engine", daemon=True)
            self._thread.start()

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
                raise RequestError("this engine is closed: make a new one")
            self._commands.append(command)
            self._has_work.notify()

    def _get_or_turn(self, queue: SimpleQueue[T]) -> T:
        """What lies in the queue, if need be after one turn of the engine; raises Empty if there is still nothing."""
        try:
            return queue.get_nowait()
        except Empty:
            if not self._is_closed:
                with _interrupted_afterwards():
                    self._turn()
        return queue.get_nowait()

    def _turn(self) -> None:
        """One turn of the engine. What stops the engine for good ends every request with that error."""
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
        """What callers want to hear, outside the lock: they may use the engine again."""
        while True:
            try:
                callback = self._callbacks.popleft()
            except IndexError:
                return
            callback()

    def _run(self) -> None:
        """The background thread: turns while anything is open, else blocked."""
        while not self._is_closed:
            with self._has_work:
                while not (self._commands or self._protocol.is_busy or self._is_closed):
                    self._has_work.wait()
            with self._turn_lock:
                try:
                    self._turn()
                except Exception as error:  # callers wait elsewhere and must hear of it
                    self._protocol.end(InternalError(f"the engine failed: {type(error).__name__}: {error}"))
            self._run_callbacks()


@contextlib.contextmanager
def _interrupted_afterwards() -> Iterator[None]:
    """Ctrl-C takes effect when the turn is over: in its midst it would leave frontend, core and worker at odds. A
    second one takes effect at once."""
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    came: list[FrameType | None] = []

    def note(number: int, frame: FrameType | None) -> None:
        came.append(frame)
        signal.signal(signal.SIGINT, handler)

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if came:
            handler(signal.SIGINT, came[0])
