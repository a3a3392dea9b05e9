"""Fetches bring every block that a source has, whatever the slots held before."""

from __future__ import annotations

import random
from collections import Counter
from typing import cast

import pytest

from tokenloom.core.features.tiers.costs import ComputeCost
from tokenloom.core.features.tiers.fetch import MissingBlocks
from tokenloom.core.features.tiers.fetches import Fetches
from tokenloom.core.features.tiers.slots import Slots
from tokenloom.core.kv.block_pool import BlockPool
from tokenloom.core.request import Request
from tokenloom.ipc.codec import decode_ids, encode_ids
from tokenloom.ipc.messages.tier import BlocksFound, BlocksLoaded, CoreToTier, FindBlocks, LoadBlocks
from tokenloom.ipc.process.arena import ArenaShape
from tokenloom.tests.core.features.tiers.landing import ONE_GROUP, land

BLOCK_SIZE = 16


def fill(place: Slots | BlockPool, keys: list[bytes]) -> None:
    """Give slots, or blocks, content that nobody uses, the first key to the one that is reused first."""
    taken = place.allocate(len(keys)) if isinstance(place, BlockPool) else [place.allocate_for(0) or 0 for _ in keys]
    assert taken is not None
    for slot, key in zip(taken, keys, strict=True):
        place.cache_written(slot, key)
    place.free(taken)


class Fetched:
    """A request of `keys` that waits for blocks of a source, which has them all."""

    def __init__(self, keys: list[bytes], slots: Slots, pool: BlockPool) -> None:
        self.slots, self.pool, self.released = slots, pool, list[Request]()
        self.request = cast(Request, object())
        self.num_loads = Counter[bytes]()
        self.coming = list[tuple[LoadBlocks, int, bytes]]()  # order, slot, key
        compute = ComputeCost(1.0)
        self.fetches = Fetches(ONE_GROUP, [pool], slots, compute, BLOCK_SIZE, self.send, self.released.append)
        tokens = bytes(4 * BLOCK_SIZE * len(keys))
        self.fetches.begin(self.request, MissingBlocks(0, b"", tokens, lambda n: keys[:n]), 0.0)
        self.fetches.on_found(BlocksFound(serial=self.serial, sources=[bytes(len(keys))], end=len(keys)), 0.0)

    def send(self, message: CoreToTier) -> None:
        if isinstance(message, FindBlocks):
            self.serial = message.serial
        elif isinstance(message, LoadBlocks):
            ordered = decode_ids(message.slots)
            size = len(message.keys) // len(ordered)
            keys = [message.keys[i : i + size] for i in range(0, len(message.keys), size)]
            self.coming += [(message, slot, key) for slot, key in zip(ordered, keys, strict=True)]
            self.num_loads.update(keys)

    def load(self, index: int) -> None:
        """Report one of the blocks that are being loaded."""
        order, slot, _ = self.coming.pop(index)
        is_last = all(other is not order for other, _, _ in self.coming)
        self.fetches.on_loaded(BlocksLoaded(job=order.job, slots=encode_ids([slot]), is_last=is_last), 0.0)


def keys_of(count: int) -> list[bytes]:
    return [b"key %4d" % i for i in range(count)]


@pytest.mark.parametrize("seed", range(5))
def test_each_block_is_loaded_once_whatever_the_order_in_which_blocks_come(seed: int) -> None:
    """Several threads load at once, so blocks overtake each other. One that waits in a slot for those before it must
    not lose the slot to a later block of the same prompt, which is larger than the arena."""
    rng, keys = random.Random(seed), keys_of(100)
    fetched = Fetched(keys, Slots(ArenaShape(16, (1,), (1,))), BlockPool(200))
    while fetched.coming:
        fetched.load(rng.randrange(len(fetched.coming)))
        if not fetched.coming or rng.random() < 0.3:
            land(fetched.fetches, fetched.pool, 0.0)
    assert fetched.released == [fetched.request]
    assert fetched.num_loads == Counter(keys)


def test_a_block_that_a_slot_has_already_stays_there_while_the_others_come() -> None:
    keys, slots = keys_of(4), Slots(ArenaShape(8, (1,), (1,)))
    fill(slots, [b"old", keys[1], *(b"old %d" % i for i in range(6))])
    fetched = Fetched(keys, slots, BlockPool(100))
    while fetched.coming:
        fetched.load(0)
    assert fetched.num_loads == Counter([keys[0], keys[2], keys[3]])
    assert fetched.released == [fetched.request] and all(slots.lookup(key) for key in keys)


def test_a_block_that_leaves_the_pool_while_the_others_come_is_loaded() -> None:
    keys, pool = keys_of(4), BlockPool(100)
    fill(pool, [keys[1]])
    fetched = Fetched(keys, Slots(ArenaShape(8, (1,), (1,))), pool)
    pool.forget_all()
    while fetched.coming:
        fetched.load(0)
    assert fetched.num_loads == Counter(keys)
    assert fetched.released == [fetched.request] and all(fetched.slots.lookup(key) for key in keys)


def test_a_bad_block_ends_the_prefix_and_gives_back_the_slots_behind_it() -> None:
    keys, slots = keys_of(6), Slots(ArenaShape(16, (1,), (1,)))
    fetched = Fetched(keys, slots, BlockPool(100))
    for _ in range(3):
        fetched.load(-1)
    fetched.load(0)
    assert sorted(fetched.fetches.references()) == sorted(range(1, 7)), "slots that are loaded or hold content"
    order, bad, _ = fetched.coming[0]
    fetched.fetches.on_loaded(BlocksLoaded(job=order.job, bad_slots=encode_ids([bad]), is_last=True), 0.0)
    assert fetched.released == [fetched.request]
    held = [slots.lookup(keys[0])]
    assert fetched.fetches.references() == held
    slots.check_invariants([held])  # type: ignore[list-item]
