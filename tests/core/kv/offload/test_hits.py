"""A request tells how many of its prompt's tokens came from each place outside the pool."""

from __future__ import annotations

import random

from tokenloom.core.kv.offload.options import OffloadOptions
from tokenloom.core.kv.offload.report import tiers_progress
from tokenloom.ipc.messages.tier import STORE_ON_DISK
from tokenloom.tests.core.harness import TURN_S, Harness, prompt_of

PROMPT = prompt_of(random.Random(1), 33)


def new_harness(*, is_host_tier: bool = True, sources: int = 0) -> Harness:
    tiers = OffloadOptions(100, 1024, 4, "cpu", b"{}", 1.0, is_host_tier, sources, has_sources=sources > 0)
    harness = Harness(num_blocks=24, block_size=4, tiers=tiers, max_num_seqs=4)
    harness.worker.token_s = 1.0  # so that loads are worth it
    harness.tier.act()  # opens
    return harness


def ask(harness: Harness, key: int, prompt: list[int]) -> tuple[int, dict[str, int]]:
    """Run a request alone; return the tokens that it found, and those from places outside the pool."""
    harness.add(key, prompt, 1)
    harness.run()
    for _ in range(20):
        harness.now += TURN_S
        harness.offload.tick(is_idle=True)
        harness.core.step()
        harness.answer()
        harness.tier.act()
    return harness.cached[key], {str(place): num for place, num in harness.loaded[key].items()}


def evict(harness: Harness, key: int) -> None:
    """Fill the pool with other content."""
    ask(harness, key, prompt_of(random.Random(key), 90))


def test_blocks_from_slots_count_for_the_host_and_then_for_the_pool() -> None:
    harness = new_harness()
    assert ask(harness, 1, PROMPT) == (0, {})
    evict(harness, 2)
    assert ask(harness, 3, PROMPT) == (32, {"host": 32})
    assert ask(harness, 4, PROMPT) == (32, {})
    progress = tiers_progress(harness.offload)
    assert progress.num_tokens_by_place == [32, 32, 0, 0, 0]  # in the order of PLACES
    (host,) = progress.sources
    assert host.num_written >= 8 and host.num_read == 8 and host.read_bytes == 8 * 1024
    assert host.held_bytes == 1024 * progress.num_filled_slots > 0 and not progress.num_used_slots
    assert harness.offload.hits.shares(128) == " (25% pool, 25% host)"


def test_blocks_from_a_disk_count_for_it_when_they_are_used_first() -> None:
    harness = new_harness(is_host_tier=False, sources=STORE_ON_DISK)
    ask(harness, 1, PROMPT)
    evict(harness, 2)
    found, loaded = ask(harness, 3, PROMPT)
    assert loaded == {"disk": found} and found > 0
    assert ask(harness, 4, PROMPT) == (32, {})


def test_a_resumed_request_counts_nothing() -> None:
    harness = new_harness()
    ask(harness, 1, PROMPT)
    evict(harness, 2)
    first = harness.tokens[1][0]
    harness.add(3, PROMPT, 2, outputs=[first])
    harness.core.step()
    harness.take()
    assert harness.cached[3] == 0 and harness.loaded[3] == {}
