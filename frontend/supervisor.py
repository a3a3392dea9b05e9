"""The supervisor: starts frontend, core and workers, watches them, stops them. No request passes through it.

Start: every rank says Measured → the least number of blocks goes to all as Initialize → everyone says Ready. It waits
on one poller for control messages, ends of processes, their stderr and signals; it never wakes otherwise.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import zmq

from ..ipc.addresses import RunDirectory, lock_ipc_address, unlink_ipc_address
from ..ipc.codec import Decoder, encode
from ..ipc.engine_spec import EngineSpec
from ..ipc.errors import EngineDead, ProtocolError, TokenloomError
from ..ipc.messages import (
    PROTOCOL_VERSION,
    ChildHello,
    ChildToSupervisor,
    Drain,
    Drained,
    Failed,
    Initialize,
    Measured,
    Phase,
    Progress,
    Ready,
    ReplaceWorkers,
    Stop,
    SupervisorToChild,
)
from ..ipc.sockets import new_socket
from .child_process import ChildProcess

logger = logging.getLogger("tokenloom.supervisor")

STOP_TIMEOUT_S = 3.0  # from Stop to SIGKILL


@dataclass(frozen=True)
class Child:
    """A process and the identity under which it speaks on the control socket."""

    process: ChildProcess
    identity: bytes


class Supervisor:
    """Owns the children and the control socket. `start`, then `run`, then always `stop`."""

    def __init__(self, spec: EngineSpec, run_directory: RunDirectory, announce: Callable[[str], None]) -> None:
        self.spec = spec
        self.address = spec.client_address
        self._run_directory = run_directory
        self._announce = announce
        self._begun = time.monotonic()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._control = new_socket(self._context, zmq.ROUTER)
        self._control.bind(spec.address("control"))
        self._decoder: Decoder[ChildToSupervisor] = Decoder(ChildToSupervisor)
        self._poller = zmq.Poller()
        self._poller.register(self._control, zmq.POLLIN)
        self._children: list[Child] = []
        self._measured: dict[bytes, Measured] = {}
        self._ready: set[bytes] = set()
        self._failure: TokenloomError | None = None
        self._num_signals = 0
        self._has_drained = False
        self._wakeup_fds: tuple[int, int] | None = None
        self._lock_fd: int | None = None

    # ── start ────────────────────────────────────────────────────────────────────────────────────────────────────

    def start(self) -> None:
        """Bring everything up. Raises the TokenloomError that a child reported, or EngineDead."""
        if self.spec.config.listen and self.spec.config.listen.startswith("ipc://"):
            self._lock_fd = lock_ipc_address(self.spec.config.listen)
        self._catch_signals()
        for rank in range(self.spec.config.tensor_parallel_size):
            self._start_worker(rank, generation=0)
        self._start_core(epoch=0)
        self._start_frontend()
        deadline = self._begun + self.spec.config.start_timeout_s
        while not self._is_ready():
            self._turn(max(deadline - time.monotonic(), 0))
            if self._failure is not None:
                raise self._failure
            if self._num_signals:
                raise EngineDead("stopped by a signal while starting")
            if time.monotonic() >= deadline:
                late = [child.process.name for child in self._children if child.identity not in self._ready]
                raise EngineDead(f"{', '.join(late)} not ready after --start-timeout-s {deadline - self._begun:g} s")
        self._announce(f"Ready at {self.address} after {time.monotonic() - self._begun:.2f} s")

    def _start_worker(self, rank: int, generation: int) -> None:
        arguments = ["--rank", str(rank), "--generation", str(generation)]
        self._spawn(f"worker {rank}", "tokenloom.workers.process", b"worker-%d-%d" % (rank, generation), arguments)

    def _start_core(self, epoch: int) -> None:
        self._spawn("core", "tokenloom.core.process", b"core-%d" % epoch, ["--epoch", str(epoch)])

    def _start_frontend(self) -> None:
        self._spawn("frontend", "tokenloom.frontend.process", b"frontend", [])

    def _spawn(self, name: str, module: str, identity: bytes, arguments: list[str]) -> None:
        process = ChildProcess(name, module, ["--spec", self.spec.to_argument(), *arguments])
        self._children.append(Child(process, identity))
        self._poller.register(process.stderr_fd, zmq.POLLIN)
        self._poller.register(process.pid_fd, zmq.POLLIN)

    def _is_ready(self) -> bool:
        return all(child.identity in self._ready for child in self._children)

    # ── life ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def run(self) -> None:
        """Serve until a signal; the first drains, a second aborts. Raises EngineDead when a child is lost."""
        while not self._num_signals:
            self._turn(None)
            if self._failure is not None:
                raise self._failure
        self._drain()

    def _drain(self) -> None:
        deadline = time.monotonic() + self.spec.config.drain_timeout_s
        self._announce("Draining: running requests finish, new ones are refused; another signal aborts")
        self._broadcast(Drain(), b"core", b"frontend")
        while not self._has_drained and self._num_signals < 2 and time.monotonic() < deadline:
            self._turn(deadline - time.monotonic())
            if self._failure is not None:
                raise self._failure

    def _turn(self, timeout_s: float | None) -> None:
        """Wait for something and deal with all that is there."""
        self._poller.poll(None if timeout_s is None else int(max(timeout_s, 0) * 1000) + 1)
        if self._wakeup_fds is not None:
            with contextlib.suppress(BlockingIOError):
                os.read(self._wakeup_fds[0], 64)
        for child in self._children:
            for line in child.process.read_stderr():
                print(line, file=sys.stderr, flush=True)
        for identity, message in self._receive():
            self._on_message(identity, message)
        for child in self._children:
            if self._failure is None and child.process.exit_code is not None:
                self._failure = EngineDead(child.process.describe_exit())

    def _receive(self) -> Iterator[tuple[bytes, ChildToSupervisor]]:
        with contextlib.suppress(zmq.Again):
            while True:
                identity, frame = self._control.recv_multipart(zmq.NOBLOCK)[:2]
                try:
                    yield identity, self._decoder.decode(frame)
                except ProtocolError as error:
                    logger.warning("on the control socket: %s", error)

    def _on_message(self, identity: bytes, message: ChildToSupervisor) -> None:
        child = next((child for child in self._children if child.identity == identity), None)
        if child is None:
            return
        if isinstance(message, ChildHello):
            self._check_hello(message)
        elif isinstance(message, Phase):
            self._on_phase(child, message)
        elif isinstance(message, Measured):
            self._on_measured(child, message)
        elif isinstance(message, Ready):
            self._ready.add(identity)
        elif isinstance(message, Failed):
            self._failure = self._failure or message.error.to_exception()
        elif isinstance(message, ReplaceWorkers):
            self._failure = self._failure or EngineDead(message.reason)
        elif isinstance(message, Drained):
            self._has_drained = True
        elif isinstance(message, Progress):
            self._broadcast(message, b"frontend")

    def _check_hello(self, hello: ChildHello) -> None:
        if (hello.protocol_version, hello.fingerprint) != (PROTOCOL_VERSION, self.spec.fingerprint):
            self._failure = ProtocolError(
                f"{hello.role} {hello.rank} speaks protocol {hello.protocol_version} of run {hello.run_id}, "
                f"this is protocol {PROTOCOL_VERSION} of run {self.spec.run_id}"
            )

    def _on_phase(self, child: Child, phase: Phase) -> None:
        if phase.name == "listen":
            self.address = phase.detail
        since = time.monotonic() - self._begun
        detail = f" ({phase.detail})" if phase.detail else ""
        self._announce(f"{since:6.2f} s  {child.process.name}: {phase.name} in {phase.duration_s:.2f} s{detail}")

    def _on_measured(self, child: Child, measured: Measured) -> None:
        self._measured[child.identity] = measured
        if len(self._measured) < self.spec.config.tensor_parallel_size:
            return
        num_blocks = min(each.max_blocks for each in self._measured.values())
        size = self.spec.config.block_size
        self._announce(
            f"{time.monotonic() - self._begun:6.2f} s  KV cache: {num_blocks - 1} blocks of {size} = "
            f"{(num_blocks - 1) * size} tokens, {num_blocks * measured.block_bytes / 2**20:.0f} MiB per rank on "
            f"{measured.device}"
        )
        self._broadcast(Initialize(num_blocks=num_blocks))

    def _broadcast(self, message: SupervisorToChild, *prefixes: bytes) -> None:
        """To all children, or to those whose identity begins with one of `prefixes`."""
        frame = encode(message)
        for child in self._children:
            if not prefixes or child.identity.startswith(prefixes):
                with contextlib.suppress(zmq.ZMQError):  # it has not connected yet, or is gone
                    self._control.send_multipart([child.identity, frame])

    def _catch_signals(self) -> None:
        self._wakeup_fds = os.pipe()
        for fd in self._wakeup_fds:
            os.set_blocking(fd, False)
        signal.set_wakeup_fd(self._wakeup_fds[1], warn_on_full_buffer=False)
        self._poller.register(self._wakeup_fds[0], zmq.POLLIN)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)

    def _on_signal(self, *_: object) -> None:
        self._num_signals += 1

    # ── stop ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def stop(self) -> None:
        """End all children and leave nothing behind; harmless when called twice."""
        self._broadcast(Stop())
        deadline = time.monotonic() + STOP_TIMEOUT_S
        for child in self._children:
            child.process.wait(deadline - time.monotonic())
        for child in self._children:
            for line in child.process.read_stderr():
                print(line, file=sys.stderr, flush=True)
            child.process.close()
        self._children.clear()
        self._context.destroy(linger=0)
        self.remove_files()

    def remove_files(self) -> None:
        """The run directory, and the socket that the operator named."""
        self._run_directory.remove()
        if self._lock_fd is not None and self.spec.config.listen is not None:
            unlink_ipc_address(self.spec.config.listen)
