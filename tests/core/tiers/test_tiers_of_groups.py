"""The tier process of an engine with two KV groups: blocks of a window beside those of all tokens, from slots to a disk
and back, and the boundary that is left if a block is damaged."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from xxhash import xxh3_128_digest

from tokenloom.core.kv.block_hash import block_keys, object_name
from tokenloom.core.tiers.object_format import HEADER_BYTES
from tokenloom.ipc.codec import encode_ids
from tokenloom.ipc.messages.supervisor import Stop
from tokenloom.ipc.messages.tier import BlocksFound, FindBlocks, FindGroup, LoadBlocks, StoreBlocks, TierState
from tokenloom.ipc.process.arena import PAGE, ArenaShape
from tokenloom.tests.core.tiers.slots import content_of, files_of
from tokenloom.tests.core.tiers.tier_bench import DEADLINE_S, TierBench

SHAPE = ArenaShape.of((2 * PAGE, 3 * PAGE - 5), 4 << 20)
TOKENS = np.arange(4 * 12, dtype=np.int32).tobytes()
GROUPS = [FindGroup(), FindGroup(needed=2)]
KEPT = {1: [3, 4, 7, 8]}  # blocks of the window that the boundaries 5 and 9 need


class GroupsBench(TierBench):
    """A tier process with the blocks of a prompt of 12, the window's at two boundaries. Slots of group g are taken from
    slab 2 g + 1 on."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, shape=SHAPE)

    def begin(self) -> None:
        self.start()
        self.namespace = self.open()
        self.keys = list(block_keys(self.namespace, TOKENS, 4))

    def name(self, group: int, block: int) -> bytes:
        return object_name(self.keys[block], group)

    def numbers(self, group: int, count: int, first: int = 0) -> list[int]:
        """Return the numbers of `count` slots of a group, which has half of the slabs."""
        begin = (1 + group * SHAPE.num_slabs // 2) * SHAPE.slots_of_slab[group] + first
        return [slot * SHAPE.num_groups + group for slot in range(begin, begin + count)]

    def put_all(self) -> None:
        """Store the blocks of both groups in one order."""
        blocks = [(0, block) for block in range(12)] + [(1, block) for block in KEPT[1]]
        slots = self.numbers(0, 12) + self.numbers(1, len(KEPT[1]))
        names = [self.name(group, block) for group, block in blocks]
        for slot, name in zip(slots, names, strict=True):
            self.arena.slot(slot)[:] = content_of(name, SHAPE.bytes_of(slot))
        self.say(
            StoreBlocks(
                job=1,
                keys=b"".join(names),
                slots=encode_ids(slots),
                targets=b"\1" * len(slots),
                owners=bytes(8 * len(slots)),
            )
        )
        assert self.stored(1) == dict.fromkeys(slots, 1)

    def found(self, serial: int) -> BlocksFound:
        self.say(FindBlocks(serial=serial, parent=self.namespace, token_ids=TOKENS, block_size=4, groups=GROUPS))
        return self.get(BlocksFound, lambda message: message.serial == serial)

    def loaded_blocks(self, job: int, group: int, blocks: Sequence[int]) -> list[bool]:
        """Load blocks into other slots; check the content of those that are good, and return which are."""
        slots = self.numbers(group, len(blocks), first=16)
        names = [self.name(group, block) for block in blocks]
        self.say(LoadBlocks(job=job, keys=b"".join(names), slots=encode_ids(slots), sources=bytes(len(slots))))
        loaded = self.loaded(job)
        for slot, name in zip(slots, names, strict=True):
            assert not loaded[slot] or self.arena.slot(slot) == content_of(name, SHAPE.bytes_of(slot))
        return [loaded[slot] for slot in slots]

    def path(self, group: int, block: int) -> Path:
        return next(path for path in files_of(self.folder / "disk") if path.name == self.name(group, block).hex())


@contextlib.contextmanager
def running(folder: Path) -> Iterator[GroupsBench]:
    """Start a process with the disk in this folder; at the end it writes its queue."""
    with contextlib.closing(GroupsBench(folder)) as bench:
        bench.begin()
        yield bench
        bench.order(Stop())
        assert bench.process.wait(DEADLINE_S) == 0


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[GroupsBench]:
    with running(tmp_path) as bench:
        bench.put_all()
        yield bench


def answer(serial: int, end: int, deepest: int = 12) -> BlocksFound:
    return BlocksFound(serial=serial, sources=[bytes(end), bytes(2)], end=end, deepest=deepest)


def test_blocks_of_two_groups_are_stored_found_and_loaded_also_by_the_next_process(tmp_path: Path) -> None:
    for is_first in (True, False):
        with running(tmp_path) as bench:
            if is_first:
                bench.put_all()
            assert bench.found(1) == answer(1, 9)
            assert all(bench.loaded_blocks(2, 1, [7, 8])) and all(bench.loaded_blocks(3, 0, range(9)))


def torn(path: Path, other: Path) -> bytes:
    return path.read_bytes()[: HEADER_BYTES + PAGE]


def flipped(path: Path, other: Path) -> bytes:
    content = bytearray(path.read_bytes())
    content[HEADER_BYTES + 5000] ^= 1
    return bytes(content)


def of_another_size(path: Path, other: Path) -> bytes:
    return other.read_bytes()


def of_another_format(path: Path, other: Path) -> bytes:
    """Return the object with another version in its header, which is whole."""
    content = bytearray(path.read_bytes())
    content[8] += 1
    content[HEADER_BYTES - 16 : HEADER_BYTES] = xxh3_128_digest(content[: HEADER_BYTES - 16])
    return bytes(content)


DAMAGES = [(torn, "length"), (flipped, "checksum"), (of_another_size, "length"), (of_another_format, "version")]


@pytest.mark.parametrize(("damage", "reason"), DAMAGES)
def test_without_a_damaged_block_of_a_window_the_next_smaller_boundary_is_found(
    bench: GroupsBench, damage: Callable[[Path, Path], bytes], reason: str
) -> None:
    path = bench.path(1, 8)
    path.write_bytes(damage(path, bench.path(0, 8)))
    assert bench.found(1) == answer(1, 9), "the disk is not read by a lookup"
    assert bench.loaded_blocks(2, 1, [7, 8]) == [True, False]
    bench.get(TierState, lambda message: message.sources[0].rejected == {reason: 1})
    assert bench.found(2) == answer(2, 5) and not path.exists()
    assert all(bench.loaded_blocks(3, 1, [3, 4])) and all(bench.loaded_blocks(4, 0, range(5)))


@pytest.mark.parametrize("damage", [torn, of_another_size])
def test_a_scan_finds_no_block_of_another_size(tmp_path: Path, damage: Callable[[Path, Path], bytes]) -> None:
    with running(tmp_path) as bench:
        bench.put_all()
        path = bench.path(1, 8)
        path.write_bytes(damage(path, bench.path(0, 8)))
    with running(tmp_path) as later:
        assert later.found(1) == answer(1, 5)


def test_a_damaged_block_of_all_tokens_leaves_the_boundaries_before_it(bench: GroupsBench) -> None:
    path = bench.path(0, 6)
    path.write_bytes(flipped(path, path))
    assert bench.loaded_blocks(2, 0, range(9)) == [True] * 6 + [False] + [True] * 2
    assert bench.found(3) == answer(3, 5, deepest=6)
