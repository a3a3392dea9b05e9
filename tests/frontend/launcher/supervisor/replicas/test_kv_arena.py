"""The arena is as large as the operator says, or enough for staging."""

from __future__ import annotations

import os
from contextlib import closing
from typing import Any

import pytest

from tokenloom.frontend.launcher.supervisor.replicas.kv_arena import KVArena, arena_shape
from tokenloom.ipc.errors import ConfigError
from tokenloom.ipc.kv.pool_shape import PoolShape
from tokenloom.ipc.messages.supervisor import Measured
from tokenloom.ipc.process.arena import Arena, ArenaShape
from tokenloom.ipc.process.machine_memory import available_bytes
from tokenloom.ipc.spec.config.engine_config import EngineConfig
from tokenloom.ipc.spec.config.engine_spec import EngineSpec
from tokenloom.tests.support.engine_specs import new_spec

MIB = 1 << 20
UNEVEN = MIB // 4 - 4096  # fewer than 32 of them never fill whole MiB


def measured_pool(*block_bytes: int, **measured: Any) -> tuple[Measured, PoolShape]:
    """A pool of 9 blocks of the largest size, and the report of a rank with as much memory."""
    pool = PoolShape(9, max(block_bytes), block_bytes)
    return Measured(pool_bytes=pool.num_bytes, block_bytes=pool.block_bytes, **measured), pool


@pytest.mark.parametrize(
    ("slot_bytes", "host_bytes", "num_slots"),
    [
        (MIB, None, 64),
        (4096, None, 16384),  # 64 MiB
        (5000, None, 8192),  # two pages each
        (3 * MIB, None, 64),  # 192 MiB
        (MIB, 100 * MIB, 100),
        (MIB - 1, 100 * MIB, 100),
        (MIB + 1, 100 * MIB, 99),
        (MIB, MIB, 1),
    ],
)
def test_slots_fill_the_memory(slot_bytes: int, host_bytes: int | None, num_slots: int) -> None:
    assert arena_shape([slot_bytes], host_bytes, 100 * MIB) == ArenaShape(num_slots, (1,), (slot_bytes,))


