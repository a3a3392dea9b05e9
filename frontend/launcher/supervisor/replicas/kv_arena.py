"""KVArena: the memory of a replica's KV tiers, from the engine's start to its end.

Workers and tier process inherit its descriptor. It outlives all of them, so that a new core finds the content of its
slots again. An engine without tiers has none. On another host the host's agent creates the arena, and closes it when
its connection to the head ends.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from .....ipc.errors import ConfigError
from .....ipc.kv.pool_shape import PoolShape
from .....ipc.messages.supervisor import Measured
from .....ipc.process.arena import Arena, ArenaShape, new_arena
from .....ipc.process.machine_memory import available_bytes, gib
from .....ipc.spec.config.engine_spec import EngineSpec

STAGING_BYTES, STAGING_SLOTS = 64 << 20, 64  # minima, for blocks that move to and from other tiers


class KVArena:
    """Owner of the arena's descriptor; decides its size."""

    def __init__(self, spec: EngineSpec, free_bytes: Callable[[], int] = available_bytes) -> None:
        """free_bytes: returns the free memory of this machine that this replica may use."""
        self._spec, self._free_bytes = spec, free_bytes
        self.fds = [new_arena()] if spec.uses_tiers else []

    def fds_on(self, host: int) -> list[int]:
        """Return the descriptors that processes on a host inherit from here; on another host its agent adds its own."""
        return self.fds if host == 0 else []

    def arguments_on(self, host: int) -> list[str]:
        return [f"--arena-fd={fd}" for fd in self.fds_on(host)]

    def fit(self, measured: Measured, pool: PoolShape) -> ArenaShape | None:
        """Size the arena of this host, and return its shape for the blocks of all ranks, next to a `pool` of one KV
        group on each rank; None without tiers. ConfigError if --kv-host-bytes holds no slot or exceeds the free memory
        of a host."""
        if not self.fds:
            return None
        num_ranks, local = len(self._spec.ranks), [len(self._spec.ranks_on(host)) for host in self._spec.hosts]
        pool_bytes = max(local) * pool.num_bytes if self._spec.device == "cpu" else 0
        free_bytes = min(self._free_bytes(), measured.free_bytes or self._free_bytes())
        rest_bytes = max(free_bytes - pool_bytes, 0)  # a pool on the CPU takes its memory only when written
        (block_bytes,) = pool.block_bytes
        largest = arena_shape(max(local) * block_bytes, self._spec.config.kv_host_bytes, rest_bytes)
        shape = ArenaShape(num_slots=largest.num_slots, slot_bytes=num_ranks * block_bytes)
        Arena.resize(self.fds[0], shape.share(len(self._spec.ranks_on(0)), num_ranks))
        return shape

    def close(self) -> None:
        while self.fds:
            os.close(self.fds.pop())


def arena_shape(slot_bytes: int, host_bytes: int | None, free_bytes: int) -> ArenaShape:
    """Return a shape with as many slots as fit in `host_bytes` (--kv-host-bytes), or, if that is None, enough for
    staging. ConfigError if `host_bytes` is less than a slot or exceeds `free_bytes`."""
    stride = ArenaShape(num_slots=1, slot_bytes=slot_bytes).stride
    if host_bytes is None:
        return ArenaShape(num_slots=max(STAGING_BYTES // stride, STAGING_SLOTS), slot_bytes=slot_bytes)
    if host_bytes < stride:
        raise ConfigError(
            f"--kv-host-bytes {host_bytes} holds no KV block, which takes {stride} bytes on all ranks: raise it"
        )
    if host_bytes > free_bytes:
        raise ConfigError(
            f"--kv-host-bytes asks for {gib(host_bytes)}, {gib(free_bytes)} of memory is free beside the KV pool: "
            "lower it, or --kv-cache-memory-bytes, or raise the limit of the cgroup"
        )
    return ArenaShape(num_slots=host_bytes // stride, slot_bytes=slot_bytes)
