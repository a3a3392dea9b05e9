"""Blocks of two lengths side by side: on a disk and in Redis, from the first store to a restart."""

from __future__ import annotations

import contextlib
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tokenloom.core.tiers.network.remote import RemoteSource
from tokenloom.core.tiers.object_file import ObjectFiles
from tokenloom.core.tiers.source import Source
from tokenloom.ipc.process.arena import PAGE
from tokenloom.tests.core.tiers.network.redis_server import RedisServer, needs_redis
from tokenloom.tests.core.tiers.slots import (
    DEADLINE_S,
    NAMESPACE,
    SIGNED,
    SLOT_BYTES,
    files_of,
    filled,
    find,
    key_of,
    load,
    open_disk,
    wait_for,
)
from tokenloom.tests.core.tiers.test_disk import bytes_at_one_instant

LARGE_BYTES = 5 * PAGE - 3
LENGTHS = (SLOT_BYTES, LARGE_BYTES)
OF_GROUPS = NAMESPACE._replace(slot_bytes=LENGTHS)
SMALL, LARGE = (ObjectFiles.size(length) for length in LENGTHS)
OpenSource = Callable[[], Source]


@pytest.fixture(params=["disk", pytest.param("remote", marks=needs_redis), pytest.param("sealed", marks=needs_redis)])
def open_source(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[OpenSource]:
    """Opens sources for the same place, one after the other."""
    with contextlib.ExitStack() as stack:
        if request.param == "disk":
            yield lambda: open_disk(tmp_path, namespace=OF_GROUPS)
            return
        server = stack.enter_context(contextlib.closing(RedisServer(tmp_path)))
        namespace = SIGNED._replace(slot_bytes=LENGTHS) if request.param == "sealed" else OF_GROUPS

        def open_remote() -> Source:
            source = stack.enter_context(contextlib.closing(RemoteSource(server.unix_url, lambda: None)))
            source.open(namespace)
            wait_for(source, lambda state: state.is_open)
            return source

        yield open_remote


def test_blocks_of_two_lengths_come_back_also_after_a_restart(open_source: OpenSource) -> None:
    source = open_source()
    small, large = filled(range(10)), filled(range(20, 30), num_bytes=LARGE_BYTES)
    mixed = [item for pair in zip(small, large, strict=True) for item in pair]
    assert source.store(mixed) == [True] * 20
    for _ in range(2):
        assert find(source, range(12)) == find(source, range(20, 32), num_bytes=LARGE_BYTES) == 10
        assert find(source, range(20, 30)) == find(source, range(10), num_bytes=LARGE_BYTES) == 0
        keys, deadline = [key_of(number) for number in range(100)], time.monotonic() + DEADLINE_S
        for num_bytes, held in ((SLOT_BYTES, range(10)), (LARGE_BYTES, range(20, 30))):
            assert source.may_have(keys, num_bytes, deadline) == [number in held for number in range(100)]
        assert load(source, range(12)) == [True] * 10 + [False] * 2
        assert load(source, range(20, 30), num_bytes=LARGE_BYTES) == [True] * 10
        assert source.state().rejected == {} and source.state().num_failed == 0
        source.close()
        source = open_source()


def test_a_block_of_another_length_is_missing_and_makes_room_for_the_right_one(open_source: OpenSource) -> None:
    source = open_source()
    assert source.store([*filled([1], num_bytes=LARGE_BYTES), *filled([2])]) == [True, True]
    assert load(source, [1, 2]) == [False, True]
    assert source.state().rejected == {"length": 1} and find(source, [1], num_bytes=LARGE_BYTES) == 0
    assert source.store(filled([1], num_bytes=LARGE_BYTES)) == [True]
    assert source.store(filled([1])) == [True]
    assert find(source, [1, 2]) == 2 and load(source, [1, 2]) == [True, True]
    assert find(source, [1], num_bytes=LARGE_BYTES) == 0


def test_the_limit_of_a_disk_and_a_tenants_share_hold_to_the_byte_in_a_storm(tmp_path: Path) -> None:
    limit, quota = 10 * SMALL + 7 * LARGE, 0.25
    source = open_disk(tmp_path, limit, quota, OF_GROUPS)
    most, has_ended = [0], threading.Event()

    def sample() -> None:
        while not has_ended.is_set():
            most[0] = max(most[0], bytes_at_one_instant(tmp_path), source.state().held_bytes)

    def store(start: int) -> None:
        rng = random.Random(start)
        for number in range(start, start + 100):
            source.store(filled([number], owner=number % 3, num_bytes=LENGTHS[number % 2]))
            other = rng.randrange(start, number + 1)
            load(source, [other], num_bytes=LENGTHS[other % 2])

    threads = [threading.Thread(target=store, args=(start,)) for start in (0, 100, 200)]
    sampler = threading.Thread(target=sample)
    for thread in (sampler, *threads):
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    has_ended.set()
    sampler.join(DEADLINE_S)
    assert limit - LARGE < most[0] <= limit
    for _ in range(2):
        sizes = {path.name: path.stat().st_size for path in files_of(tmp_path)}
        assert source.state().held_bytes == sum(sizes.values()) <= limit and set(sizes.values()) == {SMALL, LARGE}
        assert source.state().num_objects == len(sizes)
        for owner in (1, 2):
            owned = sum(size for name, size in sizes.items() if name.endswith(f"-{owner:x}"))
            assert quota * limit / 2 < owned <= quota * limit
        source.close()
        source = open_disk(tmp_path, limit, quota, OF_GROUPS)


def test_a_smaller_limit_at_a_restart_removes_the_oldest_of_both_lengths(tmp_path: Path) -> None:
    source = open_disk(tmp_path, namespace=OF_GROUPS)
    small, large = filled(range(4), owner=5), filled(range(10, 14), num_bytes=LARGE_BYTES)
    source.store([*small, *large])
    assert source._view is not None
    for age, item in enumerate(reversed([item for pair in zip(small, large, strict=True) for item in pair])):
        os.utime(source._view.path(item.key, item.owner), (time.time() - 100 * age - 50,) * 2)
    source.close()
    source = open_disk(tmp_path, 2 * SMALL + 3 * LARGE, 0.2, OF_GROUPS)  # a fifth has room for one small block
    assert [find(source, [number]) for number in range(4)] == [0, 0, 0, 1]
    assert [find(source, [number], num_bytes=LARGE_BYTES) for number in range(10, 14)] == [0, 1, 1, 1]
    assert source.state().held_bytes == SMALL + 3 * LARGE == sum(path.stat().st_size for path in files_of(tmp_path))
