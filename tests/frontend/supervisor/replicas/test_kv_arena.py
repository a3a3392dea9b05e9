"""The arena is as large as the operator says, or enough for staging."""

from __future__ import annotations

import pytest

from tokenloom.frontend.supervisor.replicas.kv_arena import KVArena, arena_shape
from tokenloom.ipc.config.engine_config import EngineConfig
from tokenloom.ipc.errors import ConfigError
from tokenloom.ipc.messages.supervisor import Measured
from tokenloom.ipc.process.arena import Arena, ArenaShape
from tokenloom.ipc.process.machine_memory import available_bytes
from tokenloom.tests.support.engine_specs import new_spec

MIB = 1 << 20


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
    assert arena_shape(slot_bytes, host_bytes, 100 * MIB) == ArenaShape(num_slots=num_slots, slot_bytes=slot_bytes)


def test_too_little_and_too_much_memory_are_refused_with_the_numbers() -> None:
    with pytest.raises(
        ConfigError, match=r"--kv-host-bytes 1000 holds no KV block, which takes 8192 bytes on all ranks"
    ):
        arena_shape(5000, 1000, MIB)
    with pytest.raises(ConfigError, match=r"asks for 0.20 GiB, 100.0 MiB of memory is free beside the KV pool: lower"):
        arena_shape(5000, 200 * MIB, 100 * MIB)


def test_a_cpus_pool_which_takes_its_memory_later_counts_as_taken() -> None:
    free_bytes = available_bytes()
    for device, is_refused in (("cpu", True), ("cuda", False)):
        arena = KVArena(new_spec(config=EngineConfig(kv_host_bytes=free_bytes // 2), device=device))
        try:
            measured = Measured(max_blocks=9, block_bytes=free_bytes // 9, device=device)
            if is_refused:
                with pytest.raises(ConfigError, match="beside the KV pool"):
                    arena.fit(measured, 9)
            else:
                assert arena.fit(measured, 9) == ArenaShape(num_slots=4, slot_bytes=free_bytes // 9)
        finally:
            arena.close()


def test_the_memory_is_made_once_and_any_process_with_the_descriptor_maps_it() -> None:
    arena = KVArena(new_spec(config=EngineConfig(kv_disk="/nowhere")))
    shape = arena.fit(Measured(max_blocks=9, block_bytes=MIB, device="cpu"), 9)
    assert shape is not None
    one, other = Arena(arena.fds[0], shape), Arena(arena.fds[0], shape)
    one.slot(64)[:3] = b"end"
    assert bytes(other.slot(64)[:3]) == b"end"
    arena.close()
    arena.close()
