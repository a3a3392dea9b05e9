"""The launcher process, `python -m tokenloom.frontend.launcher.ray.process`: lets Ray place the hosts of an engine.

It reserves the devices of this host and of the others in Ray, starts an agent on each other host, and reports the end
of an agent before the host's lease ends. Everything else passes between agents and head. Only it and the agents that it
has started import ray. These agents end with it, and its successor places new ones.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import math
import os
import queue
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import ray
import zmq
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ....ipc.child import EXIT_CONFIG, SupervisorChannel, run_child
from ....ipc.errors import ConfigError
from ....ipc.messages.supervisor import HostGone, HostPlaced, Phase, PlacesTaken, Ready
from ....ipc.sockets.keys import Keys
from ....ipc.spec.config.engine_spec import EngineSpec, identity_of
from .agent import AgentActor, AgentEnd, Place, own_place
from .cluster import Cluster, when_done
from .places import Placement, Places

logger = logging.getLogger("tokenloom.launcher")

START_SHARE = 0.1  # share of --start-timeout-s in which Ray has to place all hosts
NODE_LABEL = "ray.io/node-id"
LONGEST_WAIT_S = 86400.0
RETRY_MS = 1000


class GroupReservation:
    """Placement group of one bundle, and the actor in it (None for this host)."""

    def __init__(self, resources: dict[str, float], node_label: str) -> None:
        self._group: PlacementGroup = placement_group(
            [resources], "STRICT_PACK", bundle_label_selector=[{NODE_LABEL: node_label}]
        )
        strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=0)
        self.options: dict[str, Any] = {"scheduling_strategy": strategy, "num_cpus": resources.get("CPU", 0)}
        if "GPU" in resources:
            self.options["num_gpus"] = resources["GPU"]
        self.actor: Any = None

    def release(self) -> None:
        """Return the bundle to Ray, which kills the actor in it."""
        remove_placement_group(self._group)


class LauncherProcess:
    """The launcher process: its sockets, and the loop that places hosts."""

    def __init__(self, spec: EngineSpec, number: int, agents: str) -> None:
        """`number`: the count of earlier launchers of this engine; `agents`: the head's address for agents, empty if
        there are no other hosts."""
        self._spec, self._number, self._agents = spec, number, agents
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.supervisor = SupervisorChannel(self._context, spec, identity_of("launcher", number))
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._news: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()  # calls queued by Ray's threads
        self._taken: Sequence[str] = ()  # the last PlacesTaken.placements
        self._has_own_devices = self._is_ready = self._has_warned = False
        self._keys = msgspec.json.encode(Keys.load(spec.hosts_key_file)).decode() if agents else ""

    def run(self) -> None:
        begun = time.monotonic()
        self._cluster = cluster = Cluster() if self._number == 0 else self._wait_for_cluster()
        self.supervisor.send(Phase(name="joined Ray", duration_s=time.monotonic() - begun, detail=ray.__version__))
        self._places = Places(self._spec.config.hosts - 1, cluster.node, self._reserve)
        self._begun, self._limit_s = time.monotonic(), START_SHARE * self._spec.config.start_timeout_s
        self._own = GroupReservation(self._resources(0), cluster.node)
        self._ask(ray.remote(own_place).options(**self._own.options).remote(), self._on_own_place)
        poller = zmq.Poller()
        for source in (self.supervisor.socket, self._wake_fd):
            poller.register(source, zmq.POLLIN)
        while True:  # until the supervisor kills it, after the ranks on other hosts have ended
            poller.poll(int(self._wait_s() * 1000) + 1)
            try:
                self._turn()
            except RayError as error:
                raise ConfigError(f"the Ray cluster has ended, or another one is there now: {_brief(error)}") from None

    def _wait_for_cluster(self) -> Cluster:
        """Connect and return the cluster as soon as that is possible: it, or this node, may have ended with the
        previous launcher."""
        last_obstacle = ""
        while True:
            try:
                return Cluster()
            except ConfigError as error:
                if str(error) != last_obstacle:
                    logger.error("%s; waits for it", error)
                last_obstacle = str(error)
            self.supervisor.socket.poll(RETRY_MS)
            self._receive()

    def _receive(self) -> None:
        for message in self.supervisor.receive():
            if isinstance(message, PlacesTaken):
                self._taken = message.placements

    def _wait_s(self) -> float:
        limit_at = math.inf if self._is_ready or self._has_warned else self._begun + self._limit_s
        next_at = self._places.next_at if self._has_own_devices else math.inf
        return min(max(min(next_at, limit_at) - time.monotonic(), 0.0), LONGEST_WAIT_S)

    def _turn(self) -> None:
        self._receive()
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake_fd)
        with contextlib.suppress(queue.Empty):
            while True:
                self._news.get_nowait()()
        self._places.on_taken(self._taken)
        if self._has_own_devices:
            self._places.arrange(time.monotonic())
        self._check_placed()

    def _check_placed(self) -> None:
        """Report Ready once all hosts are placed. If that takes too long, log an error, or raise ConfigError during the
        engine's start."""
        if not self._is_ready and self._has_own_devices and self._places.is_placed:
            self._is_ready = True
            detail = f"{self._spec.config.hosts} of {self._spec.config.hosts} hosts"
            self.supervisor.send(Phase(name="placed", duration_s=time.monotonic() - self._begun, detail=detail))
            self.supervisor.send(Ready())
        elif not self._is_ready and not self._has_warned and time.monotonic() > self._begun + self._limit_s:
            if self._number == 0:
                raise ConfigError(self._impossible())
            logger.error("%s", self._impossible())
            self._has_warned = True

    # ── Ray ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _resources(self, host: int) -> dict[str, float]:
        """Return the resources to reserve for a host: its GPUs, or a CPU for each thread of its ranks."""
        spec, num_workers = self._spec, self._spec.num_workers_on(host)
        return {"GPU": num_workers} if spec.device == "cuda" else {"CPU": num_workers * (spec.config.num_threads or 1)}

    def _ask(self, ref: Any, then: Callable[[Any, Exception | None], None]) -> None:
        """Call `then` in this thread with the result or the error of a remote call."""

        def tell(result: object, error: Exception | None) -> None:
            self._news.put(lambda: then(result, error))
            os.eventfd_write(self._wake_fd, 1)

        when_done(ref, tell)

    def _on_own_place(self, place: Place | None, error: Exception | None) -> None:
        if place is None:
            raise ConfigError(f"Ray cannot start a task on this host: {_brief(error)}")
        self._has_own_devices = True
        self.supervisor.send(HostPlaced(placement="", address=place.address, visible_devices=place.visible_devices))

    def _reserve(self, placement: Placement) -> GroupReservation:
        """Let Ray start an agent on a node that is not excluded, and return the reservation. The other hosts have
        equally many ranks, or some have one less: each reserves for the larger number."""
        others = [self._resources(host) for host in range(1, self._spec.config.hosts)]
        largest = max(others, key=lambda each: max(each.values()))
        reservation = GroupReservation(largest, f"!in({','.join(sorted(placement.excluded))})")
        reservation.actor = ray.remote(AgentActor).options(**reservation.options).remote()
        started = reservation.actor.start.remote(self._agents, placement.name, self._keys)
        self._ask(started, lambda place, error: self._on_started(placement, reservation, place, error))
        return reservation

    def _on_started(
        self, placement: Placement, reservation: GroupReservation, place: Place | None, error: Exception | None
    ) -> None:
        if placement not in self._places.all:
            return
        if place is None:
            self._on_ended(placement, None, error)
            return
        self._places.on_placed(placement, place.node)
        self.supervisor.send(HostPlaced(placement=placement.name, address=place.address))
        self._ask(reservation.actor.wait.remote(), lambda end, error: self._on_ended(placement, end, error))

    def _on_ended(self, placement: Placement, end: AgentEnd | None, error: Exception | None) -> None:
        if placement not in self._places.all:
            return
        reason = f"Ray: {_brief(error)}" if end is None else str(end)
        self.supervisor.send(HostGone(placement=placement.name, reason=reason))
        is_refused = end is not None and end.code == EXIT_CONFIG
        self._places.on_gone(placement, reason, time.monotonic(), may_retry=not is_refused)

    def _impossible(self) -> str:
        """Return an error text with the resources that were requested and those that are free."""
        bundles = [self._resources(host) for host in range(self._spec.config.hosts)]
        (kind,) = bundles[0]
        asked = " and ".join(f"{each[kind]:g}" for each in bundles)
        text = (
            f"Ray has not placed hosts with {kind} {asked}, each on a node of its own, within "
            f"{self._limit_s:.0f} s; free beside the reserved: {kind} {self._cluster.free(kind)}: add or free nodes, "
            "or change --hosts or --tensor-parallel-size (the limit is a tenth of --start-timeout-s)"
        )
        return "; ".join([text, *(f"left out: {why}" for why in self._places.left_out.values())])

    def close(self) -> None:
        self._context.destroy(linger=200)


def _brief(error: Exception | None) -> str:
    return " ".join(str(error).split())[:300]


def main() -> int:
    parser = argparse.ArgumentParser(prog="tokenloom.frontend.launcher.ray.process")
    parser.add_argument("--number", type=int, default=0)
    parser.add_argument("--agents", default="", help="address of the head for agents")
    arguments = parser.parse_args()
    return run_child("launcher", lambda spec: LauncherProcess(spec, arguments.number, arguments.agents))


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)  # a normal exit would wait for Ray's threads
