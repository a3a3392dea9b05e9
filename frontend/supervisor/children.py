"""Children: the supervisor's child processes and the control socket to them.

Starts, signals and removes processes, sends and receives messages. Does not know what a message means or how a lost
process is replaced: both belong to the supervisor.
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
    """A process and its identity on the control socket."""

    role: str  # worker, core or frontend
    process: ChildProcess
    identity: bytes
    is_ready: bool = False
    measured: Measured | None = None
    last_sign_at: float = field(default_factory=time.monotonic)  # last message; the time without a CPU is added
    failure: str = ""  # message of its Failed

    def describe_end(self) -> str:
        """Name the process and the cause of its end. It must have ended, or have sent Failed."""
        return f"{self.process.name} failed: {self.failure}" if self.failure else self.process.describe_exit()


class Children:
    """Owns the control socket, the children, and `poller`, which wakes the supervisor for any event of them."""

    def __init__(self, spec: EngineSpec) -> None:
        self._environment = spec.environment()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._control = new_socket(self._context, zmq.ROUTER)
        self._control.bind(spec.address("control"))
        self._decoder: Decoder[ChildToSupervisor] = Decoder(ChildToSupervisor)
        self._num_malformed = 0
        self.poller = zmq.Poller()
        self.poller.register(self._control, zmq.POLLIN)
        self.all: list[Child] = []

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
        self.all.append(Child(role, process, identity.encode()))
        self.poller.register(process.stderr_fd, zmq.POLLIN)
        self.poller.register(process.pid_fd, zmq.POLLIN)

    def of(self, role: str) -> list[Child]:
        return [child for child in self.all if child.role == role]

    def kernels(self) -> str:
        """Name the kernels that the workers use, each kind once."""
        named = (child.measured.kernels for child in self.of("worker") if child.measured is not None)
        return "; ".join(dict.fromkeys(named))

    def is_up(self, role: str) -> bool:
        children = self.of(role)
        return bool(children) and all(child.is_ready for child in children)

    def remove(self, role: str) -> None:
        """Kill all processes of a role and remove them."""
        for child in self.of(role):
            self.poller.unregister(child.process.stderr_fd)
            self.poller.unregister(child.process.pid_fd)
            child.process.close()
            self.all.remove(child)

    def ended(self) -> Iterator[Child]:
        """Yield the children with an ended process. The caller may remove children meanwhile."""
        for child in list(self.all):
            if child in self.all and child.process.exit_code is not None:
                yield child

    def reap_orphans(self) -> None:
        """Wait for ended processes that are not children of ours. As process 1 of a container the supervisor inherits
        the orphans of its children (compilers, the grammar process of a lost core), which else stay as zombies."""
        ours = {child.process.pid for child in self.all}
        with contextlib.suppress(ChildProcessError):  # there are no children at all
            while (found := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) and found.si_pid not in ours:
                os.waitpid(found.si_pid, 0)

    def forward_stderr(self) -> None:
        """Write the new stderr lines of all children to ours."""
        for child in self.all:
            for line in child.process.read_stderr():
                write_line(line, sys.stderr)

    def receive(self) -> Iterator[tuple[Child, ChildToSupervisor]]:
        """Yield all waiting messages with their sender; those of removed children are dropped."""
        for identity, frame in receive(self._control, num_parts=2):
            child = next((child for child in self.all if child.identity == identity), None)
            try:
                message = self._decoder.decode(frame)
            except ProtocolError as error:
                self._num_malformed += 1
                if is_worth_a_line(self._num_malformed):
                    logger.warning("%d malformed on the control socket; the last: %s", self._num_malformed, error)
                continue
            if child is not None:
                child.last_sign_at = time.monotonic()
                yield child, message

    def broadcast(self, message: SupervisorToChild, *roles: str) -> None:
        """Send `message` to all children, or to those of the given roles."""
        for child in self.all:
            if not roles or child.role in roles:
                self.send(child, message)

    def send(self, child: Child, message: SupervisorToChild) -> None:
        with contextlib.suppress(zmq.ZMQError):  # not connected yet, or no longer
            self._control.send_multipart([child.identity, encode(message)])

    def close(self, timeout_s: float) -> None:
        """Wait at most `timeout_s` for the children to end, kill the others, and close all sockets and descriptors."""
        deadline = time.monotonic() + timeout_s
        for child in self.all:
            child.process.wait(deadline - time.monotonic())
        self.forward_stderr()
        for child in self.all:
            child.process.close()
        self.all.clear()
        self._context.destroy(linger=0)
