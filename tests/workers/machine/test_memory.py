"""The size of the KV pool follows options and free memory, and an unused pool takes no memory."""

from __future__ import annotations

import os
from typing import Any

import psutil
import pytest
import torch

from tokenloom.ipc.errors import ConfigError
from tokenloom.workers.machine.memory import KVCacheLimits, fit_on_cpu
from tokenloom.workers.step.kv_cache import KVCacheSpec

MIB = 1 << 20
TWO_GROUPS: dict[str, Any] = {"block_bytes": (MIB, MIB // 16), "blocks_per_row": (10, 40)}  # a slab has 2, or 32


def limits(num_blocks: int | None = None, num_bytes: int | None = None, **fields: Any) -> KVCacheLimits:
    numbers: dict[str, Any] = {"block_bytes": (MIB,), "blocks_per_row": (10,), "max_num_seqs": 4, **fields}
    return KVCacheLimits(**numbers, num_blocks=num_blocks, num_bytes=num_bytes)


@pytest.mark.parametrize(
    ("pool", "free_mib", "share_mib", "num_blocks"),
    [
        (limits(num_blocks=1000), 2000, 5, 1000),
        (limits(num_bytes=7 * MIB + 5), 100, 0, 7),  # whole blocks
        (limits(), 1000, 500, 4 * 10 + 1),  # as full rows can use
        (limits(), 100, 3, 11),  # one request of max_model_len, if that fits
        (limits(), 10, 3, 3),
        (limits(**TWO_GROUPS), 999, 500, 2 * (1 + 20 + 5)),
        (limits(**TWO_GROUPS), 999, 3, 2 * (1 + 5 + 2)),  # one request
        (limits(num_blocks=4, **TWO_GROUPS), 999, 0, 2 * (1 + 2 + 1)),  # more than 4: room for a request of 3
        (limits(num_blocks=30, **TWO_GROUPS), 999, 0, 30),
        (limits(num_bytes=7 * MIB + 5, **TWO_GROUPS), 100, 0, 6),
    ],
)
def test_the_pool_follows_the_options_the_memory_and_what_rows_can_use(
    pool: KVCacheLimits, free_mib: int, share_mib: int, num_blocks: int
) -> None:
    assert pool.fit(free_mib * MIB, share_mib * MIB) == num_blocks * MIB


def test_a_pool_larger_than_the_memory_is_a_config_error_with_both_numbers() -> None:
    with pytest.raises(ConfigError, match=r"--num-kv-blocks 3072 needs 3\.00 GiB .* 2\.00 GiB is free"):
        limits(num_blocks=3072).fit(2048 * MIB, 0)
    with pytest.raises(ConfigError, match="--kv-cache-memory-bytes"):
        limits(num_bytes=7 * MIB).fit(6 * MIB, 0)


@pytest.mark.parametrize("share", [-5 * MIB, 0, 2 * MIB - 1])
def test_memory_for_fewer_than_two_blocks_is_a_config_error(share: int) -> None:
    with pytest.raises(ConfigError, match="2 are the least: free memory"):
        limits().fit(free_bytes=share, share_bytes=share)
    with pytest.raises(ConfigError, match="2 are the least: raise --kv-cache-memory-bytes"):
        limits(num_bytes=share).fit(free_bytes=9 * MIB, share_bytes=9 * MIB)
    with pytest.raises(ConfigError, match="slabs of 2097152 bytes, 3 are the least: raise"):
        limits(num_bytes=5 * MIB, **TWO_GROUPS).fit(free_bytes=9 * MIB, share_bytes=9 * MIB)


def test_local_ranks_share_the_memory() -> None:
    roomy = limits(max_num_seqs=1 << 20, blocks_per_row=(1,))
    assert [fit_on_cpu(roomy, 800 * MIB, num_ranks) for num_ranks in (1, 4)] == [400 * MIB, 100 * MIB]


def test_pages_of_the_pool_take_no_memory_until_written() -> None:
    process = psutil.Process(os.getpid())
    before = process.memory_info().rss
    cache = KVCacheSpec(2, 2, 64, 16, torch.float32).allocate(1 << 14, torch.device("cpu"))
    assert cache.numel() * 4 == 512 * MIB
    assert process.memory_info().rss - before < 16 * MIB
    assert not cache[12345].any()
    cache[77, 1] = 1.5
    assert cache[77, 1].min() == 1.5 and not cache[77, 0].any()
    assert process.memory_info().rss - before < 64 * MIB
