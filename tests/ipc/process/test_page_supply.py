"""A page supply takes the memory of its ranges, no more, and leaves their content as it is."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

from tokenloom.ipc.process.page_supply import LARGEST_PIECE, PAGE, RESERVE_BYTES, PageRange, PageSupply

MIB = 1 << 20
MAX_PIECES = 10_000  # more than any of these ranges has


def private(num_bytes: int) -> mmap.mmap:
    return mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def plenty() -> int:
    return RESERVE_BYTES


def resident_bytes(memory: mmap.mmap) -> int:
    """Return how much of a mapping is in memory: bit 63 of a page's entry in /proc. (smaps joins mappings.)"""
    first = PageRange(memory, 0)._address // PAGE
    with Path("/proc/self/pagemap").open("rb", buffering=0) as file:
        file.seek(first * 8)
        entries = memoryview(file.read(len(memory) // PAGE * 8)).cast("Q")
    return sum(entry >> 63 for entry in entries) * PAGE


def take_all(supply: PageSupply) -> int:
    for num_pieces in range(MAX_PIECES):
        if supply.is_done:
            return num_pieces
        supply.take_piece()
    raise AssertionError("the supply does not end")


def shared(num_bytes: int) -> mmap.mmap:
    fd = os.memfd_create("pages")
    os.ftruncate(fd, num_bytes)
    try:
        return mmap.mmap(fd, num_bytes)
    finally:
        os.close(fd)


def test_the_wanted_bytes_are_taken_in_whole_pages_and_no_more() -> None:
    memory = private(16 * MIB)
    pages = PageRange(memory, 5 * MIB + 1)
    assert (pages.num_missing, resident_bytes(memory)) == (5 * MIB + PAGE, 0)
    assert take_all(PageSupply([pages], plenty)) > 1
    assert (pages.num_missing, resident_bytes(memory)) == (0, 5 * MIB + PAGE)


def test_a_range_goes_on_when_more_is_wanted_and_ends_with_its_memory() -> None:
    memory = private(8 * MIB)
    pages = PageRange(memory, 2 * MIB)
    supply = PageSupply([pages], plenty)
    take_all(supply)
    pages.want(MIB)  # wanted before
    assert supply.is_done
    pages.want(100 * MIB)
    assert not supply.is_done and pages.num_missing == 6 * MIB
    take_all(supply)
    assert resident_bytes(memory) == 8 * MIB


def test_content_stays_as_it_is() -> None:
    memories = [private(4 * MIB), shared(4 * MIB)]
    content = os.urandom(4 * MIB)
    for memory in memories:
        memory[: 2 * MIB] = content[: 2 * MIB]
    take_all(PageSupply([PageRange(each, 4 * MIB, is_shared=True) for each in memories], plenty))
    for memory in memories:
        assert memory[:] == content[: 2 * MIB] + bytes(2 * MIB) and resident_bytes(memory) == 4 * MIB


def test_an_older_kernel_takes_private_pages_and_leaves_shared_ones() -> None:
    mine, ours = private(3 * MIB), shared(3 * MIB)
    mine[:MIB] = content = os.urandom(MIB)
    ranges = [PageRange(ours, 3 * MIB, is_shared=True), PageRange(mine, 3 * MIB)]
    for pages in ranges:
        pages.advice = 9999  # which no kernel knows
    take_all(PageSupply(ranges, plenty))
    assert (resident_bytes(mine), resident_bytes(ours)) == (3 * MIB, 0)
    assert mine[:MIB] == content


def test_a_machine_with_little_memory_left_is_asked_for_none() -> None:
    memory, free = private(80 * MIB), [RESERVE_BYTES, RESERVE_BYTES - 1]
    supply = PageSupply([PageRange(memory, 80 * MIB)], lambda: free.pop(0))
    take_all(supply)
    assert not free and 32 * MIB <= resident_bytes(memory) < 32 * MIB + LARGEST_PIECE


def test_pieces_shrink_until_they_take_a_millisecond() -> None:
    """A kernel that takes 0.1 GB/s is asked for at most 128 KiB at once."""
    now, sizes = 0.0, list[int]()

    class SlowPages(PageRange):
        def take(self, num_bytes: int) -> None:
            nonlocal now
            now += num_bytes / 1e8
            sizes.append(num_bytes)
            super().take(num_bytes)

    supply = PageSupply([SlowPages(private(8 * MIB), 8 * MIB)], plenty)
    supply.monotonic = lambda: now
    take_all(supply)
    assert sizes[0] == 256 << 10 and max(sizes[1:]) == 128 << 10 and min(sizes) == 64 << 10