@pytest.mark.parametrize(
    ("slot_bytes", "host_bytes", "shape"),
    [
        ((MIB, MIB // 4), None, ArenaShape(80, (1, 4), (MIB, MIB // 4))),  # 64 slabs for 64 slots, and 16
        ((MIB, UNEVEN), None, ArenaShape(10, (8, 32), (MIB, UNEVEN))),  # 8 slabs for 64 slots, and 2
        ((MIB, MIB - 1), None, ArenaShape(128, (1, 1), (MIB, MIB - 1))),
        ((MIB // 4, MIB // 4), None, ArenaShape(256, (1, 1), (MIB // 4, MIB // 4))),  # 64 MiB
        ((MIB, MIB // 4), 100 * MIB, ArenaShape(100, (1, 4), (MIB, MIB // 4))),
        ((MIB, UNEVEN), 100 * MIB, ArenaShape(12, (8, 32), (MIB, UNEVEN))),
        ((100, MIB), 16 * MIB, ArenaShape(16, (256, 1), (100, MIB))),  # a slot of two fills a page
        ((MIB, MIB // 4), 2 * MIB, ArenaShape(2, (1, 4), (MIB, MIB // 4))),
        ((MIB, UNEVEN), 16 * MIB, ArenaShape(2, (8, 32), (MIB, UNEVEN))),
    ],
)
def test_slabs_of_several_groups_fill_the_memory_and_staging_holds_64_of_each(
    slot_bytes: tuple[int, ...], host_bytes: int | None, shape: ArenaShape
) -> None:
    assert arena_shape(slot_bytes, host_bytes, 100 * MIB) == shape


def test_too_little_and_too_much_memory_are_refused_with_the_numbers() -> None:
    few = r"--kv-host-bytes 1000 holds no KV block, which takes 8192 bytes on all ranks"
    many = r"asks for 0.20 GiB, 100.0 MiB of memory is free beside the KV pool: lower"
    for host_bytes, message in ((1000, few), (200 * MIB, many)):
        with pytest.raises(ConfigError, match=message):
            arena_shape([5000], host_bytes, 100 * MIB)
    for smaller, slab_bytes in ((MIB // 4, MIB), (UNEVEN, 8 * MIB)):
        few = rf"holds no blocks of each of 2 KV groups, which take {2 * slab_bytes} bytes on all ranks: raise it"
        with pytest.raises(ConfigError, match=few):
            arena_shape([MIB, smaller], 2 * slab_bytes - 1, 100 * MIB)


def test_a_cpus_pool_which_takes_its_memory_later_counts_as_taken() -> None:
    free_bytes = available_bytes()
    for device in ("cpu", "cuda"):
        spec = new_spec(config=EngineConfig(kv_host_bytes=free_bytes // 2), device=device)
        measured, pool = measured_pool(free_bytes // 9, device=device)
        with closing(KVArena(spec)) as arena:
            if device == "cuda":
                assert arena.fit(measured, pool) == ArenaShape(4, (1,), (free_bytes // 9,))
            else:
                with pytest.raises(ConfigError, match="beside the KV pool"):
                    arena.fit(measured, pool)


def test_the_memory_is_made_once_and_any_process_with_the_descriptor_maps_it() -> None:
    arena = KVArena(new_spec(config=EngineConfig(kv_disk="/nowhere")))
    shape = arena.fit(*measured_pool(MIB, device="cpu"))
    assert shape is not None
    one, other = Arena(arena.fds[0], shape), Arena(arena.fds[0], shape)
    one.slot(64)[:3] = b"end"
    assert bytes(other.slot(64)[:3]) == b"end"
    arena.close()
    arena.close()


HOSTS = {"hosts": 2, "listen_hosts": "tcp://10.0.0.1:7100", "hosts_key_file": "k"}


def hosts_spec(**options: Any) -> EngineSpec:
    return new_spec(config=EngineConfig(**HOSTS, **options), device="cuda")


def test_each_host_has_the_parts_of_its_ranks_and_the_smallest_memory_counts() -> None:
    spec = hosts_spec(kv_host_bytes=64 * MIB, tensor_parallel_size=3)
    with closing(KVArena(spec)) as arena:
        shape = arena.fit(*measured_pool(MIB, device="cuda", free_bytes=64 * MIB))
        assert shape == ArenaShape(32, (1,), (3 * MIB,))
        assert [shape.share(len(spec.ranks_on(host)), 3).slot_bytes for host in (0, 1)] == [(2 * MIB,), (MIB,)]
        assert os.fstat(arena.fds[0]).st_size == 64 * MIB
        assert arena.fds_on(1) == [] and arena.arguments_on(0) == [f"--arena-fd={arena.fds[0]}"]
        with pytest.raises(ConfigError, match=r"asks for 64.0 MiB, 63.0 MiB of memory is free"):
            arena.fit(*measured_pool(MIB, device="cuda", free_bytes=63 * MIB))
    spec = hosts_spec(kv_host_bytes=96 * MIB, tensor_parallel_size=3)
    with closing(KVArena(spec)) as arena:
        shape = arena.fit(*measured_pool(MIB, MIB // 4 - 1, device="cuda", free_bytes=96 * MIB))
        assert shape == ArenaShape(48, (1, 4), (3 * MIB, 3 * (MIB // 4 - 1)))
        assert os.fstat(arena.fds[0]).st_size == 96 * MIB
    spec = hosts_spec(kv_host_bytes=4 * MIB, data_parallel_size=2).of_replica(1)
    assert spec.hosts == [1], "it has no ranks here, and takes no memory here"
    with closing(KVArena(spec)) as arena:
        assert arena.fit(*measured_pool(MIB, device="cuda")) == ArenaShape(4, (1,), (MIB,))
        assert os.fstat(arena.fds[0]).st_size == 0
