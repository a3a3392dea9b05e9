"""WaitRule: which blocks of a prompt are worth loading, and how long a request waits for them.

Waiting must not make a request slower. The longest wait is the time to compute the blocks that have come, plus the
share GRACE of the time to compute all missing blocks. A source is used for blocks that it is expected to bring faster
than they are computed. If a group has a window, blocks are of use only all together: then those that have come count by
their share of the bytes of all. Knows no slots and no messages.
"""

from __future__ import annotations

from collections.abc import Sequence

from ....ipc.messages.tier import HERE, SOURCES
from ....ipc.spec.kv.kv_groups import KVGroup
from .costs import ComputeCost, SourceCost
from .fetch import Fetch, MissingBlocks

GRACE = 0.05  # of the time to compute the missing blocks: most that a useless wait may cost
MIN_GRACE_S = 0.001  # with less, asking the tier process would take too long
MIN_BLOCKS = 2  # fewest missing blocks that are worth asking for
WORTH = 0.8  # of the time to compute: a load must be expected to take less
PROBE_S = 30.0  # after which a source that is too slow is tried again with one block


class WaitRule:
    """Owner of what was learned about the sources: `costs`, by their index in SOURCES."""

    def __init__(
        self, groups: Sequence[KVGroup], compute: ComputeCost, block_size: int, slot_bytes: Sequence[int]
    ) -> None:
        """slot_bytes: size of a block of each group."""
        sizes = zip(groups, slot_bytes, strict=True)
        self._full_bytes = sum(size for group, size in sizes if group.is_full)  # that a further block of a prompt adds
        self._compute, self._block_size, self._slot_bytes = compute, block_size, slot_bytes
        self.costs = [SourceCost(slot_bytes[0]) for _ in SOURCES]

    def _seconds(self, start: int, end: int) -> float:
        """Return the seconds to compute the blocks [start, end) of a prompt."""
        return self._compute.seconds(start * self._block_size, end * self._block_size)

    def grace_s(self, missing: MissingBlocks) -> float | None:
        """Return the seconds that a request may wait in vain for missing blocks; None if they are too few to be worth
        asking for."""
        end = missing.start + len(missing.tokens) // (4 * self._block_size)
        grace_s = GRACE * self._seconds(missing.least, end)
        return None if end - missing.least < MIN_BLOCKS or grace_s < MIN_GRACE_S else grace_s

    def num_worth(self, fetch: Fetch) -> int:
        """Return how many of the found blocks, from the first, are faster to load than to compute: all, or those before
        the blocks of a source that is too slow. All for a prefetch."""
        if fetch.request is None:
            return len(fetch.items)
        least, num_by_source = fetch.missing.least, [0] * len(SOURCES)
        if fetch.is_whole:
            for item, source in zip(fetch.items, fetch.sources, strict=True):
                if source != HERE:
                    num_by_source[source] += self._slot_bytes[item.group]
            is_worth = self._load_s(num_by_source) < WORTH * self._seconds(least, fetch.end)
            return len(fetch.items) if is_worth else 0
        for index, source in enumerate(fetch.sources):
            num_by_source[source] += 1
            is_end = index + 1 == len(fetch.sources) or fetch.sources[index + 1] != source
            if is_end:
                load_s = self._load_s([num * self._slot_bytes[0] for num in num_by_source])
                if load_s >= WORTH * self._seconds(least, least + index + 1):
                    return index + 1 - num_by_source[source]
        return len(fetch.items)

    def smaller(self, fetch: Fetch, most_bytes: int) -> MissingBlocks | None:
        """Return the question for a smaller boundary, with blocks of at most `most_bytes`; None if none is of use, or
        if the first blocks of the fetch are of use alone."""
        excess_bytes = fetch.bytes_before[-1] - most_bytes
        end = fetch.end - -(-excess_bytes // self._full_bytes) if self._full_bytes else 0
        if not fetch.is_whole or end <= max(fetch.missing.least, fetch.missing.start):
            return None
        return fetch.missing.up_to(end, self._block_size)

    def _load_s(self, bytes_by_source: Sequence[int]) -> float:
        return sum(cost.seconds(num) for cost, num in zip(self.costs, bytes_by_source, strict=True) if num)

    def probe(self, fetch: Fetch, now: float) -> int | None:
        """Return the index of the first block to load if its source has loaded nothing for PROBE_S, else None."""
        for index, source in enumerate(fetch.sources[: len(fetch.items)]):
            if source != HERE:
                return index if now - self.costs[source].told_at > PROBE_S else None
        return None

    def give_up_at(self, fetch: Fetch) -> float:
        """Return when the request of a fetch waits no longer for blocks, in monotonic seconds."""
        least, num_come = fetch.missing.least, fetch.num_ready
        if fetch.is_whole:
            num_come = (fetch.end - least) * fetch.bytes_before[num_come] // max(fetch.bytes_before[-1], 1)
        return fetch.begun_at + fetch.grace_s + self._seconds(least, least + num_come)
