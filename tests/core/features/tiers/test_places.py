"""A prompt with blocks that left the pool is found where they went, counted there, and gives the same tokens."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tokenloom.core.features.tiers.hits import HOST
from tokenloom.core.features.tiers.options import OffloadOptions
from tokenloom.core.features.tiers.tier_feature import TierFeature
from tokenloom.core.features.tiers.write_behind import BATCH
from tokenloom.core.kv.outer_blocks import POOL
from tokenloom.ipc.messages.tier import STORE_ON_DISK, STORE_REMOTELY
from tokenloom.ipc.process.arena import ArenaShape
from tokenloom.tests.core.features.tiers.settling import make_slow, settle
from tokenloom.tests.core.harness import Harness, prompt_of

DISK, REMOTE = 2, 3
SIZE, LENGTH = 4, 41  # tokens of a block, and of the prompt: 10 blocks can be read, the last token is computed


def new_harness(
    sources: int = 0, num_slots: int = 40, num_blocks: int = 30, seed: int = 0, **options: object
) -> Harness:
    tiers = OffloadOptions(
        arena=ArenaShape(num_slots, (1,), (1024,)),
        block_size=SIZE,
        device="cpu",
        facts=b"{}",
        token_s=1.0,
        is_host_tier=not sources,
        sources=sources,
        has_sources=bool(sources),
    )
    harness = Harness(num_blocks, tiers=tiers, seed=seed, block_size=SIZE, **options)
    make_slow(harness, 1.0)
    settle(harness)
    return harness


def ask(harness: Harness, key: int, prompt: list[int], **params: object) -> list[int]:
    """Run one request to its end; return the tokens found at each place."""
    before = list(harness.offload.hits.num_tokens_by_place)
    harness.add(key, prompt, 3, **params)  # type: ignore[arg-type]
    harness.run_to_the_end()
    settle(harness)
    return [after - was for after, was in zip(harness.offload.hits.num_tokens_by_place, before, strict=True)]


def asked(sources: int = 0, num_slots: int = 60, seed: int = 0) -> tuple[Harness, list[int]]:
    """Return a harness in which one request has run, and its prompt."""
    harness, prompt = new_harness(sources, num_slots, seed=seed), prompt_of(random.Random(seed), LENGTH)
    ask(harness, 0, prompt)
    return harness, prompt


def crowd_out(harness: Harness) -> None:
    """Fill the pool with other blocks."""
    rng = random.Random(1)
    for key in range(10, 16):
        ask(harness, key, prompt_of(rng, 60), cache_salt="others")


def at(place: int, num_tokens: int) -> list[int]:
    return [num_tokens if each == place else 0 for each in range(5)]


def test_evicted_blocks_come_back_from_the_host_tier() -> None:
    harness, rng = new_harness(num_slots=200), random.Random(0)
    prompt = prompt_of(rng, LENGTH)
    assert ask(harness, 0, prompt) == at(POOL, 0)
    assert ask(harness, 1, prompt) == at(POOL, 40)
    crowd_out(harness)
    assert ask(harness, 2, prompt) == at(HOST, 40)
    assert harness.cached[2] == 40 and harness.loaded[2] == {"host": 40}
    assert ask(harness, 3, prompt) == at(POOL, 40), "loaded blocks are in the pool again"
    assert harness.loaded[3] == {}
    progress = TierFeature(harness.offload, harness.core.scheduler).report()["tiers"]
    assert progress.num_tokens_by_place == [80, 40, 0, 0, 0]  # in the order of PLACES
    (host,) = progress.sources
    assert host.num_written >= 10 and host.num_read == 10 and host.read_bytes == 10 * 1024
    assert host.held_bytes == 1024 * progress.num_filled_slots > 0 and not progress.num_used_slots
    assert harness.offload.hits.shares(160) == " (50% pool, 25% host)"


def test_blocks_that_a_core_finds_in_the_pool_go_to_the_host_tier_when_they_are_evicted(tmp_path: Path) -> None:
    harness, prompt = new_harness(num_slots=200, record=tmp_path / "blocks"), prompt_of(random.Random(0), LENGTH)
    ask(harness, 0, prompt)
    harness.lose_core(0)
    make_slow(harness, 1.0)
    settle(harness)
    crowd_out(harness)
    assert ask(harness, 1, prompt) == at(HOST, 40)


def test_a_resumed_request_counts_nothing() -> None:
    harness, prompt = asked(num_slots=200)
    crowd_out(harness)
    harness.add(1, prompt, 3, outputs=harness.tokens[0][:1])
    harness.core.step()
    harness.take()
    assert harness.cached[1] == 0 and harness.loaded[1] == {}


@pytest.mark.parametrize(("steps_in_flight", "most"), [(1, SIZE - 1), (2, SIZE)])
def test_a_preempted_request_computes_its_last_block_again_at_most(steps_in_flight: int, most: int) -> None:
    """It fills a block while others take the pool's last ones: the block is stored all the same. With two steps in
    flight it also loses a token. If a full block ends its tokens then, the last of them must be computed."""
    num_preemptions = 0
    for seed in range(5):
        rng = random.Random(seed)
        harness = new_harness(num_slots=400, num_blocks=31, steps_in_flight=steps_in_flight)
        requests = [(prompt_of(rng, rng.choice([20, 24, 32, 41])), rng.randint(10, 45)) for _ in range(5)]
        for key, (prompt, num_outputs) in enumerate(requests):
            harness.add(key, prompt, num_outputs)
        harness.run_to_the_end()
        num_needed = sum(len(prompt) + num_outputs - 1 for prompt, num_outputs in requests)
        num_again = harness.core.stats.num_scheduled_tokens - num_needed
        assert 0 <= num_again <= most * harness.core.scheduler.num_preemptions
        num_preemptions += harness.core.scheduler.num_preemptions
    assert num_preemptions > 5


def test_a_host_tier_keeps_contexts_when_the_workers_are_lost() -> None:
    harness, prompt = asked(num_slots=200)
    crowd_out(harness)
    harness.lose_worker()
    assert ask(harness, 1, prompt) == at(HOST, 40)


def test_when_a_host_is_replaced_no_slot_is_found_and_nothing_of_it_is_written() -> None:
    harness, prompt = asked(STORE_ON_DISK, num_slots=200)
    harness.tier.objects.clear()
    harness.add(1, prompt_of(random.Random(1), LENGTH), 3)
    harness.core.step()
    harness.lose_host()
    assert harness.offload.slots.num_filled == 0
    harness.run_to_the_end()
    settle(harness)
    assert not any("lost" in content for content in harness.tier.objects.values()), "a lost slot was written"
    assert ask(harness, 2, prompt) == [0] * 5


@pytest.mark.parametrize("num_slots", [60, 8])
def test_blocks_come_back_from_the_disk_through_few_slots_too(num_slots: int) -> None:
    harness, prompt = asked(STORE_ON_DISK, num_slots)
    harness.core.reset_prefix_cache()
    assert ask(harness, 100, prompt) == at(DISK, 40)
    assert harness.cached[100] == 40 and harness.loaded[100] == {"disk": 40}
    assert ask(harness, 101, prompt) == at(POOL, 40)


@pytest.mark.parametrize("seed", range(5))
def test_blocks_that_overtook_others_on_their_way_to_the_pool_are_found(seed: int) -> None:
    """With few slots, blocks move to the pool as they come. A request may be admitted while a block between them is
    in a slot still."""
    harness, prompt = asked(STORE_ON_DISK, num_slots=4, seed=seed)
    harness.core.reset_prefix_cache()
    assert ask(harness, 1, prompt) == at(DISK, 40)
    assert harness.cached[1] == 40


@pytest.mark.parametrize("seed", range(5))
def test_a_slot_that_a_lost_step_did_not_fill_is_not_copied_to_the_pool(seed: int) -> None:
    """A request that loads its blocks may hold a slot that a step in flight fills with one of them. If that step is
    lost, the slot loses its key, and its content is not that block."""
    harness, prompt = asked(STORE_ON_DISK, num_slots=4, seed=seed)
    offload = harness.offload
    harness.core.reset_prefix_cache()
    harness.add(1, prompt, 3)
    while not offload.fetches.stalled():
        harness.core.step() if not harness.tier.queue and not harness.tier.jobs else harness.tier.act()
    (fetch,) = offload.fetches.stalled()
    for slot in fetch.held.values():
        harness.arena[slot] = ("garbage", slot)
        offload.slots.forget([slot])
    harness.run_to_the_end()


def test_the_remote_gets_blocks_that_are_seen_twice() -> None:
    harness, prompt = asked(STORE_REMOTELY)
    assert not harness.tier.objects
    ask(harness, 1, prompt)
    assert len(harness.tier.objects) == 10
    harness.core.reset_prefix_cache()
    assert ask(harness, 2, prompt) == at(REMOTE, 40)


def test_a_salt_finds_its_own_blocks_alone_and_others_blocks_never() -> None:
    harness, rng = new_harness(STORE_ON_DISK, 60), random.Random(0)
    prompt = prompt_of(rng, LENGTH)
    ask(harness, 0, prompt, cache_salt="a")
    harness.core.reset_prefix_cache()
    assert ask(harness, 1, prompt) == at(POOL, 0)
    assert ask(harness, 2, prompt, cache_salt="b") == at(POOL, 0)
    harness.core.reset_prefix_cache()
    assert ask(harness, 3, prompt, cache_salt="a") == at(DISK, 40)


def test_requests_that_may_not_read_the_cache_ask_no_tier() -> None:
    harness, prompt = asked(STORE_ON_DISK)
    harness.core.reset_prefix_cache()
    num_questions = harness.tier.num_questions
    assert ask(harness, 1, prompt, skip_reading_prefix_cache=True) == at(POOL, 0)
    assert harness.tier.num_questions == num_questions


def test_the_tier_process_is_woken_for_many_blocks_at_once_while_rows_decode() -> None:
    harness, rng = new_harness(STORE_ON_DISK, 400, 200, max_num_batched_tokens=512), random.Random(0)
    harness.add(0, prompt_of(rng, 9), 200)
    harness.add(1, prompt_of(rng, 201), 1)
    for _ in range(60):
        harness.core.step()
        harness.answer()
        harness.offload.tick(is_idle=False)
    orders = [message for message in harness.tier.queue if type(message).__name__ == "StoreBlocks"]
    assert len(orders) <= 60 * 8 // BATCH + 1
    harness.run()
