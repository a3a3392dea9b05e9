"""ProcessSpecs: the processes of each unit, with their arguments and inherited descriptors."""

from __future__ import annotations

from collections.abc import Mapping

from ...ipc.config.engine_spec import EngineSpec
from ..listening.http_listeners import HttpListeners
from .holdings import Holdings
from .kv_arena import KVArena
from .launcher import CORE, TIER, WORKERS, ProcessSpec, Unit


class ProcessSpecs:
    """Composes the command of each process; starts none."""

    def __init__(self, spec: EngineSpec, holdings: Holdings, arena: KVArena, listeners: HttpListeners) -> None:
        self._spec, self._holdings, self._arena, self._listeners = spec, holdings, arena, listeners

    def of(self, unit: Unit, numbers: Mapping[Unit, int], address: str) -> list[ProcessSpec]:
        """Return the processes to start: all ranks of a worker group, or the one process of another unit. `numbers`: of
        the units to be started or running; `address`: for clients."""
        number, generation = numbers[unit], ["--generation", str(numbers[WORKERS])]
        folder = self._holdings.model_folder
        reloaded = [] if folder == self._spec.model_folder else ["--model-folder", folder]  # else each host has its own
        held = [*reloaded, "--asleep", *self._holdings.asleep]
        if unit == WORKERS:
            arguments = [*generation, *self._arena.arguments, *held]
            return [
                ProcessSpec(
                    unit, number, rank, self._spec.host_of(rank), ["--rank", str(rank), *arguments], self._arena.fds
                )
                for rank in self._spec.ranks
            ]
        if unit == CORE:
            return [ProcessSpec(unit, number, arguments=["--epoch", str(number), *generation, *held])]
        if unit == TIER:
            arguments = [f"--number={number}", *self._arena.arguments]
            return [ProcessSpec(unit, number, arguments=arguments, inherited_fds=self._arena.fds)]
        fds = self._listeners.fds
        arguments = [f"--identity=frontend-{number}", f"--address={address}", *(f"--http-fd={fd}" for fd in fds)]
        return [ProcessSpec(unit, number, arguments=arguments, inherited_fds=fds)]
