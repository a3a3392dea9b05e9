"""Launcher: the interfaces through which the supervisor starts and watches the engine's processes.

The supervisor knows a process only by these interfaces, so that the process may run on another machine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol, TypeAlias

import zmq

from ....ipc.child import spawn_failure
from ....ipc.messages.base import Rank
from ....ipc.messages.supervisor import HostGone, HostPlaced, PlacesTaken
from ....ipc.spec.config.engine_spec import frontend_name, host_process_name, identity_of, process_name

Role: TypeAlias = Literal["worker", "core", "frontend", "tier", "launcher"]


class Unit(NamedTuple):
    """Processes that are started and replaced together: the worker group, the core or the tier processes of one
    replica, one of the frontends, which serve all replicas, or the launcher process, which lets Ray place hosts."""

    role: Role
    place: int = 0  # the replica's number; for a frontend, its own number

    @property
    def name(self) -> str:
        """The name in logs and errors, such as "core" or "frontend 1"."""
        return frontend_name(self.place) if self.role == "frontend" else process_name(self.role, self.place)

    @property
    def is_optional(self) -> bool:
        """Whether a running engine continues without the unit."""
        return self.role in ("tier", "launcher")


WORKERS, CORE, FRONTEND, TIER = UNITS = Unit("worker"), Unit("core"), Unit("frontend"), Unit("tier")
LAUNCHER = Unit("launcher")


@dataclass(frozen=True)
class ProcessSpec:
    """Description of one process to start."""

    unit: Unit
    number: int = 0  # a worker's generation, a core's epoch, or the number of predecessors
    rank: Rank | None = None  # a worker's
    host: int = 0  # a result of EngineSpec.host_of; 0: this machine
    arguments: Sequence[str] = ()
    inherited_fds: Sequence[int] = ()

    @property
    def name(self) -> str:
        """The name in logs and errors, such as "core" or "worker 0"."""
        if self.rank is not None:
            return process_name(f"worker {self.rank}", self.unit.place)
        return (
            process_name(host_process_name(self.unit.role, self.host), self.unit.place) if self.host else self.unit.name
        )

    @property
    def identity(self) -> bytes:
        """The identity on the sockets to supervisor and core."""
        return identity_of(self.name, self.number)


class ChildProcess(Protocol):
    """Interface of a started process, on this machine or another."""

    place: str  # where the process runs, for the log
    wake_fds: Sequence[int]  # readable on new stderr or its end; empty: see Launcher.wakers

    @property
    def has_ended(self) -> bool: ...

    @property
    def is_blameless(self) -> bool:
        """Whether the process has ended only because its host was lost."""

    @property
    def was_killed(self) -> bool:
        """Whether the process was ended by a signal from a person or a program, not from the kernel."""

    def describe_exit(self) -> str:
        """Return the name of the process and the cause of its end. The process must have ended."""

    def resident_bytes(self) -> int:
        """Return the resident memory of the process in bytes; 0 if it has ended."""

    def take_starved_s(self) -> float:
        """Return the seconds since the last call in which the main thread waited for a CPU or for the disk."""

    def wait(self, timeout_s: float) -> None:
        """Wait until the process has ended, for at most `timeout_s`."""

    def close(self) -> None:
        """Kill the process if it still runs, wait for its end, and close its descriptors."""


class UnstartedProcess:
    """ChildProcess that could not be started; it counts as ended."""

    place, is_blameless, was_killed, has_ended = "nowhere", False, False, True
    wake_fds: Sequence[int] = ()

    def __init__(self, name: str, error: OSError) -> None:
        self._end = f"{name} cannot be started: {spawn_failure(error)}"

    def describe_exit(self) -> str:
        return self._end

    def resident_bytes(self) -> int:
        return 0

    def take_starved_s(self) -> float:
        return 0.0

    def wait(self, timeout_s: float) -> None:
        """Return at once."""

    def close(self) -> None:
        """Do nothing."""


class Launcher(Protocol):
    """Interface for starting processes, on this machine or another."""

    wakers: Sequence[zmq.Socket[bytes]]  # readable when `turn` has something to do

    @property
    def next_at(self) -> float:
        """Latest time at which `turn` must be called, in monotonic seconds."""

    def listen(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        control: zmq.Socket[bytes],
        receive_placements: Callable[[], None],
    ) -> None:
        """Let processes on other machines connect to the control socket, which is already bound for this machine.
        `receive_placements` reads that socket and calls `on_placement`; it is for waits in which nobody else reads."""

    def obstacle(self, unit: Unit) -> str:
        """Return the reason why a unit cannot be started yet; "" if it can be started now."""

    def num_hosts_lost(self, replica: int) -> int:
        """Return how many times a machine with processes of the replica was lost."""

    def spawn(self, spec: ProcessSpec) -> ChildProcess:
        """Start a process and return it. OSError if the machine cannot start it."""

    def on_placement(self, news: HostPlaced | HostGone) -> None:
        """Apply a report of the launcher process."""

    @property
    def places_taken(self) -> PlacesTaken:
        """The other hosts that have a place, as a message for the launcher process."""

    def turn(self) -> None:
        """Write the processes' new lines to our stderr, and do other regular work. Called in each turn of the
        supervisor."""

    def close(self) -> None:
        """Release other machines. All processes must be closed before."""
