"""Hosts: starts the workers of an engine on several machines, through the agents that have joined it.

Each further host of the engine is a place with a number, which a joined host takes. Joined hosts beyond that are spare:
a spare host takes the place of a host that is lost.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import zmq

from ....ipc.messages.base import PING_INTERVAL_S
from ....ipc.messages.hosts import Kill, Spawn
from ....ipc.messages.supervisor import HostGone, HostPlaced, PlacesTaken
from ....ipc.spec.config.engine_spec import EngineSpec
from ..supervisor.launcher import LAUNCHER, ChildProcess, Launcher, ProcessSpec, Unit
from .host import Host
from .joined_hosts import JoinedHosts
from .remote_process import RemoteProcess

logger = logging.getLogger("tokenloom.supervisor")


class Hosts:
    """Launcher for several machines. Owns the places of hosts, and `joined`; another launcher, `local`, starts the
    processes on this host."""

    def __init__(self, spec: EngineSpec, local: Launcher) -> None:
        """Load the key file and digest the checkpoint. ConfigError if one of them is unusable. `local`: the launcher
        for this host."""
        self._spec, self._local = spec, local
        self._has_ray = spec.config.distributed_executor_backend == "ray"
        self.joined = JoinedHosts(spec, self._on_lost)
        self._host_by_place: dict[int, Host] = {}  # places start at 1; 0 is this host
        replicas = map(spec.of_replica, range(spec.config.data_parallel_size))
        self._places = {each.replica: {each.host_of(rank) for rank in each.ranks} for each in replicas}
        self._is_complete = False
        self._num_lost_by_place: Counter[int] = Counter()
        self.wakers: Sequence[zmq.Socket[bytes]] = ()

    def listen(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        control: zmq.Socket[bytes],
        receive_placements: Callable[[], None],
    ) -> None:
        """Let agents join. ConfigError if --listen-hosts cannot be bound."""
        self._control, self._receive_placements = control, receive_placements
        self.joined.listen(context, control)
        self.wakers = self.joined.wakers
        if not self._has_ray:
            key_file = self._spec.hosts_key_file
            logger.info("hosts join with `engine-launch join %s --key-file %s`", self.joined.address, key_file)

    @property
    def next_at(self) -> float:
        return self.joined.next_at

    def turn(self) -> None:
        self._local.turn()
        self.joined.turn()
        self._fill_places()

    def close(self) -> None:
        self.joined.close()
        self._local.close()

    # ── places ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _on_lost(self, host: Host) -> None:
        places = [place for place, each in self._host_by_place.items() if each is host]
        self._num_lost_by_place.update(places)
        for place in places:
            del self._host_by_place[place]

    def _fill_places(self) -> None:
        """Give each free place to a prepared host that has none."""
        taken = set(self._host_by_place.values())
        spare = [host for host in self.joined.all if host.is_prepared and host not in taken]
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
        return f"{hosts}: run `engine-launch join {self.joined.address}` there"

    def obstacle(self, unit: Unit) -> str:
        is_of_host = unit.role in ("worker", "tier")
        missing = self._missing if is_of_host and self._has_free_place(unit.place) else ""
        return self._local.obstacle(unit) or missing

    def _has_free_place(self, replica: int) -> bool:
        """Return whether a replica has workers on a place that no host has taken."""
        return not self._places[replica].isdisjoint(self._free_places)

    def num_hosts_lost(self, replica: int) -> int:
        return sum(self._num_lost_by_place[place] for place in self._places[replica])

    def on_placement(self, news: HostPlaced | HostGone) -> None:
        self._local.on_placement(news)
        if isinstance(news, HostGone):
            self.joined.lose_placement(news.placement, news.reason)
        elif news.placement:
            logger.info("Ray has started an agent on %s", news.address)

    @property
    def places_taken(self) -> PlacesTaken:
        return PlacesTaken(placements=[host.hello.placement for host in self._host_by_place.values()])

    # ── processes ────────────────────────────────────────────────────────────────────────────────────────────────

    def spawn(self, spec: ProcessSpec) -> ChildProcess:
        if spec.unit == LAUNCHER:
            spec = replace(spec, arguments=[*spec.arguments, f"--agents={self.joined.address}"])
        if spec.host == 0:
            return self._local.spawn(spec)
        host = self._host_by_place[spec.host]

        def kill(key: str) -> None:
            self.joined.send(host, Kill(process=key))

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
        self.joined.send(host, order)
        return process

    def _wait(self, process: RemoteProcess, timeout_s: float) -> None:
        """Process messages until `process` has ended, for at most `timeout_s`. They include Ray's reports: that of a
        killed agent comes while the workers of its group are removed, long before the host's lease ends."""
        deadline = time.monotonic() + timeout_s
        poller = zmq.Poller()
        for waker in (self._control, *self.wakers):
            poller.register(waker, zmq.POLLIN)
        while not process.has_ended and (rest_s := deadline - time.monotonic()) > 0:
            poller.poll(int(min(rest_s, PING_INTERVAL_S) * 1000) + 1)
            self._receive_placements()
            self.turn()
