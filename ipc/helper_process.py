"""HelperProcess: a process that its owner starts when it is needed, sends messages to and may kill at any moment.

    no process → `start` → starting → its first frame, which is empty: ready → its end or `stop` → no process

`send` never waits. `receive` waits at most END_S, for the end of a process that has closed its socket. The owner waits
until one of `wakers` is readable, or in `wait`. The process has a socket to its owner, as descriptor --fd, and ends
when the socket closes (helper_work.py). Knows no message.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
from collections import deque
from collections.abc import Sequence
from typing import Generic, TypeVar

from .child import spawn_child, spawn_failure
from .codec import Decoder
from .errors import ProtocolError
from .process.frames import PIECE_BYTES, length_of, take_frames
from .spec.config.engine_spec import EngineSpec

A = TypeVar("A")

END_S = 1.0  # longest wait for the end of a process that has closed its socket


class HelperUnavailable(Exception):
    """No process can be started now; the text says why."""


class HelperLost(Exception):
    """The process has ended; the text says how."""

    def __init__(self, how: str, num_answers: int) -> None:
        super().__init__(how)
        self.num_answers = num_answers  # answers of the process before its end


class _Running:
    """One process with the socket to it, and the bytes on their way."""

    def __init__(self, process: subprocess.Popen[bytes], channel: socket.socket, poller: select.epoll) -> None:
        self.process = process
        self.channel = channel
        self.poller = poller
        self.unsent: deque[memoryview] = deque()
        self.received = bytearray()
        self.events = select.EPOLLIN  # for which the poller waits
        self.is_ready = False
        self.num_answers = 0


class HelperProcess(Generic[A]):
    """Owner of at most one process, and of the socket to it. One thread calls all methods; any may call `interrupt`."""

    def __init__(self, module: str, spec: EngineSpec, answer_type: object, options: Sequence[str] = ()) -> None:
        """`module` is run with `options`, beside --fd."""
        self._module = module
        self._options = options
        self._spec = spec
        self._decoder: Decoder[A] = Decoder(answer_type)
        self._running: _Running | None = None

    @property
    def wakers(self) -> list[int]:
        """Return the descriptors, one or none, that are readable when `receive` has something to do."""
        if self._running is None:
            return []
        return [self._running.poller.fileno()]

    @property
    def has_process(self) -> bool:
        """Return whether there is a process, as far as `receive` knows."""
        return self._running is not None

    @property
    def is_ready(self) -> bool:
        """Return whether the process has started, as far as `receive` knows."""
        return self._running is not None and self._running.is_ready

    @property
    def is_alive(self) -> bool:
        return self._running is not None and self._running.process.poll() is None

    @property
    def cpu_s(self) -> float:
        """Return the CPU time that the process has taken; 0 without a process."""
        fields = self._read("stat").rpartition(b")")[2].split()
        return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")  # of its own code, and of the kernel for it

    @property
    def resident_bytes(self) -> int:
        """Return the memory that the process holds; 0 without a process."""
        return sum(map(int, self._read("statm").split()[1:2])) * os.sysconf("SC_PAGE_SIZE")

    def start(self) -> None:
        """Start the process, unless there is one. Raises HelperUnavailable, with nothing left open."""
        if self._running is not None:
            return
        with contextlib.ExitStack() as stack:
            try:
                ours, theirs = socket.socketpair()
                stack.callback(ours.close)
                with theirs:
                    poller = select.epoll()
                    stack.callback(poller.close)
                    fd = theirs.fileno()
                    arguments = ["--fd", str(fd), *self._options]
                    process = spawn_child(self._module, arguments, self._spec.environment(), [fd])
            except OSError as error:
                raise HelperUnavailable(f"could not be started: {spawn_failure(error)}") from None
            stack.pop_all()
        ours.setblocking(False)
        poller.register(ours, select.EPOLLIN)
        self._running = _Running(process, ours, poller)

    def send(self, *frames: Sequence[bytes]) -> None:
        """Send frames, each given as its parts, to the process. A lost process is reported by `receive`."""
        running = self._running
        assert running is not None, "start comes first"
        for parts in frames:
            running.unsent.extend(memoryview(part) for part in (length_of(parts), *parts) if part)
        _send_rest(running)

    def receive(self) -> list[A]:
        """Return the answers that are there. Raises HelperLost, once, if the process has ended without any, or sends
        other messages."""
        running = self._running
        if running is None:
            return []
        _send_rest(running)
        has_ended = _receive_bytes(running)
        frames = list(take_frames(running.received))
        if frames and not running.is_ready:
            running.is_ready = True
            frames.pop(0)
        if has_ended and not frames:
            lost = HelperLost(_describe_end(running.process), running.num_answers)
            self.stop()
            raise lost
        running.num_answers += len(frames)
        try:
            return [self._decoder.decode(frame) for frame in frames]
        except ProtocolError as error:
            self.stop()
            raise HelperLost(f"sent a {error}", running.num_answers) from None

    def wait(self, timeout_s: float) -> None:
        """Block until `receive` has something to do, but at most `timeout_s`; not at all without a process."""
        if self._running is not None:
            self._running.poller.poll(timeout_s)

    def interrupt(self) -> None:
        """Kill the process, which `receive` reports as lost."""
        running = self._running
        if running is not None:
            running.process.kill()

    def stop(self) -> None:
        """Kill the process and forget its messages."""
        running = self._running
        self._running = None
        if running is not None:
            running.poller.close()
            running.channel.close()
            running.process.kill()
            running.process.communicate()  # closes the lifeline, and waits

    def _read(self, name: str) -> bytes:
        """Return the content of a file of /proc about the process; nothing without a process."""
        if self._running is not None:
            with contextlib.suppress(OSError), open(f"/proc/{self._running.process.pid}/{name}", "rb") as file:
                return file.read()
        return b""


def _send_rest(running: _Running) -> None:
    """Send as many of the unsent bytes as the socket takes, and wake the owner when it takes more."""
    events = select.EPOLLIN
    try:
        while running.unsent:
            view = running.unsent[0]
            running.unsent[0] = view[running.channel.send(view[:PIECE_BYTES]) :]
            if not running.unsent[0]:
                running.unsent.popleft()
    except BlockingIOError:
        events |= select.EPOLLOUT
    except ConnectionError:  # `receive` reports it
        running.unsent.clear()
    if events != running.events:
        running.poller.modify(running.channel, events)
        running.events = events


def _receive_bytes(running: _Running) -> bool:
    """Receive all bytes that are there; return whether the process has closed its socket."""
    try:
        while piece := running.channel.recv(PIECE_BYTES):
            running.received += piece
    except BlockingIOError:
        return False
    except ConnectionError:
        pass
    return True


def _describe_end(process: subprocess.Popen[bytes]) -> str:
    """Return a description of how a process that has closed its socket ended."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(END_S)
    code = process.poll()
    if code is None:
        return "closed its socket"
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
