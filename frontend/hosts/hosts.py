"""Hosts: starts the ranks of an engine on several machines, through the agents that have joined it.

Each further host of the engine is a place with a number, which an agent takes. Agents beyond that are spare: one takes
the place of a host that is lost. An agent that is silent for LEASE_S is lost with its processes, and kills them by
itself when it has heard nothing for as long. Silence is judged only after all waiting messages are read, since this
process may have been suspended.
"""

from __future__ import annotations

import logging
import math
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
import zmq

from ...ipc.channel import Channel
from ...ipc.client_auth import GROUP, HOSTS, ZapHandler
from ...ipc.config.checkpoint_digest import checkpoint_digest
from ...ipc.config.engine_spec import EngineSpec
from ...ipc.endpoints import tcp_address
from ...ipc.errors import ConfigError, error_info
from ...ipc.keys import Keys
from ...ipc.messages.base import LEASE_S, PING_INTERVAL_S, PROTOCOL_VERSION, Ping
from ...ipc.messages.hosts import (
    AgentToHead,
    Ended,
    HeadToAgent,
    HostAccepted,
    HostFailed,
    HostHello,
    HostLeaving,
    HostPrepared,
    HostRefused,
    HostReleased,
    HostReport,
    HostUnknown,
    Kill,
    Spawn,
    Spawned,
    Words,
)
from ...ipc.messages.supervisor import HostGone, HostPlaced, PlacesTaken
from ...ipc.process.log import write_line
from ...ipc.sockets import new_socket
from ...ipc.version import numerics_digest, tokenloom_version
from ..supervisor.launcher import LAUNCHER, ChildProcess, Launcher, ProcessSpec, Unit
from .blob_thread import BlobThread
from .remote_process import RemoteProcess

logger = logging.getLogger("tokenloom.supervisor")

FAREWELL_MS = 200  # for the last messages to leave


@dataclass(eq=False)
class Host:
    """A host whose agent is connected."""

    identity: bytes  # of its agent
    hello: HostHello
    is_prepared: bool = False
    last_sign_at: float = field(default_factory=time.monotonic)
    processes: dict[str, RemoteProcess] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.hello.address


