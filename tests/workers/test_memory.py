"""The size of the KV pool follows options and free memory, and an unused pool takes no memory."""

from __future__ import annotations

import os

import psutil
import pytest
import torch

from tokenloom.ipc.errors import ConfigError
from tokenloom.workers.kv_cache import KVCacheSpec
from tokenloom.workers.memory import KVCacheLimits, fit_on_cpu

MIB = 1 << 20


def limits(num_blocks: int | None = None, num_bytes: int | None = None, **fields: int) -> KVCacheLimits:
    numbers = {"block_bytes": MIB, "max_blocks_per_row": 10, "max_num_seqs": 4, **fields}
    return KVCacheLimits(**numbers, num_blocks=num_blocks, num_bytes=num_bytes)


def test_the_configured_number_of_blocks_is_used() -> None:
    assert limits(num_blocks=1000).fit(free_bytes=2000 * MIB, share_bytes=5 * MIB) == 1000


def test_more_blocks_than_memory_is_a_config_error_with_both_numbers() -> None:
    with pytest.raises(ConfigError, match=r"--num-kv-blocks 3072 needs 3\.00 GiB .* 2\.00 GiB is free"):
        limits(num_blocks=3072).fit(free_bytes=2048 * MIB, share_bytes=0)


def test_the_configured_bytes_are_rounded_down_to_whole_blocks() -> None:
    assert limits(num_bytes=7 * MIB + 5).fit(free_bytes=100 * MIB, share_bytes=0) == 7
    with pytest.raises(ConfigError, match="--kv-cache-memory-bytes"):
        limits(num_bytes=7 * MIB).fit(free_bytes=6 * MIB, share_bytes=0)


def test_the_pool_has_at_most_the_blocks_that_full_rows_can_use() -> None:
    assert limits().fit(free_bytes=1000 * MIB, share_bytes=500 * MIB) == 4 * 10 + 1


def test_the_cpu_share_grows_to_one_request_of_max_model_len_if_that_fits() -> None:
    assert limits().fit(free_bytes=100 * MIB, share_bytes=3 * MIB) == 11
    assert limits().fit(free_bytes=10 * MIB, share_bytes=3 * MIB) == 3


@pytest.mark.parametrize("share", [-5 * MIB, 0, 2 * MIB - 1])
def test_memory_for_fewer_than_two_blocks_is_a_config_error(share: int) -> None:
    with pytest.raises(ConfigError, match="2 are the least: free memory"):
        limits().fit(free_bytes=share, share_bytes=share)
    with pytest.raises(ConfigError, match="2 are the least: raise --kv-cache-memory-bytes"):
        limits(num_bytes=share).fit(free_bytes=9 * MIB, share_bytes=9 * MIB)


def test_local_ranks_share_the_memory() -> None:
    roomy = limits(max_num_seqs=1 << 20, max_blocks_per_row=1)
    assert [fit_on_cpu(roomy, 800 * MIB, num_ranks) for num_ranks in (1, 4)] == [400, 100]


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
