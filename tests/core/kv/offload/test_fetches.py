"""Fetches bring every block that a source has, whatever the slots held before."""

from __future__ import annotations

from typing import cast

from tokenloom.core.kv.block_pool import BlockPool
from tokenloom.core.kv.offload.costs import ComputeCost
from tokenloom.core.kv.offload.fetches import Fetches
from tokenloom.core.kv.offload.slots import Slots
from tokenloom.core.request import Request
from tokenloom.ipc.messages.tier import BlocksFound, BlocksLoaded, CoreToTier, FindBlocks, LoadBlocks

BLOCK_SIZE = 16


def fill(slots: Slots, keys: list[bytes]) -> None:
    """Give all slots content that nobody uses, the first key to the slot that is reused first."""
    taken = slots.allocate(len(keys))
    assert taken is not None
    for slot, key in zip(taken, keys, strict=True):
        slots.cache_written(slot, key)
    slots.free(taken)


def test_a_block_whose_slot_is_taken_for_another_block_of_the_prompt_is_loaded_again() -> None:
    keys = [b"key %d" % i for i in range(4)]
    slots, sent, released = Slots(8), list[CoreToTier](), list[Request]()
    fetches = Fetches(BlockPool(100), slots, ComputeCost(1.0), BLOCK_SIZE, sent.append, released.append)
    fill(slots, [b"old", keys[1], *(b"old %d" % i for i in range(6))])
    request = cast(Request, object())
    fetches.begin(request, 0, b"", bytes(4 * 4 * BLOCK_SIZE), lambda n: keys[:n], 0.0)
    (question,) = sent
    assert isinstance(question, FindBlocks)
    fetches.on_found(BlocksFound(serial=question.serial, sources=bytes(4)), 0.0)
    loaded = list[bytes]()
    while len(sent) > 1:
        order = sent.pop()
        assert isinstance(order, LoadBlocks)
        loaded.append(order.keys)
        fetches.on_loaded(BlocksLoaded(job=order.job, slots=order.slots, is_last=True), 0.0)
    assert loaded == [keys[0] + keys[2] + keys[3], keys[1]], "the block in a slot was neither kept nor loaded"
    assert released == [request] and all(slots.lookup(key) for key in keys)