class Hosts:
    """A Launcher: owns the socket to the agents and their leases; processes of this host are another launcher's."""

    def __init__(self, spec: EngineSpec, local: Launcher) -> None:
        """ConfigError if the key file or the checkpoint is unusable."""
        assert spec.group_keys is not None, "resolve makes them"
        self._spec, self._local, self._group_keys = spec, local, spec.group_keys
        self._keys = Keys.load(spec.hosts_key_file)
        self._has_ray = spec.config.distributed_executor_backend == "ray"
        self._digest = checkpoint_digest(Path(spec.model_folder))
        self._sources = (tokenloom_version(), numerics_digest())
        self._host_by_identity: dict[bytes, Host] = {}
        self._host_by_place: dict[int, Host] = {}  # from 1; 0 is this host
        replicas = map(spec.of_replica, range(spec.config.data_parallel_size))
        self._places = {each.replica: {each.host_of(rank) for rank in each.ranks} for each in replicas}
        self._refusal_by_address: dict[str, str] = {}  # the last of each
        self._ping_at = 0.0  # monotonic seconds
        self._is_complete = False
        self.wakers: Sequence[zmq.Socket[bytes]] = ()
        self._num_lost_by_place: Counter[int] = Counter()

    # ── sockets ──────────────────────────────────────────────────────────────────────────────────────────────────

    def listen(self, context: zmq.Context[zmq.Socket[bytes]], control: zmq.Socket[bytes]) -> None:
        """Open the socket for agents, and bind the control socket for ranks on other hosts, each for keys of its own.
        ConfigError if --listen-hosts cannot be bound."""
        listen = self._spec.endpoints.agents
        self._zap = ZapHandler(context, self._keys.client_public, HOSTS)
        self._zap.admit(GROUP, self._group_keys.client_public)
        socket = new_socket(context, zmq.ROUTER)
        try:
            self._address = self._keys.listen(socket, HOSTS, listen)
            control_address = self._group_keys.listen(control, GROUP, tcp_address(self._spec.host_address, "*"))
        except zmq.ZMQError as error:
            raise ConfigError(
                f"cannot listen on --listen-hosts {listen}: {error}: give a free port of this host"
            ) from None
        self._channel: Channel[AgentToHead, HeadToAgent] = Channel(socket, AgentToHead, "agents")
        self._blobs = BlobThread(self._spec, self._group_keys)
        endpoints = msgspec.structs.replace(self._spec.endpoints, control=control_address, blobs=self._blobs.address)
        self._accepted = HostAccepted(
            spec=msgspec.json.encode(msgspec.structs.replace(self._spec, endpoints=endpoints))
        )
        self.wakers = (socket, self._zap.socket)
        if not self._has_ray:
            key_file = self._spec.hosts_key_file
            logger.info("hosts join with `engine-launch join %s --key-file %s`", self._address, key_file)

    @property
    def next_at(self) -> float:
        return self._ping_at if self._host_by_identity else math.inf

    def turn(self) -> None:
        self._local.turn()
        self._zap.answer()
        for identity, message in self._channel.receive_from():
            self._on_message(identity, message)
        now = time.monotonic()
        for host in list(self._host_by_identity.values()):
            if now - host.last_sign_at > LEASE_S:
                self._lose(host, f"no sign of life for {now - host.last_sign_at:.1f} s")
            elif now >= self._ping_at:
                self._channel.send_to(host.identity, Ping())
        if now >= self._ping_at:
            self._ping_at = now + PING_INTERVAL_S
        self._fill_places()

    def close(self) -> None:
        """Release all agents, which kill the processes that still run."""
        for host in self._host_by_identity.values():
            self._channel.send_to(host.identity, HostReleased())
        self._channel.socket.close(FAREWELL_MS)
        self._zap.socket.close()
        self._blobs.close()
        self._local.close()

    # ── agents ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _on_message(self, identity: bytes, message: AgentToHead) -> None:
        host = self._host_by_identity.get(identity)
        if isinstance(message, HostHello):
            self._greet(identity, message)
        elif host is None:
            self._channel.send_to(identity, HostUnknown())
        else:
            host.last_sign_at = time.monotonic()
            self._on_news(host, message)

    def _greet(self, identity: bytes, hello: HostHello) -> None:
        host = Host(identity, hello)
        if refusal := self._refusal(hello):
            self._refuse(host, refusal)
        elif any(each.name == hello.address for each in self._host_by_identity.values()):
            self._refuse(host, f"a host at {hello.address} has joined already: stop one of its agents", may_retry=True)
        else:
            self._host_by_identity[identity] = host
            self._channel.send_to(identity, self._accepted)

    def _refusal(self, hello: HostHello) -> str:
        """Return why a host cannot serve, else ""."""
        if hello.protocol_version != PROTOCOL_VERSION or (hello.version, hello.numerics) != self._sources:
            return (
                f"host {hello.address} runs tokenloom {hello.version} ({hello.numerics:.8}, protocol "
                f"{hello.protocol_version}), the head {self._sources[0]} ({self._sources[1]:.8}, protocol "
                f"{PROTOCOL_VERSION}): install the same version of tokenloom and torch on all hosts"
            )
        config = self._spec.config
        num_ranks, num_replicas = config.tensor_parallel_size, config.data_parallel_size
        num_needed = -(-num_ranks * num_replicas // config.hosts)
        if self._spec.device == "cuda" and hello.num_gpus < num_needed:
            replicas = f" × --data-parallel-size {num_replicas}" if num_replicas > 1 else ""
            return (
                f"host {hello.address} has {hello.num_gpus} GPUs, --tensor-parallel-size {num_ranks}{replicas} over "
                f"--hosts {config.hosts} needs {num_needed} on a host: lower the first or raise the second"
            )
        return ""

    def _refuse(self, host: Host, reason: str, *, may_retry: bool = False) -> None:
        if self._refusal_by_address.get(host.name) != reason:  # an agent that may retry does so every second
            logger.warning("%s", reason)
        self._refusal_by_address[host.name] = reason
        self._channel.send_to(host.identity, HostRefused(error=error_info(ConfigError(reason)), may_retry=may_retry))
        self._host_by_identity.pop(host.identity, None)

    def _on_news(self, host: Host, message: AgentToHead) -> None:
        if isinstance(message, HostPrepared):
            self._on_prepared(host, message)
        elif isinstance(message, HostFailed):
            logger.warning("host %s cannot serve: %s", host.name, message.error.message)
            self._lose(host, message.error.message)
        elif isinstance(message, HostLeaving):
            self._lose(host, "its agent was stopped")
        elif isinstance(message, HostReport):
            for use in message.processes:
                if use.process in host.processes:
                    host.processes[use.process].on_use(use)
        elif isinstance(message, Words):
            for line in message.lines:
                write_line(line, sys.stderr)
        elif isinstance(message, Spawned) and message.process in host.processes:
            host.processes[message.process].on_spawned(message.pid)
        elif isinstance(message, Ended) and message.process in host.processes:
            host.processes.pop(message.process).on_ended(message.how)

    def _on_prepared(self, host: Host, message: HostPrepared) -> None:
        if message.digest != self._digest:
            self._refuse(
                host,
                f"host {host.name} has another checkpoint of {self._spec.config.model or 'demo'} ({message.digest:.8}) "
                f"than the head ({self._digest:.8}): copy the head's, {self._spec.model_folder}",
            )
            return
        host.is_prepared = True
        logger.info("host %s has joined: %d CPUs, %d GPUs", host.name, host.hello.num_cpus, host.hello.num_gpus)

    def _lose(self, host: Host, reason: str) -> None:
        """Forget a host; its processes have ended."""
        del self._host_by_identity[host.identity]
        if host.is_prepared:
            logger.error("host %s is lost: %s", host.name, reason)
        for process in host.processes.values():
            process.on_host_lost(reason)
        places = [place for place, each in self._host_by_place.items() if each is host]
        self._num_lost_by_place.update(places)
        for place in places:
            del self._host_by_place[place]

    def _fill_places(self) -> None:
        """Give each free place to a prepared host without one."""
        taken = set(self._host_by_place.values())
        spare = [host for host in self._host_by_identity.values() if host.is_prepared and host not in taken]
        for place, host in zip(self._free_places, spare, strict=False):
            self._host_by_place[place] = host
        was_complete, self._is_complete = self._is_complete, not self._free_places
        if was_complete and not self._is_complete:
            waiting = [number for number in self._places if self._has_free_place(number)]
            who = "requests wait" if len(waiting) == len(self._places) else f"replicas {waiting} wait"
            logger.error("%s for %s", who, self._missing)

    @property
    def _free_places(self) -> list[int]:
        return [place for place in range(1, self._spec.config.hosts) if place not in self._host_by_place]

    @property
    def _missing(self) -> str:
        num_missing, num_hosts = len(self._free_places), self._spec.config.hosts
        hosts = f"{num_missing} more {'host' if num_missing == 1 else 'hosts'} of {num_hosts}"
        if self._has_ray:
            return f"{hosts}: Ray places it on the next free node"
        return f"{hosts}: run `engine-launch join {self._address}` there"

    # ── processes ────────────────────────────────────────────────────────────────────────────────────────────────

    def obstacle(self, unit: Unit) -> str:
        is_of_host = unit.role in ("worker", "tier")
        missing = self._missing if is_of_host and self._has_free_place(unit.place) else ""
        return self._local.obstacle(unit) or missing

    def _has_free_place(self, replica: int) -> bool:
        """Whether a host is missing that workers of a replica run on."""
        return not self._places[replica].isdisjoint(self._free_places)

    def num_hosts_lost(self, replica: int) -> int:
        return sum(self._num_lost_by_place[place] for place in self._places[replica])

    def on_placement(self, news: HostPlaced | HostGone) -> None:
        self._local.on_placement(news)
        if isinstance(news, HostPlaced) and news.placement:
            logger.info("Ray has started an agent on %s", news.address)
        for host in list(self._host_by_identity.values()):
            if isinstance(news, HostGone) and host.hello.placement == news.placement:
                self._lose(host, news.reason)

    @property
    def places_taken(self) -> PlacesTaken:
        return PlacesTaken(placements=[host.hello.placement for host in self._host_by_place.values()])

    def spawn(self, spec: ProcessSpec) -> ChildProcess:
        if spec.unit == LAUNCHER:
            spec = replace(spec, arguments=[*spec.arguments, f"--agents={self._address}"])
        if spec.host == 0:
            return self._local.spawn(spec)
        host = self._host_by_place[spec.host]

        def kill(key: str) -> None:
            self._channel.send_to(host.identity, Kill(process=key))

        process = RemoteProcess(spec, host.name, self._wait, kill)
        host.processes[process.key] = process
        assert spec.unit.role == "worker" or spec.unit.role == "tier", "other processes run on the head"
        order = Spawn(
            process=process.key,
            role=spec.unit.role,
            replica=spec.unit.place,
            number=spec.number,
            host=spec.host,
            rank="" if spec.rank is None else str(spec.rank),
            arguments=list(spec.arguments),
        )
        self._channel.send_to(host.identity, order)
        return process

    def _wait(self, process: RemoteProcess, timeout_s: float) -> None:
        """Take messages until a process has ended, at most `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        poller = zmq.Poller()
        for waker in self.wakers:
            poller.register(waker, zmq.POLLIN)
        while not process.has_ended and (rest_s := deadline - time.monotonic()) > 0:
            poller.poll(int(min(rest_s, PING_INTERVAL_S) * 1000) + 1)
            self.turn()
