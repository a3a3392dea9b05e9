"""Any order of operations with blocks in slots, on a disk and in a remote reads no wrong block and loses no request."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest

from tokenloom.core.kv.offload.hits import HOST, POOL
from tokenloom.core.kv.offload.options import OffloadOptions
from tokenloom.ipc.messages.tier import STORE_ON_DISK, STORE_REMOTELY
from tokenloom.ipc.pooling_params import PoolingParams
from tokenloom.tests.core.harness import TURN_S, Harness, prompt_of, random_sizes

DISK = 2  # place
SALTS = (None, None, "a", "b")


def options_of(rng: random.Random, block_size: int) -> OffloadOptions:
    """Return tiers of any size, slow to compute so that loads are worth it."""
    return OffloadOptions(
        num_slots=rng.choice([2, 5, 30, 200]),
        slot_bytes=1 << rng.choice([10, 24, 26]),  # with large ones a step loads few
        block_size=block_size,
        device="cpu",
        facts=b"{}",
        token_s=1.0,
        quota=rng.choice([0.3, 1.0]),
        is_host_tier=rng.random() < 0.6,
        sources=rng.choice([0, STORE_ON_DISK, STORE_REMOTELY, STORE_REMOTELY, STORE_ON_DISK | STORE_REMOTELY]),
        has_sources=True,
        writes_salted_remotely=rng.random() < 0.5,
    )


def run_random_operations(seed: int, num_operations: int, folder: Path) -> Counter[str]:
    """Add, abort, answer, move the tier process, lose workers, cores and tier processes; check the invariants after
    each operation. Return the events."""
    rng = random.Random(seed)
    sizes = random_sizes(rng) | {"enable_prefix_caching": True}
    tiers = options_of(rng, int(sizes["block_size"]))
    adapters = {"enable_lora": True, "max_loras": 2} if seed % 2 else {}
    harness = Harness(record=folder / "blocks", tiers=tiers, seed=seed, **adapters, **sizes)  # type: ignore[arg-type]
    harness.tier.bad_share, harness.tier.lost_share = rng.choice([0, 0.1, 0.5]), rng.choice([0, 0.1])
    make_slow(harness, rng.choice([0.0, 1.0, 1.0, 1.0]))
    stems = [prompt_of(rng, 60) for _ in range(3)]
    key, counts = 0, Counter[str]()
    for _ in range(num_operations):
        action = rng.random()
        if action < 0.15 and harness.core.num_requests < 40:
            prompt = rng.choice(stems)[: rng.randrange(1, 60)] + prompt_of(rng, rng.randrange(0, 8))
            pooling = PoolingParams(method=rng.choice(["last", "mean"])) if rng.random() < 0.1 else None
            adapter, salt = rng.choice([0, 0, 1, 2]) if adapters else 0, rng.choice(SALTS)
            harness.add(key, prompt, rng.randrange(1, 20), pooling=pooling, adapter=adapter, cache_salt=salt)
            key += 1
        elif action < 0.18 and key:
            harness.abort(rng.randrange(key))
        elif action < 0.183:
            harness.lose_worker()
        elif action < 0.19:
            harness.lose_core(rng.randrange(3), with_worker=rng.random() < 0.2)
            make_slow(harness, 1.0)
        elif action < 0.193:
            harness.lose_tier()
        elif action < 0.195:
            harness.lose_host()
        elif action < 0.2:
            harness.core.reset_prefix_cache()
        elif action < 0.5:
            harness.core.step()
        elif action < 0.7:
            harness.fill_all()
            harness.tier.act()
            harness.now += TURN_S
            assert harness.core.offload is not None
            harness.core.offload.tick(is_idle=rng.random() < 0.5)
        else:
            harness.answer()
        check_slots(harness, counts)
    harness.run_to_the_end()
    settle(harness)
    check_slots(harness, counts)
    assert harness.core.offload is not None and harness.core.offload.num_used_slots == 0, "slots leaked"
    return counts


def make_slow(harness: Harness, token_s: float) -> None:
    """Let a token seem to take so long to compute."""
    harness.worker.token_s = token_s
    assert harness.core.offload is not None
    harness.core.offload.compute._c0 = token_s


def settle(harness: Harness) -> None:
    """Go on until every copy, load and write is done."""
    for _ in range(10_000):
        assert harness.core.offload is not None
        harness.now += TURN_S
        harness.core.offload.tick(is_idle=True)
        harness.fill_all()
        is_busy = harness.core.step() + len(harness.worker.queue)
        harness.answer()
        if not harness.tier.act() and not is_busy and not harness.core.offload.writes.num_queued:
            return
    raise AssertionError("the tiers never come to rest")


def check_slots(harness: Harness, counts: Counter[str]) -> None:
    """Check all invariants, and that the content of every idle slot is that of its key."""
    harness.core.scheduler.check_invariants()
    offload = harness.core.offload
    assert offload is not None
    offload.check_invariants(entry.copies for entry in harness.core.scheduler.ledger.entries)
    assert all(offload.slots.ref_count(slot) for slot in harness.tier.owned_slots), "a slot in use is free"
    for place, num_tokens in enumerate(offload.hits.num_tokens_by_place):
        counts[str(place)] = max(counts[str(place)], num_tokens)
    kv_cache = harness.core.scheduler.kv_cache
    assert sum(offload.hits.num_tokens_by_place) == kv_cache.num_hit_tokens, "a found block counts once"
    for key, loaded in harness.loaded.items():
        assert sum(loaded.values()) <= harness.cached[key], "more tokens were loaded than found"
        assert all(num % kv_cache.block_size == 0 for num in loaded.values())
        for place, num_tokens in loaded.items():
            counts[f"first {place}"] = max(counts[f"first {place}"], num_tokens)
    counts["stored"], counts["loaded"] = max(counts["stored"], offload.num_stored), harness.tier.num_loaded
    counts["written"] = harness.tier.num_stored


@pytest.mark.parametrize("seed", range(40))
def test_random_operations_with_tiers_keep_every_invariant(seed: int, tmp_path: Path) -> None:
    run_random_operations(seed, 400, tmp_path)


def test_the_random_operations_meet_every_place(tmp_path: Path) -> None:
    total: Counter[str] = Counter()
    for seed in range(10):
        (tmp_path / str(seed)).mkdir()
        total += run_random_operations(seed, 400, tmp_path / str(seed))
    wanted = [str(place) for place in (POOL, HOST, DISK)] + ["stored", "loaded", "written"]
    wanted += ["first host", "first disk"]
    assert all(total[name] > 20 for name in wanted), total


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_many_random_operations_with_tiers(tmp_path: Path) -> None:
    for seed in range(1000, 1400):
        (tmp_path / str(seed)).mkdir()
        run_random_operations(seed, 1000, tmp_path / str(seed))
