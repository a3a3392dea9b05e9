"""Each request knows why tokens of its prompt that were computed before were not in the prefix cache."""

from __future__ import annotations

import random

import pytest

from tokenloom.core.features.misses.lost_blocks import WAYS, LostBlocks
from tokenloom.core.features.misses.miss_finder import MissFinder
from tokenloom.ipc.kv.pool_shape import PoolShape
from tokenloom.ipc.messages.base import CacheMisses
from tokenloom.ipc.messages.core import TenantRef
from tokenloom.ipc.messages.tier import STORE_ON_DISK
from tokenloom.scripts.fleet.explain_misses import prompt_of as blocks_of
from tokenloom.scripts.fleet.explain_misses import replay
from tokenloom.tests.core.fake_cache import STATE
from tokenloom.tests.core.features.tiers.settling import settle
from tokenloom.tests.core.features.tiers.test_tier_feature import new_harness
from tokenloom.tests.core.harness import Harness, prompt_of
from tokenloom.tests.support.today import some

SIZE = 4
PROMPT = prompt_of(random.Random(1), 41)  # ten whole blocks and the last token


def misses_of(harness: Harness, key: int, prompt: list[int] | None = None, **more: object) -> dict[str, int]:
    """Run one request to its end; return the tokens that it missed, by reason."""
    harness.add(key, PROMPT if prompt is None else prompt, 2, **more)  # type: ignore[arg-type]
    harness.run_to_the_end()
    return dict(report_of(harness, key).num_tokens)


def report_of(harness: Harness, key: int) -> CacheMisses:
    return harness.missed.get(key, CacheMisses())


def flood(harness: Harness, key: int, **more: object) -> None:
    """Let other prompts need all blocks."""
    for i in range(3):
        prompt = prompt_of(random.Random(f"{key} {i}"), 100)
        assert not misses_of(harness, key + i, prompt, **more), "a new prompt misses nothing"


def test_the_reason_says_how_the_blocks_were_lost() -> None:
    harness = Harness(60, enable_lora=True)
    assert misses_of(harness, 1) == misses_of(harness, 2) == {}
    assert misses_of(harness, 3, skip_reading_prefix_cache=True) == {"unread": 40}
    assert misses_of(harness, 4, PROMPT[:20] + [1] * 21) == {}  # it parts from the other behind blocks that it finds
    flood(harness, 10)
    assert misses_of(harness, 20, PROMPT[:22]) == {"evicted": 20}
    assert 0 < report_of(harness, 20).evicted_s < 60 and report_of(harness, 20).memory_s == 0
    assert misses_of(harness, 21) == {"evicted": 20}  # the others are found
    harness.core.reset_prefix_cache()
    assert misses_of(harness, 22) == {"cleared": 40}
    harness.lose_worker()
    assert misses_of(harness, 23) == {"lost": 40}
    assert misses_of(harness, 24, adapter=1) == {"adapter": 40}
    assert misses_of(harness, 25, adapter=1) == {}
    harness.lose_worker()
    harness.core.enter_namespace(None)
    assert misses_of(harness, 26, PROMPT[:30] + [2] * 11) == {"weights": 28}
    assert harness.core.progress(1e9).num_missed_tokens["adapter"] == 40  # type: ignore[union-attr]


def test_a_tenant_learns_that_others_evicted_its_blocks_and_nothing_of_their_prompts() -> None:
    harness = Harness(60)
    assert misses_of(harness, 1, cache_salt="a") == {}
    assert misses_of(harness, 2, cache_salt="b") == misses_of(harness, 3) == {}
    flood(harness, 10, cache_salt="b")
    assert misses_of(harness, 20, cache_salt="a") == {"evicted_by_others": 40}
    assert misses_of(harness, 21, cache_salt="c") == {}
    harness.core.reset_prefix_cache()
    assert misses_of(harness, 22, cache_salt="d") == {}
    one, other = TenantRef(name="one"), TenantRef(name="other")
    assert misses_of(harness, 23, cache_salt="e", tenant=one) == {}
    assert misses_of(harness, 24, cache_salt="f", tenant=other) == {}
    assert misses_of(harness, 25, cache_salt="g", tenant=one) == {"salt": 40}, "a key with a name knows its own salts"


