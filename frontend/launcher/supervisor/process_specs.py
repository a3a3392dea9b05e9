"""ProcessSpecs: the processes of each unit, with their arguments and inherited descriptors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ....ipc.spec.config.engine_spec import EngineSpec
from ...listening.http_listeners import HttpListeners
from .frontends.kept_connections import KeptConnections
from .launcher import ProcessSpec, Unit
from .replica import Replica


class ProcessSpecs:
    """Composer of each process's command. It starts no process. Frontends inherit `state_fds`."""

    def __init__(
        self,
        spec: EngineSpec,
        replicas: Sequence[Replica],
        listeners: HttpListeners,
        kept: KeptConnections,
        state_fds: Sequence[int],
    ) -> None:
        self._spec, self._replicas, self._listeners, self._kept = spec, replicas, listeners, kept
        self._state_fds = state_fds

    def of(self, unit: Unit, numbers: Mapping[Unit, int], addresses: Sequence[str]) -> list[ProcessSpec]:
        """Return the processes to start: all ranks of a worker group, the tier process of each host, or the one process
        of another unit. `numbers`: the number of each unit; `addresses`: for clients, by frontend."""
        number = numbers[unit]
        if unit.role == "frontend":
            frontend = self.frontend(unit, number, addresses[unit.place])
            self._kept.hand_over(unit.place)
            return [frontend]
        replica = self._replicas[unit.place]
        spec = self._spec.of_replica(unit.place)
        holdings, arena = replica.holdings, replica.arena
        generation = ["--generation", str(numbers[replica.workers]), "--replica", str(replica.number)]
        folder = holdings.model_folder
        reloaded = [] if folder == self._spec.model_folder else ["--model-folder", folder]  # else each host has its own
        held = [*reloaded, "--asleep", *holdings.asleep]
        if unit.role == "worker":
            return [
                ProcessSpec(
                    unit,
                    number,
                    rank,
                    host := spec.host_of(rank),
                    ["--rank", str(rank), *generation, *arena.arguments_on(host), *held],
                    arena.fds_on(host),
                )
                for rank in spec.ranks
            ]
        if unit.role == "launcher":
            return [ProcessSpec(unit, number, arguments=[f"--number={number}"])]
        if unit.role == "core":
            arguments = ["--epoch", str(number), *generation, "--arena", str(replica.num_hosts_lost), *held]
            return [ProcessSpec(unit, number, arguments=arguments)]
        of_replica = [f"--number={number}", f"--replica={replica.number}"]  # arguments of the tier processes
        return [
            ProcessSpec(
                unit,
                number,
                host=host,
                arguments=[*of_replica, f"--host={host}", *arena.arguments_on(host)],
                inherited_fds=arena.fds_on(host),
            )
            for host in spec.hosts
        ]

    def frontend(self, unit: Unit, number: int, address: str, *, is_spare: bool = False) -> ProcessSpec:
        """Return a frontend to start. `address`: for clients. `is_spare`: it waits until it is to take over."""
        kept = self._kept.prepare(unit.place)
        arguments = [f"--index={unit.place}", f"--number={number}", f"--address={address}"]
        arguments += [f"--http-address={each}" for each in self._listeners.addresses]
        arguments += [f"{flag}={fd}" for flag, fd in zip(("--journal-fd", "--keeper-fd"), kept, strict=False)]
        arguments += ["--spare"] if is_spare else []
        return ProcessSpec(unit, number, arguments=arguments, inherited_fds=[*kept, *self._state_fds])
