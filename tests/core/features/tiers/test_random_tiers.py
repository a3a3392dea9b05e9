"""Any order of operations with blocks in slots, on a disk and in a remote reads no wrong block and loses no request."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import ClassVar

import pytest

from tokenloom.core.features.tiers.hits import HOST
from tokenloom.core.features.tiers.options import OffloadOptions
from tokenloom.core.kv.computed import Computed
from tokenloom.core.kv.outer_blocks import POOL
from tokenloom.core.request import Request
from tokenloom.ipc.messages.tier import STORE_ON_DISK, STORE_REMOTELY
from tokenloom.ipc.process.arena import ArenaShape
from tokenloom.tests.core.features.tiers.settling import make_slow, settle
from tokenloom.tests.core.harness import TURN_S, Harness, random_sizes
from tokenloom.tests.core.kv.group_sets import SETS, Groups
from tokenloom.tests.core.random_operations import RandomOperations
from tokenloom.tests.support.today import seeds, some

DISK = 2  # place
SALTS = (None, None, "a", "b")
ON_BOTH = STORE_ON_DISK | STORE_REMOTELY


class CheckedHarness(Harness):
    """A core that compares each hit with the longest that a search of all boundaries finds in pools and slots."""

    def renew_core(self) -> None:
        super().renew_core()
        kv_cache = self.core.scheduler.kv_cache
        get = kv_cache.get_computed_blocks

        def compared(request: Request) -> Computed:
            found, slots = get(request), self.offload.slots
            has = [
                [
                    pool.lookup(key := kv_cache.key(request, i)) is not None or slots.lookup(key, group) is not None
                    for i in range(kv_cache.num_readable_blocks(request))
                ]
                for group, pool in enumerate(kv_cache.pools)
            ]
            ends = range(len(has[0]), 0, -1)
            suits = (
                all(all(has[group][i] for i in needed) for group, needed in enumerate(kv_cache.needed(end)))
                for end in ends
            )
            longest = next((end for end, is_suited in zip(ends, suits, strict=True) if is_suited), 0)
            assert found.num_blocks == longest, "a shorter hit than there is, or a longer one"
            return found

        kv_cache.get_computed_blocks = compared  # type: ignore[method-assign]


class TierOperations(RandomOperations):
    """Tiers of any size; half of the cores serve adapters too. `seen`: the most of each event."""

    weights: ClassVar[dict[str, float]] = {
        "add": 15,
        "abort": 3,
        "lose_worker": 0.3,
        "lose_core": 0.7,
        "lose_tier": 0.3,
        "lose_host": 0.2,
        "reset": 0.5,
        "step": 30,
        "move_tier": 20,
        "answer": 30,
    }

    def __init__(self, seed: int, record: Path, name: str = "") -> None:
        """name: of the KV groups; empty: one that sees all tokens."""
        rng = random.Random(seed)
        block_size = rng.choice([1, 2, 4, 8, 16])
        self.num_adapters = 2 * (seed % 2)
        num_slots = rng.choice([2, 5, 30, 200])
        slot_bytes = 1 << rng.choice([10, 24, 26])  # with large ones a step loads few
        tiers = OffloadOptions(
            arena=ArenaShape(num_slots, (1,), (slot_bytes,)),
            block_size=block_size,
            device="cpu",
            facts=b"{}",
            token_s=1.0,
            quota=rng.choice([0.3, 1.0]),
            is_host_tier=rng.random() < 0.6,
            sources=rng.choice([0, STORE_ON_DISK, STORE_REMOTELY, STORE_REMOTELY, ON_BOTH]),
            has_sources=True,
            writes_salted_remotely=rng.random() < 0.5,
        )
        sizes = {"block_size": block_size, "num_blocks": max(rng.randrange(4, 80), 3 + 80 // block_size)}
        self.tiers = tiers
        options = {"seed": seed, "tiers": tiers, "enable_prefix_caching": True, **sizes}
        lora = {"enable_lora": bool(self.num_adapters), "max_loras": 2}
        if name:
            options |= self._groups(rng, SETS[name], num_slots, slot_bytes)
        super().__init__(seed, record, CheckedHarness, **options | lora)
        tier = self.harness.tier
        tier.bad_share, tier.lost_share = rng.choice([0, 0.1, 0.5]), rng.choice([0, 0.1])
        make_slow(self.harness, rng.choice([0.0, 1.0, 1.0, 1.0]))
        self.seen = Counter[str]()

    def _groups(self, rng: random.Random, groups: Groups, num_slots: int, slot_bytes: int) -> dict[str, object]:
        """Return the options of a pool and an arena with several groups that are little larger than must be."""
        sizes = random_sizes(rng) | {"enable_prefix_caching": True}
        pool = groups.pool(rng.choice([0, 1, 4, 30]), sizes["block_size"], sizes["max_num_batched_tokens"])
        each = [slot_bytes // max(groups.block_bytes) * size for size in groups.block_bytes]
        arena = ArenaShape.of(each, 0)
        arena = ArenaShape(len(each) + num_slots // max(arena.slots_of_slab), arena.slots_of_slab, tuple(each))
        tiers = self.tiers._replace(arena=arena, block_size=sizes["block_size"])
        return {"windows": groups.windows, "pool": pool, "tiers": tiers, **sizes}

    def add_request(self, key: int) -> None:
        rng, prompt = self.rng, self.draw_prompt(60)
        pooling = self.draw_pooling() if rng.random() < 0.1 else None
        adapter, salt = rng.randrange(self.num_adapters + 1), rng.choice(SALTS)
        self.harness.add(key, prompt, rng.randrange(1, 20), pooling=pooling, adapter=adapter, cache_salt=salt)

    def lose_core(self) -> None:
        super().lose_core()
        make_slow(self.harness, 1.0)

    def lose_tier(self) -> None:
        self.harness.lose_tier()

    def lose_host(self) -> None:
        self.harness.lose_host()

    def reset(self) -> None:
        self.harness.core.reset_prefix_cache()

    def move_tier(self) -> None:
        self.harness.fill_all()
        self.harness.tier.act()
        self.harness.now += TURN_S
        self.harness.offload.tick(is_idle=self.rng.random() < 0.5)

    def end(self) -> None:
        super().end()
        settle(self.harness)
        self.check()
        assert self.harness.offload.slots.num_used == 0, "slots leaked"

    def check(self) -> None:
        super().check()
        harness, offload = self.harness, self.harness.offload
        offload.check_invariants(entry.copies for entry in harness.core.scheduler.ledger.entries)
        assert all(offload.slots.ref_count(slot) for slot in harness.tier.owned_slots), "a slot in use is free"
        kv_cache = harness.core.scheduler.kv_cache
        assert sum(offload.hits.num_tokens_by_place) == kv_cache.num_hit_tokens, "a found block counts once"
        for key, loaded in harness.loaded.items():
            assert sum(loaded.values()) <= harness.cached[key], "more tokens were loaded than found"
            assert all(num % kv_cache.block_size == 0 for num in loaded.values())
            self.see(**{f"first_{place}": num for place, num in loaded.items()})
        self.see(**{str(place): num for place, num in enumerate(offload.hits.num_tokens_by_place)})
        self.see(stored=offload.num_stored, loaded=harness.tier.num_loaded, written=harness.tier.num_stored)

    def see(self, **counts: int) -> None:
        self.seen |= Counter(counts)


@pytest.mark.parametrize("seed", seeds(3, 197))
def test_random_operations_with_tiers_keep_every_invariant(seed: int, tmp_path: Path) -> None:
    TierOperations(seed, tmp_path / "blocks").run(400)


@pytest.mark.parametrize("name", some(list(SETS), 4))
@pytest.mark.parametrize("seed", seeds(1, 49))
def test_random_operations_with_tiers_and_groups_keep_every_invariant(seed: int, name: str, tmp_path: Path) -> None:
    TierOperations(seed, tmp_path / "blocks", name).run(300)


def test_the_random_operations_meet_every_place(tmp_path: Path) -> None:
    total: Counter[str] = Counter()
    for seed in (4, 11, 13, 16, 20):
        operations = TierOperations(seed, tmp_path / f"blocks-{seed}")
        operations.run(400)
        total += operations.seen
    wanted = [str(place) for place in (POOL, HOST, DISK)] + ["stored", "loaded", "written", "first_host", "first_disk"]
    assert all(total[name] > 20 for name in wanted), total
