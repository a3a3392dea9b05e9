"""KVArena: the memory of a replica's KV tiers, from the engine's start to its end.

Workers and tier process inherit its descriptor. It outlives all of them, so that a new core finds the content of its
slots again. An engine without tiers has none. On another host the host's agent creates the arena, and closes it when
its connection to the head ends.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import msgspec

from .....ipc.errors import ConfigError
from .....ipc.kv.pool_shape import PoolShape
from .....ipc.messages.supervisor import Measured
from .....ipc.process.arena import Arena, ArenaShape, new_arena
from .....ipc.process.machine_memory import available_bytes, gib
from .....ipc.spec.config.engine_spec import EngineSpec

STAGING_BYTES = 64 << 20  # least, for blocks that move to and from other tiers
STAGING_SLOTS = 64  # least, of each KV group


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
        """Size the arena of this host, and return its shape for the blocks of all ranks, next to a `pool` on each rank;
        None without tiers. ConfigError if --kv-host-bytes holds no slot of some KV group or exceeds the free memory of
        a host."""
        if not self.fds:
            return None
        num_ranks, local = len(self._spec.ranks), [len(self._spec.ranks_on(host)) for host in self._spec.hosts]
        pool_bytes = max(local) * pool.num_bytes if self._spec.device == "cpu" else 0
        free_bytes = min(self._free_bytes(), measured.free_bytes or self._free_bytes())
        rest_bytes = max(free_bytes - pool_bytes, 0)  # a pool on the CPU takes its memory only when written
        largest = arena_shape(
            [max(local) * size for size in pool.block_bytes], self._spec.config.kv_host_bytes, rest_bytes
        )
        shape = msgspec.structs.replace(largest, slot_bytes=tuple(num_ranks * size for size in pool.block_bytes))
        Arena.resize(self.fds[0], shape.share(len(self._spec.ranks_on(0)), num_ranks))
        return shape

    def close(self) -> None:
        while self.fds:
            os.close(self.fds.pop())


def arena_shape(slot_bytes: Sequence[int], host_bytes: int | None, free_bytes: int) -> ArenaShape:
    """Return a shape with as many slabs as fit in `host_bytes` (--kv-host-bytes), or, if that is None, enough for
    staging. slot_bytes: by KV group. ConfigError if `host_bytes` is less than a slab of each group or exceeds
    `free_bytes`."""
    shape = ArenaShape.of(slot_bytes, host_bytes or 0)
    if host_bytes is None:
        num_slabs = sum(-(-STAGING_SLOTS // count) for count in shape.slots_of_slab)
        return msgspec.structs.replace(shape, num_slabs=max(STAGING_BYTES // shape.slab_bytes, num_slabs))
    num_groups = len(slot_bytes)
    if shape.num_slabs < num_groups:
        blocks = "KV block, which takes" if num_groups == 1 else f"blocks of each of {num_groups} KV groups, which take"
        num_bytes = num_groups * shape.slab_bytes
        raise ConfigError(f"--kv-host-bytes {host_bytes} holds no {blocks} {num_bytes} bytes on all ranks: raise it")
    if host_bytes > free_bytes:
        raise ConfigError(
            f"--kv-host-bytes asks for {gib(host_bytes)}, {gib(free_bytes)} of memory is free beside the KV pool: "
            "lower it, or --kv-cache-memory-bytes, or raise the limit of the cgroup"
        )
    return shape
