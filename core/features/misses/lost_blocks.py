"""LostBlocks: a memory, of fixed size, of the blocks that requests can no longer find, and why.

An entry is 8 bytes of a block's key, which is a digest, the cause, the time, and a mark of the request that took the
block. A key belongs to one set of eight entries; a ninth overwrites the oldest of its set. Knows no tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from mmap import mmap
from typing import Literal, NamedTuple, TypeAlias

Cause: TypeAlias = Literal["evicted", "cleared", "lost"]
CAUSES: tuple[Cause, ...] = ("evicted", "cleared", "lost")
WAYS = 8  # entries of a set
HEAD_BYTES = 8  # of a key, in an entry
_NO_HEAD = bytes(HEAD_BYTES)


class Loss(NamedTuple):
    """How a block was lost: evicted since another request needed it, cleared by an order, or lost with its workers or
    their memory. mark: that of the request that evicted it. at: time, by the memory's clock."""

    cause: Cause
    mark: int
    at: float


class LostBlocks:
    """Owner of the entries, and observer of the pool of the first KV group. An entry may be outdated: its block is
    found again."""

    def __init__(
        self, num_entries: int, mark: Callable[[], int], clock: Callable[[], float] = time.monotonic, *, is_state: bool
    ) -> None:
        """num_entries: rounded up to a power of two. mark: returns that of the request for which blocks are being
        allocated. is_state: the group's layers keep a state, so that a block may be forgotten as a row goes on."""
        num_sets = 1 << max((num_entries - 1) // WAYS, 0).bit_length()
        self._mask = num_sets - 1
        num_entries = num_sets * WAYS
        self._heads = mmap(-1, HEAD_BYTES * num_entries)  # takes memory only as it fills, and so do the others
        self._next = memoryview(mmap(-1, num_sets))  # by set: the entry that is overwritten next
        self._causes = memoryview(mmap(-1, num_entries))
        self._marks = memoryview(mmap(-1, 8 * num_entries)).cast("Q")
        self._times = memoryview(mmap(-1, 8 * num_entries)).cast("d")
        self._mark, self.clock, self._is_state = mark, clock, is_state
        self.forgets_before = 0.0  # all losses since then are known; 0: all

    def add(self, key: bytes, cause: Cause) -> None:
        head, number = key[:HEAD_BYTES], int.from_bytes(key[HEAD_BYTES : HEAD_BYTES + 4]) & self._mask
        entry = self._find(head, number)
        if entry < 0:
            way = self._next[number]
            self._next[number] = (way + 1) % WAYS
            entry = number * WAYS + way
            place = entry * HEAD_BYTES
            if self._heads[place : place + HEAD_BYTES] != _NO_HEAD:
                self.forgets_before = max(self.forgets_before, self._times[entry])
            self._heads[place : place + HEAD_BYTES] = head
        self._causes[entry] = CAUSES.index(cause)
        self._times[entry] = self.clock()
        self._marks[entry] = self._mark()

    def find(self, key: bytes) -> Loss | None:
        """Return how the block with this key was lost the last time; None if it was not, or that is forgotten."""
        entry = self._find(key[:HEAD_BYTES], int.from_bytes(key[HEAD_BYTES : HEAD_BYTES + 4]) & self._mask)
        return None if entry < 0 else Loss(CAUSES[self._causes[entry]], self._marks[entry], self._times[entry])

    def _find(self, head: bytes, number: int) -> int:
        """Return the entry with this head in a set; -1 if there is none."""
        start = number * WAYS * HEAD_BYTES
        end = start + WAYS * HEAD_BYTES
        place = self._heads.find(head, start, end)
        while place >= 0 and place % HEAD_BYTES:
            place = self._heads.find(head, place + 1, end)
        return place // HEAD_BYTES

    # ── the pool's content ───────────────────────────────────────────────────────────────────────────────────────

    def evicted(self, group: int, block: int, key: bytes, *, is_demoted: bool = False) -> None:
        self.add(key, "evicted")

    def forgotten(self, group: int, block: int, key: bytes) -> None:
        if not self._is_state:
            self.add(key, "cleared")

    def cleared(self, group: int) -> None:
        pass
