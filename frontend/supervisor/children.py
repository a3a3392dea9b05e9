"""Roster: the children that live, and how to reach them over the control socket.

Knows processes and messages as such; what a message means and what a loss leads to is the supervisor's.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import zmq

from ...ipc.codec import Decoder, encode
from ...ipc.config.engine_spec import EngineSpec
from ...ipc.errors import ProtocolError
from ...ipc.messages.supervisor import ChildToSupervisor, Measured, SupervisorToChild
from ...ipc.process.log import is_worth_a_line, write_line
from ...ipc.sockets import new_socket, receive
from .child_process import ChildProcess

logger = logging.getLogger("tokenloom.supervisor")


@dataclass(eq=False)
class Child:
    """A process and the identity under which it speaks on the control socket."""

    role: str  # worker, core or frontend
    process: ChildProcess
    identity: bytes
    is_ready: bool = False
    measured: Measured | None = None
    heard_at: float = field(default_factory=time.monotonic)
    failure: str = ""  # what it said of its own end

    def describe_end(self) -> str:
        """Which process, how it ended and why; there is an exit code."""
        return f"{self.process.name} failed: {self.failure}" if self.failure else self.process.describe_exit()


class Roster:
    """Owns the control socket and the children; whatever can wake the supervisor is registered with `poller`."""

    def __init__(self, spec: EngineSpec) -> None:
        self._environment = spec.environment()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._control = new_socket(self._context, zmq.ROUTER)
        self._control.bind(spec.address("control"))
        self._decoder: Decoder[ChildToSupervisor] = Decoder(ChildToSupervisor)
        self._num_malformed = 0
        self.poller = zmq.Poller()
        self.poller.register(self._control, zmq.POLLIN)
        self.children: list[Child] = []

    def spawn(
        self,
        role: str,
        name: str,
        module: str,
        identity: str,
        arguments: Sequence[str],
        inherited_fds: Sequence[int] = (),
    ) -> None:
        process = ChildProcess(name, module, arguments, self._environment, inherited_fds)
        self.children.append(Child(role, process, identity.encode()))
        self.poller.register(process.stderr_fd, zmq.POLLIN)
        self.poller.register(process.pid_fd, zmq.POLLIN)

    def of(self, role: str) -> list[Child]:
        return [child for child in self.children if child.role == role]

    def kernels(self) -> str:
        """What the workers compute with, each kind once."""
        named = (child.measured.kernels for child in self.of("worker") if child.measured is not None)
        return "; ".join(dict.fromkeys(named))

    def is_up(self, role: str) -> bool:
        children = self.of(role)
        return bool(children) and all(child.is_ready for child in children)

    def remove(self, role: str) -> None:
        """Kill what is left of a role and forget it."""
        for child in self.of(role):
            self.poller.unregister(child.process.stderr_fd)
            self.poller.unregister(child.process.pid_fd)
            child.process.close()
            self.children.remove(child)

    def ended(self) -> Iterator[Child]:
        """Children whose process has ended, as long as they are on the roster."""
        for child in list(self.children):
            if child in self.children and child.process.exit_code is not None:
                yield child

    def bury_orphans(self) -> None:
        """As process 1 of a container the supervisor inherits what its children leave behind (compilers, the grammar
        process of a lost core), and the dead among it stay until they are waited for."""
        ours = {child.process.pid for child in self.children}
        with contextlib.suppress(ChildProcessError):  # there are no children at all
            while (found := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) and found.si_pid not in ours:
                os.waitpid(found.si_pid, 0)

    def pass_on_stderr(self) -> None:
        for child in self.children:
            for line in child.process.read_stderr():
                write_line(line, sys.stderr)

    def receive(self) -> Iterator[tuple[Child, ChildToSupervisor]]:
        """All messages that have come from children on the roster."""
        for identity, frame in receive(self._control, num_parts=2):
            child = next((child for child in self.children if child.identity == identity), None)
            try:
                message = self._decoder.decode(frame)
            except ProtocolError as error:
                self._num_malformed += 1
                if is_worth_a_line(self._num_malformed):
                    logger.warning("%d malformed on the control socket; the last: %s", self._num_malformed, error)
                continue
            if child is not None:
                child.heard_at = time.monotonic()
                yield child, message

    def broadcast(self, message: SupervisorToChild, *roles: str) -> None:
        """To all children, or to those of the given roles."""
        for child in self.children:
            if not roles or child.role in roles:
                self.tell(child, message)

    def tell(self, child: Child, message: SupervisorToChild) -> None:
        with contextlib.suppress(zmq.ZMQError):  # it has not connected yet, or is gone
            self._control.send_multipart([child.identity, encode(message)])

    def close(self, timeout_s: float) -> None:
        """Wait for the children to end, kill those that have not within `timeout_s`, and release everything."""
        deadline = time.monotonic() + timeout_s
        for child in self.children:
            child.process.wait(deadline - time.monotonic())
        self.pass_on_stderr()
        for child in self.children:
            child.process.close()
        self.children.clear()
        self._context.destroy(linger=0)
