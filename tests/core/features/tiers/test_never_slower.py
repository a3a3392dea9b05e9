"""In virtual time: a request that waits for blocks has its first token no later than 1.05 times that of computing all.

The source answers after a latency, and brings blocks at a rate that may change or end on the way. Computing a token
costs more the later it comes.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable
from typing import Any, cast

import pytest

from tokenloom.core.features.tiers.costs import MIN_SAMPLE, ComputeCost
from tokenloom.core.features.tiers.fetch import MissingBlocks
from tokenloom.core.features.tiers.fetch_wait import PROBE_S
from tokenloom.core.features.tiers.fetches import Fetches
from tokenloom.core.features.tiers.slots import Slots
from tokenloom.core.kv.block_pool import BlockPool
from tokenloom.core.request import Request
from tokenloom.ipc.codec import decode_ids, encode_ids
from tokenloom.ipc.messages.tier import BlocksFound, BlocksLoaded, CoreToTier, FindBlocks, LoadBlocks
from tokenloom.ipc.process.arena import ArenaShape
from tokenloom.tests.core.features.tiers.landing import ONE_GROUP, land
from tokenloom.tests.support.today import some

BLOCK_SIZE, REPORT = 16, 16  # tokens; blocks in a report of the source
COMPUTE = (1e-3, 1e-6)  # seconds for a token, and for each one before it


class _Waiting:
    """A request that waits."""


class Source:
    """A disk with blocks that come one after the other. `block_s(now)`: seconds for a block that begins now."""

    def __init__(self, num_slots: int, latency_s: float, block_s: Callable[[float], float]) -> None:
        self.latency_s, self.block_s = latency_s, block_s
        self.now = 0.0
        self.events: list[tuple[float, int, Any]] = []
        self._numbers = itertools.count()
        self.num_loads = 0
        self._free_at = 0.0
        self.released: dict[Request, float] = {}
        self._pool, slots = BlockPool(10_000), Slots(ArenaShape(num_slots, (1,), (1,)))
        compute = ComputeCost(COMPUTE[0])
        for end in (512, 1024, 2048, 4096):  # learned from steps of one chunk
            seconds = 512 * COMPUTE[0] + COMPUTE[1] * 512 * (end - 256)
            compute.on_step(512, 512 * (end - 256), 0, seconds)
        self.fetches = Fetches(ONE_GROUP, [self._pool], slots, compute, BLOCK_SIZE, self._send, self._release)

    def _release(self, request: Request) -> None:
        self.released[request] = self.now

    def _send(self, message: CoreToTier) -> None:
        if isinstance(message, FindBlocks):
            num_blocks = len(message.token_ids) // (4 * BLOCK_SIZE)
            self._at(
                self.now + self.latency_s,
                BlocksFound(serial=message.serial, sources=[bytes(num_blocks)], end=num_blocks),
            )
        elif isinstance(message, LoadBlocks):
            self.num_loads += 1
            slots, begun = list(decode_ids(message.slots)), max(self.now + self.latency_s, self._free_at)
            for start in range(0, len(slots), REPORT):
                part = slots[start : start + REPORT]
                begun += len(part) * self.block_s(begun)
                is_last = start + REPORT >= len(slots)
                self._at(begun, BlocksLoaded(job=message.job, slots=encode_ids(part), is_last=is_last))
            self._free_at = begun

    def _at(self, when: float, message: object) -> None:
        heapq.heappush(self.events, (when, next(self._numbers), message))

    def first_token(self, num_blocks: int, name: int) -> float:
        """Run one request; return the seconds to its first token."""
        request = cast(Request, _Waiting())
        begun = self.now
        keys = [f"{name} {i}".encode() for i in range(num_blocks)]
        tokens = bytes(num_blocks * BLOCK_SIZE * 4)
        if not self.fetches.begin(request, MissingBlocks(0, b"", tokens, lambda n: keys[:n]), begun):
            return compute_s(0, num_blocks)
        fetch = self.fetches.by_request[request]
        while request not in self.released:
            deadline = self.fetches.next_deadline
            assert deadline is not None
            if self.events and self.events[0][0] <= deadline:
                self._next()
            else:
                self.now = deadline
                self.fetches.tick(self.now)
        waited = self.now - begun
        ready = fetch.num_ready
        self.fetches.forget(request)
        return waited + compute_s(ready, num_blocks)

    def _next(self) -> None:
        self.now, _, message = heapq.heappop(self.events)
        if isinstance(message, BlocksFound):
            self.fetches.on_found(message, self.now)
        else:
            self.fetches.on_loaded(message, self.now)
            land(self.fetches, self._pool, self.now)

    def rest(self, seconds: float) -> None:
        """Let time pass until nothing runs."""
        while self.events:
            self._next()
        self.now += seconds


def compute_s(start: int, end: int) -> float:
    """Return the seconds to compute blocks, and the last token."""
    start, end = start * BLOCK_SIZE, end * BLOCK_SIZE
    return (end - start) * (COMPUTE[0] + COMPUTE[1] * (start + end) / 2) + COMPUTE[0]


RATES = [10.0**power for power in (-5, -4, -3.5, -3, -2.5, -2, -1.9, -1.8, -1.7, -1.6, -1.5, -1, 0, 1)]


@pytest.mark.parametrize("num_blocks", [2, 8, 64, 256])
@pytest.mark.parametrize("block_s", RATES)
def test_a_source_of_any_rate_costs_at_most_5_percent(num_blocks: int, block_s: float) -> None:
    source = Source(1000, 0.0002, lambda now: block_s)
    off = compute_s(0, num_blocks)
    for number in range(6):  # the first does not know the rate
        assert source.first_token(num_blocks, number) <= 1.05 * off
        source.rest(1.0)


@pytest.mark.parametrize("num_blocks", [64, 256])
def test_a_fast_source_is_used_at_its_rate(num_blocks: int) -> None:
    source = Source(1000, 0.0002, lambda now: 1e-4)
    off = compute_s(0, num_blocks)
    assert source.first_token(num_blocks, 0) < 0.05 * off


@pytest.mark.parametrize("num_slots", [2, 8, 64, 128])
def test_a_fast_source_is_used_each_time_for_prompts_larger_than_the_slots(num_slots: int) -> None:
    """Its blocks come in many orders, of a few blocks each, that wait for one another."""
    source = Source(num_slots, 0.0002, lambda now: 1e-3)
    off = compute_s(0, 256)
    for number in range(6):
        assert source.first_token(256, number) < 0.1 * off
        source.rest(1.0)


def test_a_request_waits_longer_for_blocks_that_come_faster_than_they_are_computed() -> None:
    source = Source(1000, 0.0002, lambda now: 0.4 * COMPUTE[0] * BLOCK_SIZE)
    assert source.first_token(256, 0) < 0.5 * compute_s(0, 256)


@pytest.mark.parametrize("seed", some(range(30), 8))
def test_a_source_that_changes_or_stops_costs_at_most_5_percent_of_the_rest(seed: int) -> None:
    rng = random.Random(seed)
    change_at, before, after = rng.random(), rng.choice([1e-4, 1e-3, 1e-2]), rng.choice([1e-3, 1e-1, 1e9])
    source = Source(1000, rng.choice([0.0, 0.001, 0.05]), lambda now: before if now < change_at else after)
    off = compute_s(0, 256)
    for number in range(4):
        report_s = REPORT * before  # blocks that come in one report are known late
        assert source.first_token(256, number) <= 1.05 * off + report_s
        source.events.clear()


def test_a_slow_source_is_tried_again_with_one_block_and_then_used() -> None:
    rate = [1.0]
    source = Source(1000, 0.0002, lambda now: rate[0])
    off = compute_s(0, 64)
    source.first_token(64, 0)
    source.rest(1.0)
    known = source.num_loads
    assert source.first_token(64, 1) <= 1.05 * off
    assert source.num_loads == known, "a source known to be slow was asked for blocks"
    source.rest(PROBE_S)
    rate[0] = 1e-4
    for number in range(40):
        seconds = source.first_token(64, 2 + number)
        source.rest(PROBE_S + 1)
        if seconds < 0.1 * off:
            return
    raise AssertionError("a source that became fast is never used again")


def test_the_cost_of_tokens_is_learned_with_their_position() -> None:
    cost, rng = ComputeCost(1.0), random.Random(0)
    for _ in range(50):
        num_tokens, start = rng.randrange(MIN_SAMPLE, 600), rng.randrange(4000)
        middle = start + num_tokens / 2
        seconds = num_tokens * (COMPUTE[0] + COMPUTE[1] * middle) * rng.uniform(0.97, 1.03)
        cost.on_step(num_tokens, num_tokens * middle, 0, seconds)
    for start, end in ((0, 100), (0, 4000), (3000, 4000)):
        expected = (end - start) * (COMPUTE[0] + COMPUTE[1] * (start + end) / 2)
        assert cost.seconds(start, end) == pytest.approx(expected, rel=0.1)
