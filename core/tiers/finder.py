"""Finder: determines how many consecutive blocks the sources have, and which source has each.

It has two threads: one asks the disk, which answers from memory; the other continues lookups in the other sources. So a
slow remote store delays no lookup that the disk can answer alone.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from queue import SimpleQueue

from ...ipc.messages.tier import SOURCES, BlocksFound, FindBlocks
from ...ipc.shortages.threads import start_thread
from ..kv.block_hash import block_keys
from .source import Source

logger = logging.getLogger("tokenloom.tiers")

LIMIT_S = 0.25  # limit from a lookup's arrival to its answer, with the blocks found by then


class _Lookup:
    """One FindBlocks: the keys of its blocks, and for each block found so far, its source."""

    def __init__(self, message: FindBlocks) -> None:
        self.serial, self.skips_remote = message.serial, message.skips_remote
        self.deadline = time.monotonic() + LIMIT_S
        self.keys: list[bytes] = []
        self.found = bytearray()
        self.ends: set[int] = set()  # sources that do not have the next block
        self._message = message

    def make_keys(self) -> None:
        """Compute the chain of keys."""
        it = self._message
        self.keys = list(block_keys(it.parent, it.token_ids, it.block_size, it.media, it.start))

    def ask(self, sources: Mapping[int, Source]) -> None:
        """Extend the run of found blocks by asking these sources, one after the other, until none of them has the next
        block or the deadline has passed. A source that raises counts as having none."""
        while len(self.found) < len(self.keys) and (left := [each for each in sources if each not in self.ends]):
            for number in left:
                if time.monotonic() >= self.deadline or len(self.found) == len(self.keys):
                    return
                try:
                    count = sources[number].find(self.keys[len(self.found) :], self.deadline)
                except Exception:
                    logger.exception("a lookup in the %s failed", sources[number].name)
                    count = 0
                self.found += bytes([number]) * count
                self.ends = {number} if count else self.ends | {number}


class Finder:
    """Owner of the two threads, both of which call `answer`."""

    def __init__(self, sources: Mapping[int, Source], answer: Callable[[BlocksFound], None]) -> None:
        disk = SOURCES.index("disk")
        self._near = {number: source for number, source in sources.items() if number == disk}
        self._far = {number: source for number, source in sources.items() if number != disk}
        self._answer = answer
        self._arrived: SimpleQueue[_Lookup] = SimpleQueue()
        self._going_on: SimpleQueue[_Lookup] = SimpleQueue()
        for target in (self._look_near, self._look_far):
            start_thread("find", target)

    def find(self, message: FindBlocks) -> None:
        self._arrived.put(_Lookup(message))

    def _look_near(self) -> None:
        while True:
            lookup = self._arrived.get()
            lookup.make_keys()
            lookup.ask(self._near)
            if not self._far or lookup.skips_remote or len(lookup.found) == len(lookup.keys):
                self._end(lookup)
            else:
                self._going_on.put(lookup)

    def _look_far(self) -> None:
        while True:
            lookup = self._going_on.get()
            lookup.ask({**self._far, **self._near})
            self._end(lookup)

    def _end(self, lookup: _Lookup) -> None:
        self._answer(BlocksFound(serial=lookup.serial, sources=bytes(lookup.found)))
