"""Messages between the head and the agents of other hosts, over DEALER/ROUTER: the head orders processes to be started
and killed; agents report on their host and its processes.

An agent runs on each host but the head (`frontend/launcher/hosts/agent.py`). The processes that it starts connect to
the head themselves; `process` is their identity there, which is never used twice in an engine.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from ..errors import ErrorInfo
from .base import Message, Ping


class HostHello(Message, frozen=True, kw_only=True, tag="host_hello"):
    """First message of an agent. An agent has a new identity for each connection: one that reconnects counts as new.
    An agent that had joined from the same address is gone."""

    protocol_version: int
    version: str  # of tokenloom
    numerics: str  # digest of the sources that determine computed numbers (version.py)
    address: str  # its IP address, at which other hosts reach it
    num_gpus: int
    num_cpus: int
    placement: str = ""  # the agent's name at the launcher that placed it; empty: it was started by hand


class HostPrepared(Message, frozen=True, kw_only=True, tag="host_prepared"):
    """Notice that the host has the model. `digest`: that of its checkpoint."""

    digest: str


class HostFailed(Message, frozen=True, kw_only=True, tag="host_failed"):
    """Notice that the host cannot serve and its agent ends."""

    error: ErrorInfo


class HostLeaving(Message, frozen=True, kw_only=True, tag="host_leaving"):
    """Notice that the agent was stopped and has killed its processes."""


class ProcessUse(msgspec.Struct, frozen=True, array_like=True):
    """A process's wait for CPUs, and its memory."""

    process: str
    starved_s: float  # seconds that it waited for a CPU since the last report (ChildProcess.take_starved_s)
    resident_bytes: int


class HostReport(Message, frozen=True, kw_only=True, tag="host_report"):
    """Reply to a Ping: the running processes that the agent has started."""

    processes: list[ProcessUse] = []


class Words(Message, frozen=True, kw_only=True, tag="words"):
    """Lines that processes of the host have written to stderr."""

    lines: list[str]


class Spawned(Message, frozen=True, kw_only=True, tag="spawned"):
    """Notice that a process has been started."""

    process: str
    pid: int


class Ended(Message, frozen=True, kw_only=True, tag="ended"):
    """Notice that a process has ended, by itself or by a Kill."""

    process: str
    how: str  # text of ChildProcess.describe_exit


ProcessNews: TypeAlias = HostReport | Words | Spawned | Ended
AgentToHead: TypeAlias = HostHello | HostPrepared | HostFailed | HostLeaving | ProcessNews


class HostAccepted(Message, frozen=True, kw_only=True, tag="host_accepted"):
    """Reply to HostHello: the engine's specification, as JSON. The agent replies with HostPrepared or HostFailed."""

    spec: bytes


class HostRefused(Message, frozen=True, kw_only=True, tag="host_refused"):
    """Reply to HostHello: the head does not take this host."""

    error: ErrorInfo


class HostUnknown(Message, frozen=True, kw_only=True, tag="host_unknown"):
    """Reply to an agent that the head has given up: the agent kills its processes and sends HostHello again."""


class HostReleased(Message, frozen=True, kw_only=True, tag="host_released"):
    """Notice that the engine ends: the agent kills its processes and waits for the next engine."""


class Spawn(Message, frozen=True, kw_only=True, tag="spawn"):
    """Order to start a process. Orders are carried out one after the other, so the processes of earlier Kills have
    ended by then."""

    process: str
    role: Literal["worker", "tier"]  # an agent starts nothing else
    replica: int = 0
    number: int  # as in ProcessSpec
    host: int = 0  # as in ProcessSpec
    rank: str = ""  # a worker's rank
    arguments: list[str]


class Kill(Message, frozen=True, kw_only=True, tag="kill"):
    """Order to kill a process, if it still runs, and to wait for its end. The reply is Ended, if that was not sent
    yet."""

    process: str


HeadToAgent: TypeAlias = HostAccepted | HostRefused | HostUnknown | HostReleased | Spawn | Kill | Ping