def test_a_prompt_that_another_request_computes_now_is_concurrent() -> None:
    harness = Harness(200, max_num_seqs=8, max_num_batched_tokens=16, long_prefill_token_threshold=8)
    for key, prompt in enumerate([PROMPT, PROMPT, PROMPT[:26] + [3] * 15, [4, *PROMPT[1:]]]):
        harness.add(key, prompt, 2)
    harness.turn()
    harness.turn()
    harness.add(5, PROMPT, 2)
    harness.run_to_the_end()
    found = {
        key: report_of(harness, key).num_tokens.get("concurrent", 0) + harness.cached[key]
        for key in range(6)
        if key != 4
    }
    assert found == {0: 0, 1: 40, 2: 24, 3: 0, 5: 40}
    assert all(set(report_of(harness, key).num_tokens) <= {"concurrent"} for key in found)


@pytest.mark.parametrize(("window", "reason"), [(6, "window"), (STATE, "state")])
def test_tokens_that_one_kv_group_alone_has_are_missed_for_the_other(window: int, reason: str) -> None:
    harness = Harness(windows=(None, window), pool=PoolShape(400, 20, (10, 5)), max_num_seqs=2)
    assert misses_of(harness, 1, PROMPT + prompt_of(random.Random(2), 60)) == {}
    harness.core.scheduler.kv_cache.pools[1].forget_all()
    assert misses_of(harness, 2, [*PROMPT, 1]) == {reason: 40}


def test_blocks_that_a_tier_would_bring_later_than_they_are_computed_are_missed_for_it() -> None:
    harness = new_harness(STORE_ON_DISK)
    assert misses_of(harness, 1) == {}
    settle(harness)
    flood(harness, 10)
    settle(harness)
    disk = harness.offload.fetches._rule.costs[0]
    disk.told_at = harness.now
    disk._latencies.append(1e6)
    assert misses_of(harness, 20) == {"tier": 40}


@pytest.mark.parametrize("seed", some(range(12), 3))
def test_each_miss_of_a_trace_is_explained_and_no_other_token(seed: int) -> None:
    """Sessions that grow by turns, share system prompts, pause, and fork, in a pool with room for few of them."""
    rng, prompts, fresh = random.Random(seed), list[list[int]](), iter(range(1, 1 << 20))
    sessions = [[1, 2, rng.randrange(3, 6)] for _ in range(30)]
    for _ in range(400):
        session = rng.choice(sessions[: rng.choice([3, 30])])
        if rng.random() < 0.1:
            del session[rng.randrange(1, len(session) + 1) :]
        session += [100 + next(fresh) for _ in range(rng.randrange(6))]
        del session[40:]
        prompts.append(blocks_of(session))
    done = replay(prompts, num_blocks=400, num_open=rng.choice([1, 4, 8]))
    assert not done.wrong and done.num_missed["evicted"] and done.num_cached_tokens


def test_the_memory_of_losses_is_bounded_and_says_how_far_it_reaches() -> None:
    now = iter(range(1, 1000))
    lost = LostBlocks(16, lambda: 7, lambda: float(next(now)), is_state=False)
    keys = [bytes(4) + bytes([i, 0, 0, 0]) + bytes([0, 0, 0, i % 2]) + bytes(20) for i in range(1, 40)]
    for key in keys:
        lost.evicted(0, 1, key)
    assert [lost.find(key) is not None for key in keys] == [False] * (39 - 2 * WAYS) + [True] * 2 * WAYS
    assert lost.forgets_before == 39 - 2 * WAYS and lost.find(keys[-1]) == ("evicted", 7, 39.0)
    harness = Harness(24, max_num_seqs=1)
    finder = next(each for each in harness.core.features.in_order if isinstance(each, MissFinder))
    finder._lost.forgets_before = 1.0
    assert misses_of(harness, 1) == {}
    harness.core.reset_prefix_cache()
    assert misses_of(harness, 2) == {"cleared": 40} and report_of(harness, 2).memory_s > 0
