"""JoinedHosts: the machines whose agents are connected to the head of an engine.

It owns the socket to the agents, decides which agents may join, and keeps their leases. An agent that is silent for
LEASE_S is lost with its processes; the agent itself kills them if it has received nothing for as long. Silence is
checked only after all waiting messages are read, since this process may have been suspended.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import zmq

from ....ipc.errors import ConfigError, error_info
from ....ipc.messages.base import LEASE_S, PING_INTERVAL_S, PROTOCOL_VERSION, Ping
from ....ipc.messages.hosts import (
    AgentToHead,
    HeadToAgent,
    HostAccepted,
    HostFailed,
    HostHello,
    HostLeaving,
    HostPrepared,
    HostRefused,
    HostReleased,
    HostUnknown,
)
from ....ipc.sockets.channel import Channel
from ....ipc.sockets.client_auth import GROUP, HOSTS, ZapHandler
from ....ipc.sockets.endpoints import tcp_address
from ....ipc.sockets.keys import Keys
from ....ipc.sockets.zmq_sockets import new_socket
from ....ipc.spec.config.checkpoint_digest import checkpoint_digest
from ....ipc.spec.config.engine_spec import EngineSpec
from ....ipc.version import numerics_digest, tokenloom_version
from .blob_thread import BlobThread
from .host import Host

logger = logging.getLogger("tokenloom.supervisor")

FAREWELL_MS = 200  # time for sending the last messages


class JoinedHosts:
    """The joined hosts. After `listen`, `wakers` are the sockets with their messages, and `address` is where agents
    join."""

    def __init__(self, spec: EngineSpec, on_lost: Callable[[Host], None]) -> None:
        """Load the key file and digest the checkpoint. ConfigError if one of them is unusable. `on_lost` is called for
        each lost host."""
        assert spec.group_keys is not None, "resolve makes them"
        self._spec, self._on_lost, self._group_keys = spec, on_lost, spec.group_keys
        self._keys = Keys.load(spec.hosts_key_file)
        self._digest = checkpoint_digest(Path(spec.model_folder))
        self._sources = (tokenloom_version(), numerics_digest())
        self._host_by_identity: dict[bytes, Host] = {}
        self._refusal_by_address: dict[str, str] = {}  # by address: the last refusal
        self._ping_at = 0.0  # monotonic seconds
        self.wakers: Sequence[zmq.Socket[bytes]] = ()
        self.address = ""

    @property
    def all(self) -> list[Host]:
        """The hosts in the order in which they joined, prepared or not."""
        return list(self._host_by_identity.values())

    # ── sockets ──────────────────────────────────────────────────────────────────────────────────────────────────

    def listen(self, context: zmq.Context[zmq.Socket[bytes]], control: zmq.Socket[bytes]) -> None:
        """Open the socket for agents, and bind the control socket also for ranks on other hosts; the two take different
        keys. ConfigError if --listen-hosts cannot be bound."""
        listen = self._spec.endpoints.agents
        self._zap = ZapHandler(context, self._keys.client_public, HOSTS)
        self._zap.admit(GROUP, self._group_keys.client_public)
        socket = new_socket(context, zmq.ROUTER)
        try:
            self.address = self._keys.listen(socket, HOSTS, listen)
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

    @property
    def next_at(self) -> float:
        """Latest time at which `turn` must be called for a ping or the end of a lease, in monotonic seconds; inf
        without hosts."""
        lease_ends = (host.last_sign_at + LEASE_S for host in self.all)
        return min(self._ping_at, *lease_ends) if self._host_by_identity else math.inf

    def turn(self) -> None:
        """Process all messages, then check the leases and send pings."""
        self._zap.answer()
        for identity, message in self._channel.receive_from():
            self._on_message(identity, message)
        now = time.monotonic()
        for host in self.all:
            if now - host.last_sign_at > LEASE_S:
                self.lose(host, f"no sign of life for {now - host.last_sign_at:.1f} s")
            elif now >= self._ping_at:
                self.send(host, Ping())
        if now >= self._ping_at:
            self._ping_at = now + PING_INTERVAL_S

    def send(self, host: Host, message: HeadToAgent) -> None:
        self._channel.send_to(host.identity, message)

    def close(self) -> None:
        """Release all agents, which then kill the processes that still run."""
        for host in self.all:
            self.send(host, HostReleased())
        self._channel.socket.close(FAREWELL_MS)
        self._zap.socket.close()
        self._blobs.close()

    # ── agents ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _on_message(self, identity: bytes, message: AgentToHead) -> None:
        host = self._host_by_identity.get(identity)
        if isinstance(message, HostHello):
            self._greet(Host(identity, message))
        elif host is None:
            self._channel.send_to(identity, HostUnknown())
        else:
            host.last_sign_at = time.monotonic()
            self._on_news(host, message)

    def _greet(self, host: Host) -> None:
        """Accept or refuse a host. A machine has one agent for a head (`hold_name`): if an agent starts where another
        has joined, the other has ended, although neither Ray nor its lease has shown that yet."""
        if refusal := self._refusal(host.hello):
            self._refuse(host, refusal)
            return
        for known in [each for each in self.all if each.name == host.name]:
            self.lose(known, "another agent has started there")
        self._host_by_identity[host.identity] = host
        self.send(host, self._accepted)

    def _refusal(self, hello: HostHello) -> str:
        """Return why a host cannot serve, or "" if it can."""
        if hello.protocol_version != PROTOCOL_VERSION or (hello.version, hello.numerics) != self._sources:
            return (
                f"host {hello.address} runs tokenloom {hello.version} ({hello.numerics:.8}, protocol "
                f"{hello.protocol_version}), the head {self._sources[0]} ({self._sources[1]:.8}, protocol "
                f"{PROTOCOL_VERSION}): install the same versions of tokenloom, torch and transformers on all hosts"
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

    def _refuse(self, host: Host, reason: str) -> None:
        if self._refusal_by_address.get(host.name) != reason:  # not again: the agent may be restarted every second
            logger.warning("%s", reason)
        self._refusal_by_address[host.name] = reason
        self.send(host, HostRefused(error=error_info(ConfigError(reason))))
        self._host_by_identity.pop(host.identity, None)

    def _on_news(self, host: Host, message: AgentToHead) -> None:
        if isinstance(message, HostPrepared):
            self._on_prepared(host, message)
        elif isinstance(message, HostFailed):
            logger.warning("host %s cannot serve: %s", host.name, message.error.message)
            self.lose(host, message.error.message)
        elif isinstance(message, HostLeaving):
            self.lose(host, "its agent was stopped")
        elif not isinstance(message, HostHello):
            host.on_news(message)

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

    def lose_placement(self, placement: str, reason: str) -> None:
        """Remove the host that a launcher process has placed under this name, if it has joined."""
        for host in [each for each in self.all if each.hello.placement == placement]:
            self.lose(host, reason)

    def lose(self, host: Host, reason: str) -> None:
        """Remove a host. All its processes then count as ended."""
        del self._host_by_identity[host.identity]
        if host.is_prepared:
            logger.error("host %s is lost: %s", host.name, reason)
        host.on_lost(reason)
        self._on_lost(host)
