"""Plays the part of the core that copies loaded blocks from slots to the pool."""

from __future__ import annotations

from tokenloom.core.features.tiers.fetches import Fetches
from tokenloom.core.kv.block_pool import BlockPool
from tokenloom.ipc.spec.kv.kv_groups import KVGroup

ONE_GROUP = [KVGroup(None, (0,), 1, 8)]


def land(fetches: Fetches, pool: BlockPool, now: float) -> None:
    """Copy the slots of each prompt that needs them for its other blocks to the pool, at once."""
    for fetch in fetches.stalled():
        landed = fetch.held_items
        blocks = pool.allocate(len(landed))
        assert blocks is not None
        for block, item in zip(blocks, landed, strict=True):
            pool.cache_block(block, item.key)
        pool.free(blocks)
        fetches.let_go(fetch, landed)
        fetches.on_slots_free(now)
