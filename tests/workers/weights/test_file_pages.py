"""Pages of a file leave the page cache behind their reader if memory has a high price, and come before it is read."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

import pytest
import torch

from tokenloom.tests.support.waiting import wait_until
from tokenloom.workers.weights.file_pages import HIGH_PRICE_S, LEAST_BYTES, FilePages, MemoryPrice
from tokenloom.workers.weights.readahead import FileReader, start_readahead

FILE_BYTES = 2 * LEAST_BYTES
HALF = FILE_BYTES // 2
MIB = 1 << 20


class SystemTime:
    """The system's CPU time, as a test sets it."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


class Cached:
    """A sparse file, and whether the page cache holds its pages."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("wb") as file:
            file.truncate(FILE_BYTES)
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)

    def fill(self) -> None:
        self.path.read_bytes()

    def empty(self) -> None:
        with self.path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def holds(self, offset: int) -> bool:
        begin = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        page = ctypes.c_void_p(begin + offset // mmap.PAGESIZE * mmap.PAGESIZE)
        found = ctypes.c_ubyte()
        assert ctypes.CDLL(None).mincore(page, ctypes.c_size_t(1), ctypes.byref(found)) == 0
        return bool(found.value & 1)


@pytest.fixture
def cached(tmp_path: Path) -> Cached:
    found = Cached(tmp_path / "weights.gguf")
    found.fill()
    found.empty()
    if found.holds(0):
        pytest.skip("files of this file system never leave the page cache")
    found.fill()
    return found


def price(seconds_per_byte: float, num_bytes: int) -> MemoryPrice:
    """Return the price of memory after so many bytes."""
    time = SystemTime()
    found = MemoryPrice(time)
    time.seconds = seconds_per_byte * num_bytes
    found.note(num_bytes)
    return found


def give_back(pages: FilePages, offset: int, num_bytes: int) -> None:
    rows = torch.tensor([num_bytes // 2, 0]) + pages.data.data_ptr() + offset
    pages.leave(rows, num_bytes - num_bytes // 2)
    pages.give_back()


def test_a_price_is_high_above_a_bound_from_enough_bytes_and_remains_so() -> None:
    assert price(2 * HIGH_PRICE_S, LEAST_BYTES).is_high
    assert not price(HIGH_PRICE_S / 2, LEAST_BYTES).is_high
    assert not price(2 * HIGH_PRICE_S, LEAST_BYTES - 1).is_high
    high = price(2 * HIGH_PRICE_S, LEAST_BYTES)
    high.note(100 * LEAST_BYTES)  # in no time
    assert high.is_high


def test_pages_stay_in_the_cache_while_memory_has_a_low_price(cached: Cached) -> None:
    pages = FilePages(cached.path, price(0, LEAST_BYTES))
    assert pages.data[HALF] == 0
    give_back(pages, 0, FILE_BYTES)
    assert all(cached.holds(offset) for offset in (0, HALF, FILE_BYTES - 1))
    pages.close()


def test_pages_leave_the_cache_at_a_high_price_and_can_be_read_again(cached: Cached) -> None:
    pages = FilePages(cached.path, price(1, LEAST_BYTES))
    give_back(pages, HALF, HALF)
    assert cached.holds(0) and not cached.holds(FILE_BYTES - MIB)
    assert pages.data[FILE_BYTES - MIB] == 0
    pages.close()


def test_what_was_given_back_before_the_price_was_high_leaves_the_cache_too(cached: Cached) -> None:
    time = SystemTime()
    pages = FilePages(cached.path, MemoryPrice(time))
    give_back(pages, 0, LEAST_BYTES)
    assert cached.holds(0)
    time.seconds = 1
    give_back(pages, LEAST_BYTES + 1000, LEAST_BYTES - 1000)  # behind a small gap
    assert not cached.holds(0) and not cached.holds(LEAST_BYTES + MIB)
    pages.close()


def test_pages_stay_in_the_cache_while_another_engine_loads_the_file(cached: Cached) -> None:
    other = FilePages(cached.path, price(0, LEAST_BYTES))
    pages = FilePages(cached.path, price(1, LEAST_BYTES))
    give_back(pages, 0, HALF)
    give_back(other, 0, HALF)
    assert cached.holds(0)
    kept = other.data  # as rows that are not packed yet keep it
    other.close()
    give_back(pages, 0, HALF)
    assert not cached.holds(0) and kept[0] == 0
    pages.close()


def test_a_reader_is_ahead_of_an_owner_that_reads_in_order(cached: Cached) -> None:
    cached.empty()
    reader = FileReader(cached.path, ahead_bytes=HALF)
    reader.follow(0, MIB)
    wait_until(lambda: cached.holds(HALF), "nothing was read ahead")
    reader.follow(HALF, FILE_BYTES)
    wait_until(lambda: cached.holds(FILE_BYTES - 1), "the end was not read")
    reader.follow(FILE_BYTES - MIB, FILE_BYTES)  # ends at the end of the file
    wait_until(lambda: not reader.is_running, "the thread still runs")


def test_a_reader_follows_an_owner_that_reads_elsewhere(cached: Cached) -> None:
    cached.empty()
    reader = FileReader(cached.path, ahead_bytes=MIB)
    reader.follow(HALF + 8 * MIB, HALF + 9 * MIB)
    wait_until(lambda: cached.holds(HALF + 8 * MIB), "the bytes were not read")
    assert not cached.holds(0)


def test_a_reader_of_a_file_that_is_gone_leaves_the_error_to_its_owner(tmp_path: Path) -> None:
    reader = FileReader(tmp_path / "gone.gguf")
    reader.follow(0, MIB)
    reader.follow(MIB, 2 * MIB)


def test_the_start_reads_the_beginning_of_the_weights_into_the_cache(cached: Cached) -> None:
    cached.empty()
    start_readahead(cached.path.parent).join(timeout=60)
    assert cached.holds(0) and cached.holds(FILE_BYTES - 1)
