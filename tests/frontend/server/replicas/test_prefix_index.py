"""The prefix index against plain sets, its limits in entries and look-ups, and the keys of prompts."""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Sequence

import numpy as np
import pytest

from tokenloom.frontend.server.replicas.prefix_index import POPULAR, PrefixIndex
from tokenloom.frontend.server.replicas.prefix_keys import KEY_TOKENS, prefix_keys
from tokenloom.tests.support.today import seeds

NUM_CORES = 6


class CountingKeys(Sequence[int]):
    """Keys that count how often one is read."""

    def __init__(self, keys: Sequence[int]) -> None:
        self.keys, self.num_reads = keys, 0

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, place: int) -> int:  # type: ignore[override]
        self.num_reads += 1
        return self.keys[place]


class PlainIndex:
    """The stamp of every pair of core and key that was ever sent."""

    def __init__(self) -> None:
        self.stamps: dict[tuple[int, int], int] = {}

    def depth(self, core: int, keys: Sequence[int], oldest: int) -> int:
        fresh = [self.stamps.get((core, key), -1) >= oldest for key in keys]
        return fresh.index(False) if False in fresh else len(keys)


def random_chain(draw: random.Random, chains: list[list[int]]) -> list[int]:
    """Return a chain that begins like an earlier one, or like none."""
    begin = draw.choice(chains) if chains and draw.random() < 0.8 else []
    chain = begin[: draw.randint(0, len(begin))] + [draw.getrandbits(64) for _ in range(draw.randint(0, 9))]
    chains.append(chain)
    return chain


@pytest.mark.parametrize("seed", seeds(3, 10))
def test_a_large_index_is_that_of_plain_sets(seed: int) -> None:
    draw, chains = random.Random(seed), list[list[int]]()
    index, plain, stamps = PrefixIndex(), PlainIndex(), [0] * NUM_CORES
    for _ in range(300):
        core, keys = draw.randrange(NUM_CORES), random_chain(draw, chains)
        stamps[core] += draw.randint(0, 50)
        oldest = {each: draw.randint(0, stamps[each]) for each in range(NUM_CORES)}
        depths = {each: plain.depth(each, keys, oldest[each]) for each in range(NUM_CORES)}
        assert {each: index.depth(each, keys, oldest[each]) for each in range(NUM_CORES)} == depths
        all_fresh = {each: plain.depth(each, keys, 0) for each in range(NUM_CORES)}
        found = index.longest(keys, dict.fromkeys(range(NUM_CORES), 0), NUM_CORES)
        assert found == {each: depth for each, depth in all_fresh.items() if depth}
        index.add(core, keys, stamps[core])
        plain.stamps.update(((core, key), stamps[core]) for key in keys)
        assert index.num_entries == len(plain.stamps)


@pytest.mark.parametrize("seed", seeds(2, 4))
def test_a_full_index_never_exceeds_its_limit_and_keeps_beginnings(seed: int) -> None:
    draw, chains = random.Random(seed), list[list[int]]()
    index = PrefixIndex(max_entries=60)
    for stamp in range(400):
        keys = random_chain(draw, chains)
        index.add(draw.randrange(NUM_CORES), keys, stamp)
        assert index.num_entries <= 60
        for chain in chains[-20:]:
            for core in range(NUM_CORES):
                held = [index.stamp_of(core, key) >= 0 for key in chain]
                assert held == sorted(held, reverse=True), "a key is held without those before it"


def test_only_the_cores_with_the_longest_prefixes_are_found_and_none_that_does_not_count() -> None:
    index, keys = PrefixIndex(), list(range(100, 150))
    for core in range(10):
        index.add(core, keys[: 5 * (core + 1)], 0)
    oldest = {core: 0 for core in range(10) if core != 8}
    assert index.longest(keys, oldest, 3) == {9: 50, 7: 40, 6: 35}


def test_a_key_of_almost_all_cores_names_no_candidates() -> None:
    index, keys = PrefixIndex(), list(range(20))
    for core in range(POPULAR + 5):
        index.add(core, keys[:4], 0)
    index.add(2, keys, 0)
    assert index.longest(keys, dict.fromkeys(range(POPULAR + 5), 0), 8) == {2: 20}


@pytest.mark.parametrize("length", [10, 100, 1000])
def test_look_ups_grow_with_the_logarithm_of_the_prompt(length: int) -> None:
    index, keys = PrefixIndex(), list(range(length))
    for core in range(8):
        index.add(core, keys[: length * (core + 1) // 8], 0)
    counting = CountingKeys(keys)
    index.longest(counting, dict.fromkeys(range(8), 0), 8)
    assert counting.num_reads <= 9 * (math.log2(length) + 3)
    counting.num_reads = 0
    index.depth(5, counting, 0)
    assert counting.num_reads <= math.log2(length) + 3


# ── keys ─────────────────────────────────────────────────────────────────────────────────────────────────────────────

PROMPT = np.arange(5 * KEY_TOKENS + 7, dtype=np.int32)


def test_keys_are_the_hashes_of_a_chain() -> None:
    digest, expected = hashlib.sha256(b"adapter").digest(), []
    for begin in range(0, 5 * KEY_TOKENS, KEY_TOKENS):
        digest = hashlib.sha256(digest + PROMPT[begin : begin + KEY_TOKENS].tobytes()).digest()
        expected.append(int.from_bytes(digest[:8], "little"))
    assert prefix_keys(PROMPT.tobytes(), b"adapter") == expected
