"""Policies of routing for simulate_fleet.py: the engine's Router, and others that differ in `pick` alone."""

from __future__ import annotations

import hashlib
import math
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from tokenloom.frontend.server.replicas.prefix_index import PrefixIndex
from tokenloom.frontend.server.replicas.router import Router

MAX_OVER_MEAN = 1.25  # open answers of a core under the bounded hash
NUM_POINTS = 64  # of each core on the ring of hashes
NUM_HASHED = 2  # first blocks of a prompt


class RandomPolicy(Router):
    """Policy that picks a random core."""

    def pick(
        self, keys: Sequence[int], num_tokens: int, now: float, without: int = -1, favorite: int | None = None
    ) -> int | None:
        cores = self.cores
        if len(cores) <= 1:
            return cores[0] if cores else None
        while (core := cores[int(self._random.random() * len(cores))]) == without:
            pass
        return core


class PowerOfTwo(RandomPolicy):
    """Policy that picks, of two random cores, the one with fewer prompt tokens waiting, then with fewer answers."""

    def pick(
        self, keys: Sequence[int], num_tokens: int, now: float, without: int = -1, favorite: int | None = None
    ) -> int | None:
        two = [super(PowerOfTwo, self).pick(keys, num_tokens, now, without) for _ in range(2)]
        found = [core for core in two if core is not None]
        loads = self.loads
        return min(found, key=lambda core: (loads[core].num_waiting_tokens, loads[core].num_open), default=None)


class BoundedHash(RandomPolicy):
    """Policy of consistent hashing of the prompt's first blocks; it passes over a core with 1.25 times the mean of open
    answers."""

    _ring: list[tuple[int, int]]
    _ring_of: tuple[int, ...] = ()

    def pick(
        self, keys: Sequence[int], num_tokens: int, now: float, without: int = -1, favorite: int | None = None
    ) -> int | None:
        if not keys or len(self.cores) <= 1:
            return super().pick(keys, num_tokens, now, without)
        if self._ring_of != tuple(self.cores):
            points = [(_hash(core, point), core) for core in self.cores for point in range(NUM_POINTS)]
            self._ring, self._ring_of = sorted(points), tuple(self.cores)
        most = math.ceil(MAX_OVER_MEAN * (len(self.open) + 1) / len(self.cores))
        start = bisect_left(self._ring, (_hash(*keys[:NUM_HASHED]), -1))
        for i in range(len(self._ring)):
            _, core = self._ring[(start + i) % len(self._ring)]
            if core != without and self.loads[core].num_open < most:
                return core
        return super().pick(keys, num_tokens, now, without)


class LateIndex(PrefixIndex):
    """Index that learns of each prompt some seconds late, as that of a frontend would from others."""

    def __init__(self, max_entries: int, delay_s: float, clock: Callable[[], float]) -> None:
        super().__init__(max_entries)
        self._delay_s, self._clock = delay_s, clock
        self._late: deque[tuple[float, int, Sequence[int], int]] = deque()

    def add(self, core: int, keys: Sequence[int], stamp: int) -> None:
        self._late.append((self._clock() + self._delay_s, core, keys, stamp))

    def longest(self, keys: Sequence[int], oldest: Mapping[int, int], limit: int) -> dict[int, int]:
        while self._late and self._late[0][0] <= self._clock():
            super().add(*self._late.popleft()[1:])
        return super().longest(keys, oldest, limit)


def _hash(*numbers: int) -> int:
    data = b"".join(number.to_bytes(16, "little") for number in numbers)
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


POLICIES: dict[str, Callable[..., Router]] = {
    "random": RandomPolicy,
    "power of two": PowerOfTwo,
    "bounded hash": BoundedHash,
    "router": Router,
}
