"""FilePages: a file that is mapped, read once, and given back to the system behind the reader.

What was read leaves this process, and stays in the page cache for the next start, unless memory has a high price: a
virtual machine whose host has to provide each page, or one that is full, takes seconds to find a gigabyte. There the
file's own pages are the memory that is at hand: they are dropped from the page cache, and the system gives them to the
weights that are being made. Knows bytes of files; knows no tensors.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import resource
import weakref
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from .readahead import FileReader

PAGE_BYTES = mmap.PAGESIZE
HIGH_PRICE_S = 1e-9  # of a byte: huge pages at hand, cleared and mapped, take 0.2 to 0.6 of it, a host's pages 2.8
GAP_BYTES = 64 << 10  # between matrices: norms and biases, which are read by themselves
LEAST_BYTES = 32 << 20  # that a price is told from, as the system counts its time in steps of 4 ms


def system_time_s() -> float:
    """Return the CPU seconds that the system has worked for this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_stime


class MemoryPrice:
    """The system's CPU time for each byte of a file that is turned into weights. Once it is high, it remains so: the
    pages that are dropped then lower it."""

    def __init__(self, system_time_s: Callable[[], float] = system_time_s) -> None:
        self._system_time_s = system_time_s
        self._begun_s = system_time_s()
        self._num_bytes = 0
        self.is_high = False

    def note(self, num_bytes: int) -> None:
        """Add bytes that were read, and whose weights are made."""
        self._num_bytes += num_bytes
        used_s = self._system_time_s() - self._begun_s
        self.is_high |= self._num_bytes >= LEAST_BYTES and used_s > HIGH_PRICE_S * self._num_bytes


def _close(fd: int) -> None:
    with contextlib.suppress(OSError):
        fcntl.flock(fd, fcntl.LOCK_UN)  # a map keeps the file open
    os.close(fd)


class FilePages:
    """Owner of a file's map and of the lock that shows other processes that this one reads the file. `data`: its
    bytes, [size] uint8."""

    def __init__(self, path: Path, price: MemoryPrice) -> None:
        self._price = price
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._close = weakref.finalize(self, _close, self._fd)
        self._left: list[tuple[int, int]] = []  # begin and end of what is read next
        self._given: list[tuple[int, int]] = []  # of what was given back, with gaps between
        with contextlib.suppress(OSError):  # no locks there
            fcntl.flock(self._fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        self._map = mmap.mmap(self._fd, 0, access=mmap.ACCESS_COPY)  # private, because torch warns of read-only arrays
        self._map.madvise(mmap.MADV_HUGEPAGE)  # a large page of the cache is mapped at once
        self.data = torch.from_numpy(np.frombuffer(self._map, np.uint8))
        self._reader = FileReader(path)

    def close(self) -> None:
        """Close the file. The map remains while something refers to it."""
        self._close()

    def follow(self, offset: int, num_bytes: int) -> None:
        """Note that these bytes are read next, so that what lies behind them is read ahead."""
        self._reader.follow(offset, offset + num_bytes)

    def leave(self, addresses: Tensor, row_bytes: int) -> None:
        """Note rows that someone reads from `data` before `give_back` is called. addresses: [rows] int64."""
        if len(addresses):
            begin = int(addresses.min()) - self.data.data_ptr()
            self._left.append((begin, int(addresses.max()) - self.data.data_ptr() + row_bytes))

    def give_back(self) -> None:
        """Unmap the bytes of the rows that were left, and drop them from the page cache if memory has a high price and
        no other process reads the file this way. They can still be read: the system reads and maps them again."""
        for begin, end in self._left:
            first = begin // PAGE_BYTES * PAGE_BYTES
            self._map.madvise(mmap.MADV_DONTNEED, first, end - first)
            self._price.note(end - begin)
            first, end = self._join(begin, end)
            if self._price.is_high and self._is_alone():
                # Of the whole stretch: a page of the cache, up to 2 MiB, is dropped when all its bytes have been read.
                os.posix_fadvise(self._fd, first, end - first, os.POSIX_FADV_DONTNEED)
        self._left.clear()

    def _join(self, begin: int, end: int) -> tuple[int, int]:
        """Add bytes to those that were given back; return the stretch, without gaps larger than GAP_BYTES, that they
        are in."""
        near = [each for each in self._given if each[0] <= end + GAP_BYTES and each[1] >= begin - GAP_BYTES]
        stretch = (min([begin, *(each[0] for each in near)]), max([end, *(each[1] for each in near)]))
        self._given = [*(each for each in self._given if each not in near), stretch]
        return stretch

    def _is_alone(self) -> bool:
        """Return whether no other process has locked the file to read it. False where there are no locks."""
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        finally:
            with contextlib.suppress(OSError):  # the attempt has given the shared lock up
                fcntl.flock(self._fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return True
