"""WaitRule: which blocks of a prompt are worth loading, and how long a request waits for them.

Waiting must not make a request slower. The longest wait is the time to compute the blocks that have come, plus the
share GRACE of the time to compute all missing blocks. A source is used for blocks that it is expected to bring faster
than they are computed. Knows no slots and no messages.
"""

from __future__ import annotations

from ....ipc.messages.tier import SOURCES
from .costs import ComputeCost, SourceCost
from .fetch import Fetch

GRACE = 0.05  # of the time to compute the missing blocks: most that a useless wait may cost
MIN_GRACE_S = 0.001  # with less, asking the tier process would take too long
MIN_BLOCKS = 2  # fewest missing blocks that are worth asking for
WORTH = 0.8  # of the time to compute: a load must be expected to take less
PROBE_S = 30.0  # after which a source that is too slow is tried again with one block


class WaitRule:
    """Owner of what was learned about the sources: `costs`, by their index in SOURCES."""

    def __init__(self, compute: ComputeCost, block_size: int) -> None:
        self._compute, self._block_size = compute, block_size
        self.costs = [SourceCost() for _ in SOURCES]

    def _seconds(self, start: int, end: int) -> float:
        """Return the seconds to compute the blocks [start, end) of a prompt."""
        return self._compute.seconds(start * self._block_size, end * self._block_size)

    def grace_s(self, start: int, end: int) -> float | None:
        """Return the seconds that a request with the missing blocks [start, end) may wait in vain; None if they are too
        few to be worth asking for."""
        grace_s = GRACE * self._seconds(start, end)
        return None if end - start < MIN_BLOCKS or grace_s < MIN_GRACE_S else grace_s

    def num_worth(self, fetch: Fetch) -> int:
        """Return how many of the found blocks, from the first, are faster to load than to compute: all, or those before
        the blocks of a source that is too slow. All for a prefetch."""
        if fetch.request is None:
            return len(fetch.keys)
        num_by_source = [0] * len(SOURCES)
        for index, source in enumerate(fetch.sources):
            num_by_source[source] += 1
            is_end = index + 1 == len(fetch.sources) or fetch.sources[index + 1] != source
            if is_end:
                load_s = sum(cost.seconds(n) for cost, n in zip(self.costs, num_by_source, strict=True) if n)
                if load_s >= WORTH * self._seconds(fetch.start, fetch.start + index + 1):
                    return index + 1 - num_by_source[source]
        return len(fetch.keys)

    def is_probe_due(self, fetch: Fetch, now: float) -> bool:
        """Return whether the source of the first found block has loaded nothing for PROBE_S."""
        return bool(fetch.keys) and now - self.costs[fetch.sources[0]].told_at > PROBE_S

    def give_up_at(self, fetch: Fetch) -> float:
        """Return when the request of a fetch waits no longer for blocks, in monotonic seconds."""
        return fetch.begun_at + fetch.grace_s + self._seconds(fetch.start, fetch.start + fetch.num_ready)
