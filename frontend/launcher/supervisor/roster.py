"""Roster: the units that are kept alive, with their numbers, restart policies and next starts."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import cache

import msgspec

from ....ipc.messages.progress_sum import add_up
from ....ipc.messages.supervisor import ArenaLost, Initialize, Measured, Progress, Served, TierUp
from ....ipc.process.machine_memory import available_bytes
from ....ipc.spec.config.engine_spec import EngineSpec
from .children import Child, Children
from .engine_state import EngineState
from .launcher import LAUNCHER, Unit
from .replica import NO_PROGRESS, Replica
from .replicas.restart_policy import RestartPolicy

STEADY_S = 30.0  # for processes that steps do not test, and for those that may be without work for long


class Roster:
    """Owner of the replicas, the restart policies and the times of planned starts, by unit: the processes that are
    started and replaced together (`Unit`). `numbers`: how often each unit was replaced, which is a worker group's
    generation and a core's epoch."""

    def __init__(self, spec: EngineSpec, children: Children) -> None:
        self._spec, self._children = spec, children
        num_replicas = 0 if spec.remote_cores else spec.config.data_parallel_size  # a gateway starts no cores
        share = cache(lambda: available_bytes() // num_replicas)  # computed once, before any replica takes memory
        self.replicas = [Replica(spec, number, share) for number in range(num_replicas)]
        self.frontends = [Unit("frontend", place) for place in range(spec.config.api_server_count)]
        self._launchers = [LAUNCHER] if spec.config.distributed_executor_backend == "ray" else []
        self.numbers = dict.fromkeys(self.units, 0)
        self.start_at: dict[Unit, float] = {}  # by unit to be started; monotonic seconds
        self.resting: set[Unit] = set()  # frontends whose restart waits while others serve
        self.policies = {unit: self._new_policy(unit) for unit in self.units}

    def _new_policy(self, unit: Unit) -> RestartPolicy:
        if unit.is_optional:
            return RestartPolicy(STEADY_S, counts_steps=False)
        return RestartPolicy(STEADY_S if unit.role == "frontend" or len(self.replicas) > 1 else None)

    @property
    def units(self) -> list[Unit]:
        """All units that are kept alive."""
        return [*(unit for replica in self.replicas for unit in replica.units), *self.frontends, *self._launchers]

    @property
    def frontend_children(self) -> list[Child]:
        """The processes of all frontends, ready or not."""
        return [child for unit in self.frontends for child in self._children.of(unit)]

    @property
    def alive(self) -> list[Replica]:
        """The replicas that were not given up."""
        return [replica for replica in self.replicas if replica.units]

    def is_up(self, replica: Replica) -> bool:
        """Return whether a replica serves."""
        return self._children.is_up(replica.core) and self._children.is_up(replica.workers)

    def replica_of(self, child: Child) -> Replica:
        """Return the replica to which a process belongs; the process must not be a frontend."""
        assert child.spec.unit.role != "frontend"
        return self.replicas[child.spec.unit.place]

    def on_failure(self, child: Child) -> float | None:
        """Count the loss of a process, and return the seconds until the next start of its unit; None: give up."""
        ran_s = None if child.process.is_blameless else time.monotonic() - child.started_at
        return self.policies[child.spec.unit].on_failure(ran_s)

    def replace(self, unit: Unit, delay_s: float) -> None:
        """Kill the processes of a unit and schedule the start of their successors after `delay_s`."""
        self._children.remove(unit)
        self.numbers[unit] += 1
        self.start_at[unit] = time.monotonic() + delay_s

    def give_up(self, replica: Replica) -> None:
        """Kill the processes of a replica, which are not started again."""
        for unit in replica.units:
            self._children.remove(unit)
            self.start_at.pop(unit, None)
        replica.units = []
        replica.on_core_lost()

    def startable(self, *, is_serving: bool) -> dict[Unit, float]:
        """Return the units that can be started, each with its time of start. In a serving engine a core can be started
        only while its workers are up."""
        waits = {each.core for each in self.replicas if is_serving and not self._children.is_up(each.workers)}
        due = self.start_at.items()
        return {unit: when for unit, when in due if unit not in waits and not self._children.obstacle(unit)}

    def report_tiers(self, replica: Replica) -> None:
        """Send TierUp to a replica's core if the core and its tier processes are up."""
        if self._children.is_up(replica.core) and self._children.is_up(replica.tier):
            others = tuple(each.address for each in self._children.of(replica.tier) if each.address)
            self._children.send_to(replica.core, TierUp(number=self.numbers[replica.tier], others=others))

    def report_lost_arenas(self) -> None:
        """Send ArenaLost to each core with ranks on a host that was lost, before any message of the host's successor
        reaches it."""
        for replica in self.replicas:
            if replica.tier in replica.units and self._children.num_hosts_lost(replica.number) > replica.num_hosts_lost:
                replica.num_hosts_lost = self._children.num_hosts_lost(replica.number)
                self._children.announce(ArenaLost(arena=replica.num_hosts_lost), replica.core)

    def on_measured(self, replica: Replica, measured: Measured) -> Initialize | None:
        """Send the sizes of a replica to its processes once all its workers have measured. Return the sizes if they are
        new, else None."""
        if (group := self._children.measured(replica.workers)) is None:
            return None
        if replica.sizes is not None:
            replica.check(group)
            self._children.send_to(replica.workers, replica.sizes)
            return None
        sizes = replica.fit(group)
        self._children.send_to(replica.workers, sizes)  # later ranks get it when they have measured
        self._children.announce(sizes, replica.core, replica.tier)
        pools = [each.sizes.pool for each in self.replicas if each.sizes is not None]
        smallest = min(pools, key=lambda pool: pool.num_bytes)
        joint = msgspec.structs.replace(
            sizes,
            pool=smallest,
            num_all_blocks=sum(pool.num_usable for pool in pools),
            max_model_len=self._spec.fitted_model_len(smallest),
        )
        self._children.announce(joint, *self.frontends)
        return sizes

    def on_progress(self, child: Child, report: Progress | Served) -> None:
        """Record a report of a core or a frontend. It resets the count of failures of a frontend that has served, or of
        all units of a replica in which steps have ended."""
        if isinstance(report, Served):
            self.policies[child.spec.unit].on_progress()
        elif (replica := self.replica_of(child)).note(report):
            for unit in replica.units:
                self.policies[unit].on_progress()

    def progress(self) -> Progress:
        """Return the sum of the cores' last reports, with the state of their processes."""
        alive, children = self.alive, self._children
        obstacles = [children.obstacle(each.workers) for each in alive]
        workers = [child for each in alive for child in children.of(each.workers)]
        return msgspec.structs.replace(
            add_up([each.whole_progress() for each in self.replicas] or [NO_PROGRESS]),
            num_restarts=sum(policy.num_restarts for policy in self.policies.values()),
            worker_memory_bytes=[child.process.resident_bytes() for child in workers],
            frontends=[
                each.spec.identity.decode() for unit in self.frontends for each in children.of(unit) if each.is_ready
            ],
            is_core_up=any(children.is_up(each.core) for each in alive),
            obstacle=obstacles[0] if obstacles and all(obstacles) else "",
            is_asleep=any(each.holdings.asleep for each in alive),
        )

    def state(self, places: list[str], uptime_s: float, phase: str, progress: Progress) -> EngineState:
        """Return the engine's state to log for the operator."""
        return EngineState(
            places=places,
            uptime_s=uptime_s,
            phase=phase,
            children=self._children.all,
            progress=progress,
            progress_age_s=self.progress_age_s,
            num_restarts=self.num_restarts,
        )

    @property
    def progress_age_s(self) -> float:
        """The age in seconds of the oldest of the cores' last reports."""
        return time.monotonic() - min((each.progress_at for each in self.alive), default=time.monotonic())

    @property
    def num_restarts(self) -> Mapping[str, int]:
        """The number of restarts of each unit, by its name."""
        return {unit.name: policy.num_restarts for unit, policy in self.policies.items()}
