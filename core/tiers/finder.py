"""Finder: determines the largest boundary at which all KV groups have the blocks that they need, and where each is.

It has two threads: one asks the disk, which answers from memory; the other continues lookups in the other sources. So a
slow remote store delays no lookup that the disk can answer alone.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from queue import SimpleQueue

from ...ipc.errors import ProtocolError
from ...ipc.messages.tier import HERE, SOURCES, BlocksFound, FindBlocks
from ...ipc.shortages.threads import start_thread
from ..kv.block_hash import KEY_BYTES, block_keys, object_name
from ..kv.hit_rule import longest_hit
from .source import Source

logger = logging.getLogger("tokenloom.tiers")

LIMIT_S = 0.25  # limit from a lookup's arrival to its answer, with the blocks found by then
MIN_HINTS = 64  # blocks before a missing one of a window that sources are asked about at once, or the window's


class _Lookup:
    """One FindBlocks, and what is known of its blocks. Indexes of blocks and boundaries count from its first block."""

    def __init__(self, message: FindBlocks, slot_bytes: Sequence[int]) -> None:
        """slot_bytes: by group, the length of a block. ProtocolError if the question is not valid."""
        self.serial, self.skips_remote = message.serial, message.skips_remote
        self.deadline = time.monotonic() + LIMIT_S
        self.boundary = 0  # the largest that suits all groups, as far as it is known
        self._deepest = 0  # the largest that suits the first group
        self._message, self._slot_bytes = message, slot_bytes
        size = message.block_size
        if size < 1 or len(message.parent) != KEY_BYTES or message.start % size:
            raise ProtocolError(f"find_blocks {self.serial}: {size} tokens in a block, from token {message.start} on")
        if len(message.groups) != len(slot_bytes):
            raise ProtocolError(f"find_blocks {self.serial}: {len(message.groups)} KV groups of {len(slot_bytes)}")
        self.num_blocks = len(message.token_ids) // (4 * size)
        for group in message.groups:
            if group.needed < 0 or len(group.here) not in (0, self.num_blocks):
                raise ProtocolError(
                    f"find_blocks {self.serial}: {len(group.here)} of {self.num_blocks} blocks are here"
                )
        self._first = message.start // size
        self._needed = [group.needed or None for group in message.groups]
        self._keys: list[bytes] = []
        self._sources: Mapping[int, Source] = {}  # to ask
        self._end = self.num_blocks  # no larger boundary suits
        # By group: the source of each block that was found, and the sources that lack a block.
        self._found = [{i: HERE for i, is_here in enumerate(group.here) if is_here} for group in message.groups]
        self._lacking: list[defaultdict[int, set[int]]] = [defaultdict(set) for _ in message.groups]
        self._hinted = [self.num_blocks] * len(message.groups)  # by group: the first block that hints were asked for

    def make_keys(self) -> None:
        """Compute the chain of keys."""
        it = self._message
        self._keys = list(block_keys(it.parent, it.token_ids, it.block_size, it.media, it.start))

    def search(self, sources: Mapping[int, Source]) -> None:
        """Find the largest boundary, asking these sources for blocks that are not known until the deadline."""
        self._sources, self._end = sources, self.num_blocks
        self._hinted = [self.num_blocks] * len(self._found)
        hit = longest_hit(self.num_blocks, self._needed, self._has)
        self.boundary, self._deepest = hit.num_blocks, hit.deepest

    def _has(self, group: int, index: int) -> bool:
        if index in self._found[group]:
            return True
        is_of_use = self._first + self._end > self._message.least
        if is_of_use and not self._sources.keys() <= self._lacking[group][index]:
            self._ask(group, index)
            if index in self._found[group]:
                return True
        self._end = index  # all larger boundaries that are left to try need this block
        if is_of_use and index <= self._hinted[group] and (needed := self._needed[group]) is not None:
            self._take_hints(group, index, max(needed, MIN_HINTS))
        return False

    def _take_hints(self, group: int, end: int, count: int) -> None:
        """Note which of the `count` blocks before `end` each source lacks. A window's blocks have long gaps, and
        without hints each boundary in a gap would cost a question."""
        found, begin = self._found[group], max(end - count, 0)
        self._hinted[group] = begin
        indexes = [each for each in range(begin, end) if each not in found]
        names = [object_name(self._keys[each], group) for each in indexes]
        for number, source in self._sources.items():
            if time.monotonic() >= self.deadline or not names:
                return
            try:
                hints = source.may_have(names, self._slot_bytes[group], self.deadline)
            except Exception:
                logger.exception("a lookup in the %s failed", source.name)
                continue
            for index, may_have in zip(indexes, hints, strict=True):
                if not may_have:
                    self._lacking[group][index].add(number)

    def _ask(self, group: int, index: int) -> None:
        """Ask the sources for a block, and for those after it that the group needs at the same boundary."""
        found, needed = self._found[group], self._needed[group]
        end = self._end if needed is None else min(self._end, index + needed)
        indexes = [each for each in range(index, end) if each not in found]
        names = [object_name(self._keys[each], group) for each in indexes]
        run, lacking = self._run(names, self._slot_bytes[group], self._lacking[group][index])
        found.update(zip(indexes, run, strict=False))
        if len(run) < len(names):
            self._lacking[group][indexes[len(run)]] |= lacking

    def _run(self, names: list[bytes], num_bytes: int, lacking: set[int]) -> tuple[bytearray, set[int]]:
        """Return the source of each of the first names, up to one that no source has or until the deadline, and the
        sources that lack the next name. num_bytes: length of each block. lacking: sources that lack the first name."""
        run = bytearray()
        while len(run) < len(names) and (left := [each for each in self._sources if each not in lacking]):
            for number in left:
                if time.monotonic() >= self.deadline or len(run) == len(names):
                    return run, lacking
                count = self._count(number, names[len(run) :], num_bytes)
                run += bytes([number]) * count
                lacking = {number} if count else lacking | {number}
        return run, lacking

    def _count(self, number: int, names: list[bytes], num_bytes: int) -> int:
        """Return how many of the first names a source has. A source that raises counts as having none."""
        source = self._sources[number]
        try:
            return source.find(names, num_bytes, self.deadline)
        except Exception:
            logger.exception("a lookup in the %s failed", source.name)
            return 0

    def answer(self) -> BlocksFound:
        sources = [b""] * len(self._found)
        end = self._first + self.boundary
        if end > self._message.least:
            for group, (found, needed) in enumerate(zip(self._found, self._needed, strict=True)):
                begin = 0 if needed is None else max(self.boundary - needed, 0)
                sources[group] = bytes(map(found.__getitem__, range(begin, self.boundary)))
        deepest = self._first + self._deepest
        return BlocksFound(serial=self.serial, sources=sources, end=end, deepest=deepest if deepest > end else 0)


class Finder:
    """Owner of the two threads, both of which call `answer`."""

    def __init__(
        self, sources: Mapping[int, Source], slot_bytes: Sequence[int], answer: Callable[[BlocksFound], None]
    ) -> None:
        """slot_bytes: by group, the length of a block."""
        self._slot_bytes = slot_bytes
        disk = SOURCES.index("disk")
        self._near = {number: source for number, source in sources.items() if number == disk}
        self._all = {**self._near, **sources}
        self._answer = answer
        self._arrived: SimpleQueue[_Lookup] = SimpleQueue()
        self._going_on: SimpleQueue[_Lookup] = SimpleQueue()
        for target in (self._look_near, self._look_far):
            start_thread("find", target)

    def find(self, message: FindBlocks) -> None:
        """Begin a lookup. ProtocolError if it is not valid."""
        self._arrived.put(_Lookup(message, self._slot_bytes))

    def _look_near(self) -> None:
        while True:
            lookup = self._arrived.get()
            lookup.make_keys()
            lookup.search(self._near)
            has_far = len(self._all) > len(self._near)
            if not has_far or lookup.skips_remote or lookup.boundary == lookup.num_blocks:
                self._answer(lookup.answer())
            else:
                self._going_on.put(lookup)

    def _look_far(self) -> None:
        while True:
            lookup = self._going_on.get()
            lookup.search(self._all)
            self._answer(lookup.answer())
