"""agents → head, DEALER/ROUTER: a host and the ends of its processes. head → agents: the processes to start and kill.

An agent runs on each host but the head (`frontend/launcher/hosts/agent.py`). The processes that it starts speak to the
head themselves; `process` is their identity there, which is never used twice in an engine.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from ..errors import ErrorInfo
from .base import Message, Ping


class HostHello(Message, frozen=True, kw_only=True, tag="host_hello"):
    """First message of an agent. Its identity is new for each connection: an agent that comes back is a new one."""

    protocol_version: int
    version: str  # of tokenloom
    numerics: str  # digest of the sources that decide about numbers
    address: str  # its IP address, at which other hosts reach it
    num_gpus: int
    num_cpus: int
    placement: str = ""  # its name at the launcher that placed it; empty: it was started by hand


class HostPrepared(Message, frozen=True, kw_only=True, tag="host_prepared"):
    """The host has the model: the digest of its checkpoint."""

    digest: str


class HostFailed(Message, frozen=True, kw_only=True, tag="host_failed"):
    """The host cannot serve; its agent ends."""

    error: ErrorInfo


class HostLeaving(Message, frozen=True, kw_only=True, tag="host_leaving"):
    """The agent was told to stop and has killed its processes."""


class ProcessUse(msgspec.Struct, frozen=True, array_like=True):
    """CPU waits and memory of a process."""

    process: str
    starved_s: float  # since the last report, as ChildProcess.take_starved_s
    resident_bytes: int


class HostReport(Message, frozen=True, kw_only=True, tag="host_report"):
    """Reply to a Ping: the running processes."""

    processes: list[ProcessUse] = []


class Words(Message, frozen=True, kw_only=True, tag="words"):
    """Lines that processes of the host have written to stderr."""

    lines: list[str]


class Spawned(Message, frozen=True, kw_only=True, tag="spawned"):
    """A process runs."""

    process: str
    pid: int


class Ended(Message, frozen=True, kw_only=True, tag="ended"):
    """A process has ended, by itself or by a Kill."""

    process: str
    how: str  # as ChildProcess.describe_exit


ProcessNews: TypeAlias = HostReport | Words | Spawned | Ended
AgentToHead: TypeAlias = HostHello | HostPrepared | HostFailed | HostLeaving | ProcessNews


class HostAccepted(Message, frozen=True, kw_only=True, tag="host_accepted"):
    """Reply to HostHello: the engine's specification, as JSON. HostPrepared or HostFailed replies."""

    spec: bytes


class HostRefused(Message, frozen=True, kw_only=True, tag="host_refused"):
    """The head does not take this host."""

    error: ErrorInfo
    may_retry: bool = False  # the reason may pass


class HostUnknown(Message, frozen=True, kw_only=True, tag="host_unknown"):
    """Reply to an agent that the head has given up: it kills its processes and says HostHello anew."""


class HostReleased(Message, frozen=True, kw_only=True, tag="host_released"):
    """The engine ends: the agent kills its processes and waits for the next engine."""


class Spawn(Message, frozen=True, kw_only=True, tag="spawn"):
    """Order to start a process. Those that were killed before have ended by then."""

    process: str
    role: Literal["worker", "tier"]  # an agent starts nothing else
    replica: int = 0
    number: int  # as in ProcessSpec
    host: int = 0  # likewise
    rank: str = ""  # of a worker
    arguments: list[str]


class Kill(Message, frozen=True, kw_only=True, tag="kill"):
    """Order to kill a process, if it still runs, and to wait for its end; Ended replies, or is on its way."""

    process: str


HeadToAgent: TypeAlias = HostAccepted | HostRefused | HostUnknown | HostReleased | Spawn | Kill | Ping
