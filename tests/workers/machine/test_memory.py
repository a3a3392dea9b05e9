"""The size of the KV pool follows options and free memory, and an unused pool takes no memory."""

from __future__ import annotations

import os
from itertools import count
from random import Random
from typing import Any

import psutil
import pytest
import torch

from tokenloom.ipc.errors import ConfigError
from tokenloom.ipc.kv.pool_shape import PoolShape
from tokenloom.workers.machine.memory import KVCacheLimits, fit_on_cpu
from tokenloom.workers.step.kv_cache import KVCacheSpec

MIB = 1 << 20
TWO_GROUPS: dict[str, Any] = {"block_bytes": (MIB, MIB // 16), "blocks_per_row": (10, 40)}  # a slab has 1, or 16
CUT_BLOCKS: dict[str, Any] = {**TWO_GROUPS, "block_bytes": (MIB, MIB // 16 - 1)}  # a slab has 2, or 31 whole ones


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
        (limits(**TWO_GROUPS), 999, 500, 1 + 40 + 10),
        (limits(**TWO_GROUPS), 999, 3, 1 + 10 + 3),  # one request
        (limits(**TWO_GROUPS), 13, 3, 3),  # which does not fit
        (limits(num_blocks=4, **TWO_GROUPS), 999, 0, 1 + 3 + 1),  # more than 4: room for a request of 3
        (limits(num_blocks=31, **TWO_GROUPS), 999, 0, 31),
        (limits(num_bytes=7 * MIB + 5, **TWO_GROUPS), 100, 0, 7),
        (limits(num_bytes=3 * MIB, **TWO_GROUPS), 100, 0, 3),  # the least
        (limits(**CUT_BLOCKS), 999, 500, 2 * (1 + 20 + 6)),
        (limits(**CUT_BLOCKS), 999, 3, 2 * (1 + 5 + 2)),
        (limits(num_blocks=4, **CUT_BLOCKS), 999, 0, 2 * (1 + 2 + 1)),
        (limits(num_blocks=31, **CUT_BLOCKS), 999, 0, 32),  # whole slabs
        (limits(num_bytes=7 * MIB + 5, **CUT_BLOCKS), 100, 0, 6),
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


@pytest.mark.parametrize(("groups", "slab_bytes"), [(TWO_GROUPS, MIB), (CUT_BLOCKS, 2 * MIB)])
def test_memory_for_less_than_a_slab_of_each_group_and_one_of_null_blocks_is_a_config_error(
    groups: dict[str, Any], slab_bytes: int
) -> None:
    least = 3 * slab_bytes
    with pytest.raises(ConfigError, match=f"holds 2 slabs of {slab_bytes} bytes, 3 are the least: raise"):
        limits(num_bytes=least - 1, **groups).fit(free_bytes=9 * MIB, share_bytes=9 * MIB)
    with pytest.raises(ConfigError, match=f"holds 2 slabs of {slab_bytes} bytes, 3 are the least: free memory"):
        limits(**groups).fit(free_bytes=least - 1, share_bytes=least - 1)
    assert limits(num_bytes=least, **groups).fit(9 * MIB, 9 * MIB) == limits(**groups).fit(least, least) == least


def test_a_request_of_the_largest_length_fits_into_the_memory_that_is_taken_for_it_and_all_rows_into_the_most() -> None:
    random = Random(0)
    for _ in range(50):
        sizes = [64 * random.randint(1, 60) for _ in range(random.randint(1, 4))]
        per_row = [random.randint(1, 99) for _ in sizes]
        pool = limits(block_bytes=sizes, blocks_per_row=per_row)
        for share_bytes, num_rows in ((0, 1), (1 << 40, 4)):
            shape = PoolShape.of(pool.fit(1 << 40, share_bytes), sizes)
            num_slabs = shape.num_slabs - 1  # without the null blocks
            for size, num_held in zip(sizes, per_row, strict=True):
                num_slabs -= slabs_filled(shape.slab_bytes, size, num_rows * num_held)
            assert num_slabs >= 0


def slabs_filled(slab_bytes: int, size: int, num_blocks: int) -> int:
    """Return the slabs, from slab 1 on, whose whole blocks of this size are `num_blocks` or more."""
    for slab in count(1):
        begin, end = slab * slab_bytes, (slab + 1) * slab_bytes
        num_blocks -= sum(begin <= byte and byte + size <= end for byte in range(begin // size * size, end, size))
        if num_blocks <= 0:
            return slab
    raise AssertionError


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
