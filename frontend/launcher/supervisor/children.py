"""Children: the supervisor's child processes and the control socket to them.

Starts and removes processes through the launcher, sends and receives messages. Does not know what a message means or
how a lost process is replaced: both are decided by the supervisor.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import msgspec
import zmq

from ....ipc.messages.supervisor import ChildToSupervisor, HostGone, HostPlaced, Measured, SupervisorToChild
from ....ipc.sockets.channel import Channel
from ....ipc.sockets.zmq_sockets import new_socket
from .launcher import LAUNCHER, ChildProcess, Launcher, ProcessSpec, Role, Unit, UnstartedProcess

LAST_MESSAGE_S = 1.0
RECEIVE_S = 0.05


@dataclass(eq=False)
class Child:
    """Child process of the supervisor, with the state that it has reported."""

    spec: ProcessSpec
    process: ChildProcess
    is_ready: bool = False
    answers_pings: bool = False  # the process has reported that it does, before it is ready
    measured: Measured | None = None
    started_at: float = field(default_factory=time.monotonic)
    last_sign_at: float = field(default_factory=time.monotonic)  # time of the last message, plus the time without a CPU
    failure: str = ""  # the text of its message Failed
    address: str = ""  # a tier process's on another host, for the core
    is_loaded: bool = False  # a spare frontend's: it can take over

    def describe_end(self) -> str:
        """Return the name of the process and the cause of its end. It must have ended, or have sent Failed."""
        return f"{self.spec.name} failed: {self.failure}" if self.failure else self.process.describe_exit()


class Children:
    """All child processes, their control socket, and `poller`, which wakes the supervisor for any event of them."""

    def __init__(self, address: str, launcher: Launcher) -> None:
        """`address`: the address to bind the control socket to."""
        self._launcher = launcher
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        socket = new_socket(self._context, zmq.ROUTER)
        socket.bind(address)
        launcher.listen(self._context, socket, self.receive_placements)
        self._control: Channel[ChildToSupervisor, SupervisorToChild] = Channel(socket, ChildToSupervisor, "children")
        self._unread: deque[tuple[bytes, ChildToSupervisor]] = deque()  # read during a wait for a process's end
        self.poller = zmq.Poller()
        for source in (socket, *launcher.wakers):
            self.poller.register(source, zmq.POLLIN)
        self.all: list[Child] = []
        self.spares: list[Child] = []  # frontends that wait to take over
        self._kept: dict[tuple[type, Unit], SupervisorToChild] = {}  # messages sent by `announce`
        self._places_taken = launcher.places_taken  # as last sent to the launcher process

    def spawn(self, spec: ProcessSpec) -> None:
        """Start a process. If it cannot be started, it is added as one that has ended."""
        self.all.append(self._spawn(spec))

    def spawn_spare(self, spec: ProcessSpec) -> Child:
        """Start a spare frontend, which is no part of the engine yet."""
        self.spares.append(self._spawn(spec))
        return self.spares[-1]

    def add_spare(self, spare: Child) -> None:
        """Make a spare a part of the engine."""
        self.spares.remove(spare)
        self.all.append(spare)

    def _spawn(self, spec: ProcessSpec) -> Child:
        try:
            process = self._launcher.spawn(spec)
        except OSError as error:
            process = UnstartedProcess(spec.name, error)
        for fd in process.wake_fds:
            self.poller.register(fd, zmq.POLLIN)
        return Child(spec, process)

    def poll(self, timeout_ms: int) -> None:
        """Wait at most `timeout_ms` for an event of `poller`, then run Launcher.turn, which forwards the children's
        stderr."""
        self.poller.poll(0 if self._unread else timeout_ms)
        self._launcher.turn()
        if self._launcher.places_taken != self._places_taken:
            self._places_taken = self._launcher.places_taken
            self.announce(self._places_taken, LAUNCHER)

    def on_placement(self, news: HostPlaced | HostGone) -> None:
        """Pass a report of the launcher process on to the launcher."""
        self._launcher.on_placement(news)

    def receive_placements(self) -> None:
        """Apply the waiting reports of the launcher process, and keep all other messages for `receive`. The launcher
        calls it while it waits for the end of a process: if its host is gone, only such a report may tell."""
        for identity, message in self._control.receive_from(RECEIVE_S):
            if isinstance(message, HostPlaced | HostGone) and self._sender(identity) is not None:
                self.on_placement(message)
            else:
                self._unread.append((identity, message))

    @property
    def next_at(self) -> float:
        """Latest time at which `poll` must be called, in monotonic seconds: the launcher's, or 0 if a process could not
        be started."""
        started = (*self.all, *self.spares)
        has_unstarted = any(isinstance(child.process, UnstartedProcess) for child in started)
        return 0.0 if has_unstarted else self._launcher.next_at

    def num_hosts_lost(self, replica: int) -> int:
        """Return how many hosts of a replica were lost so far, each with its part of the arena."""
        return self._launcher.num_hosts_lost(replica)

    def obstacle(self, unit: Unit) -> str:
        """Return the reason why a unit cannot be started yet; "" if it can be started now."""
        return self._launcher.obstacle(unit)

    def late(self, waiting: Iterable[Unit]) -> list[str]:
        """Return the names of the processes that are not ready, and the obstacles to starting the units in
        `waiting`."""
        obstacles = filter(None, map(self.obstacle, waiting))
        return [*(child.spec.name for child in self.all if not child.is_ready), *obstacles]

    def of(self, unit: Unit) -> list[Child]:
        return [child for child in self.all if child.spec.unit == unit]

    def measured(self, workers: Unit) -> Measured | None:
        """Return the values that hold for all workers of a group, combined from their measurements; None if a worker
        has not measured yet."""
        group = [child.measured for child in self.of(workers) if child.measured is not None]
        if not group or len(group) < len(self.of(workers)):
            return None
        return msgspec.structs.replace(
            group[0],
            pool_bytes=min(each.pool_bytes for each in group),
            kernels=self.kernels(),
            has_exact_drafts=all(each.has_exact_drafts for each in group),
            free_bytes=min(each.free_bytes for each in group),
        )

    def kernels(self) -> str:
        """Return the names of the kernels that the workers have reported, each once, joined by "; "."""
        named = (child.measured.kernels for child in self.all if child.measured is not None)
        return "; ".join(dict.fromkeys(named))

    def is_up(self, unit: Unit) -> bool:
        children = self.of(unit)
        return bool(children) and all(child.is_ready for child in children)

    def remove(self, unit: Unit) -> None:
        """Kill the processes of a unit that still run, wait for their end and remove them."""
        for child in self.of(unit):
            self._end(child)
            self.all.remove(child)

    def remove_spare(self, spare: Child) -> None:
        """Kill a spare frontend if it still runs, and remove it."""
        self._end(spare)
        self.spares.remove(spare)

    def _end(self, child: Child) -> None:
        for fd in child.process.wake_fds:
            self.poller.unregister(fd)
        child.process.close()

    def ended(self) -> Iterator[Child]:
        """Yield the children that have ended and are not removed yet. The caller may remove children during the
        iteration."""
        for child in list(self.all):
            if child in self.all and child.process.has_ended:
                yield child

    def receive(self) -> Iterator[tuple[Child, ChildToSupervisor]]:
        """Yield waiting messages with their sender, for at most RECEIVE_S, so that a flood of messages does not delay
        the rest of the supervisor's work. Messages of removed children are dropped."""
        for identity, message in self._messages():
            child = self._sender(identity)
            if child is not None:
                child.last_sign_at = time.monotonic()
                yield child, message

    def _messages(self) -> Iterator[tuple[bytes, ChildToSupervisor]]:
        while self._unread:
            yield self._unread.popleft()
        yield from self._control.receive_from(RECEIVE_S)

    def _sender(self, identity: bytes) -> Child | None:
        known = (*self.all, *self.spares)
        return next((child for child in known if child.spec.identity == identity), None)

    def receive_last_of(self, ended: Child) -> Iterator[tuple[Child, ChildToSupervisor]]:
        """Yield messages as `receive` does until an ended child's `failure` is set, for at most LAST_MESSAGE_S: its
        message Failed may arrive after its end is detected."""
        if isinstance(ended.process, UnstartedProcess):
            return
        deadline = time.monotonic() + LAST_MESSAGE_S
        while not ended.failure and (
            self._unread or self._control.socket.poll(max(int((deadline - time.monotonic()) * 1000), 0))
        ):
            yield from self.receive()

    def broadcast(self, message: SupervisorToChild, *roles: Role) -> None:
        """Send `message` to all connected children, or to those of the given roles."""
        for child in self.all:
            if not roles or child.spec.unit.role in roles:
                self.send(child, message)

    def send_to(self, unit: Unit, message: SupervisorToChild) -> None:
        """Send `message` to all connected processes of a unit."""
        for child in self.of(unit):
            self.send(child, message)

    def announce(self, message: SupervisorToChild, *units: Unit) -> None:
        """Send `message` to these units, and keep it for their processes that connect later (`send_kept`)."""
        for unit in units:
            self._kept[type(message), unit] = message
            self.send_to(unit, message)

    def send_kept(self, child: Child) -> None:
        """Send a child that has said Hello the last message of each type that was announced to its unit."""
        for (_, unit), message in self._kept.items():
            if unit == child.spec.unit:
                self.send(child, message)

    def send(self, child: Child, message: SupervisorToChild) -> None:
        with contextlib.suppress(zmq.ZMQError):  # it is not connected
            self._control.send_to(child.spec.identity, message)

    def close(self, timeout_s: float) -> None:
        """Wait at most `timeout_s` for the children to end, kill the others, and close all sockets and descriptors."""
        deadline = time.monotonic() + timeout_s
        for spare in list(self.spares):
            self.remove_spare(spare)
        for child in self.all:
            if child.spec.unit != LAUNCHER:  # it has nothing to finish, and its end would end other hosts
                child.process.wait(deadline - time.monotonic())
        self._launcher.turn()
        for child in self.all:
            child.process.close()
        self.all.clear()
        self._launcher.close()
        self._context.destroy(linger=0)
