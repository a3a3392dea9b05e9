"""A core with several KV groups reports the blocks of each, and the tokens that one of them lacked."""

from __future__ import annotations

from tokenloom.ipc.kv.pool_shape import PoolShape
from tokenloom.ipc.messages.supervisor import KVGroupState
from tokenloom.tests.core.harness import Harness

PROMPT = list(range(41))  # ten blocks of 4 tokens may be read from the cache


def groups_of(harness: Harness, now: float) -> list[KVGroupState]:
    progress = harness.core.progress(now)
    assert progress is not None
    return progress.kv_groups


def test_blocks_of_each_group_and_tokens_that_one_lacked_are_reported() -> None:
    harness = Harness(windows=[None, 6], pool=PoolShape(40, 20, (10, 5)))
    harness.add(1, PROMPT, max_tokens=1)
    harness.run()
    full, window = groups_of(harness, 0.0)
    assert (full.name, window.name) == ("attention", "window 6")
    assert full.num_used_blocks == window.num_used_blocks == 0
    assert full.num_cached_blocks == window.num_cached_blocks == 10
    assert full.num_free_blocks >= 11 and window.num_free_blocks >= 11, "with slabs of their own"
    harness.core.scheduler.kv_cache.pools[1].forget_all()
    harness.add(2, PROMPT, max_tokens=9)
    harness.turn()
    full, window = groups_of(harness, 9.0)
    assert (full.num_unusable_tokens, window.num_unusable_tokens) == (0, 40)
    assert full.num_used_blocks == window.num_used_blocks == 11
    harness.run()
    assert harness.cached[2] == 0


def test_a_core_with_one_group_reports_none() -> None:
    assert groups_of(Harness(), 0.0) == []
