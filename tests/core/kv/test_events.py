"""A subscriber that reads vLLM's wire form mirrors the pool and the slots over any order of operations."""

from __future__ import annotations

import hashlib
import random
from array import array
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest

from tokenloom.core.features.tiers.options import OffloadOptions
from tokenloom.core.kv.events import KVEvents
from tokenloom.ipc.process.arena import ArenaShape
from tokenloom.tests.core.fake_adapters import digest_of
from tokenloom.tests.core.fake_media import image_digest, new_vision, random_prompt, with_images
from tokenloom.tests.core.features.tiers.settling import settle
from tokenloom.tests.core.harness import Harness, prompt_of
from tokenloom.tests.core.random_operations import RandomOperations
from tokenloom.tests.support.today import DAY

SALTS = (None, None, "a", "b")


class Mirror:
    """Keys by medium, as a router that knows only the wire form keeps them."""

    def __init__(self) -> None:
        self.keys: dict[str, set[bytes]] = {"GPU": set(), "CPU": set()}
        self.extra_by_key: dict[bytes, Any] = {}
        self.lora_by_key: dict[bytes, str | None] = {}
        self.num_stored = self.num_removed = self.num_cleared = self.num_with_media = 0

    def take(self, events: list[Any]) -> None:
        for event in msgspec.msgpack.decode(msgspec.msgpack.encode(events)):
            tag = event.pop("type")
            if tag == "AllBlocksCleared":
                self.num_cleared += 1
                self.keys = {"GPU": set(), "CPU": set()}
            elif tag == "BlockRemoved":
                hashes, medium = event["block_hashes"], event["medium"]
                assert hashes and event["group_idx"] == 0
                self.num_removed += len(hashes)
                for key in hashes:
                    self.keys[medium].remove(key)
            else:
                assert tag == "BlockStored"
                self._store(**event)

    def _store(
        self,
        block_hashes: list[bytes],
        parent_block_hash: bytes | None,
        token_ids: list[int],
        block_size: int,
        medium: str,
        extra_keys: list[list[Any] | None] | None,
        lora_name: str | None,
        **rest: object,
    ) -> None:
        hashes, parent, ids, size, extra = block_hashes, parent_block_hash, token_ids, block_size, extra_keys
        assert hashes and rest == {"lora_id": None, "group_idx": 0}
        self.num_stored += len(hashes)
        for i, key in enumerate(hashes):
            assert key not in self.keys[medium], "told twice"
            self.keys[medium].add(key)
            if medium == "CPU":
                assert parent is None and ids == [] and extra is None
                continue
            tokens = ids[i * size : (i + 1) * size]
            extras = (None if extra is None else extra[i]) or []
            media = [(bytes.fromhex(each[0]), each[1]) for each in extras if isinstance(each, list)]
            if parent is not None:  # the root of the first block is not told
                of_media = b"".join(digest + max(-start, 0).to_bytes(4, "little") for digest, start in media)
                assert key == hashlib.sha256(parent + array("i", tokens).tobytes() + of_media).digest()
            self.num_with_media += bool(media)
            self.extra_by_key[key] = tuple(each for each in extras if isinstance(each, str)) or None
            self.lora_by_key[key] = lora_name
            parent = key
        assert medium == "CPU" or len(ids) == size * len(hashes)


class Router:
    """A mirror beside a harness, whose cores may be replaced."""

    def __init__(self, harness: Harness) -> None:
        self.harness, self.mirror = harness, Mirror()
        self.attach()

    def attach(self) -> None:
        self.events: KVEvents = self.harness.core.scheduler.kv_cache.attach_events()

    def check(self, *, is_idle: bool = False) -> None:
        """Check that nothing is told that is not there, or not written yet; when idle all keys are told."""
        self.mirror.take(self.events.take())
        kv_cache = self.harness.core.scheduler.kv_cache
        in_pool, told = set(kv_cache.pool.keys), self.mirror.keys["GPU"]
        pending = {key for entry in self.harness.core.scheduler.ledger.entries for _, key in entry.pending_blocks}
        assert told <= in_pool and not told & pending
        if kv_cache.outer is not None:
            assert self.mirror.keys["CPU"] <= set(kv_cache.outer.slots.keys)
        if is_idle:
            waiting = {key for _, key in kv_cache.pool.pending}  # for the next step
            assert in_pool - told <= self.events._untold | waiting and self.events._content_by_key.keys() <= waiting
            assert kv_cache.outer is None or self.mirror.keys["CPU"] == set(kv_cache.outer.slots.keys)


class EventOperations(RandomOperations):
    """A core with a router beside it, as others read the events of its pool and its slots."""

    weights: ClassVar[dict[str, float]] = RandomOperations.weights | {"lose_worker": 1, "lose_core": 1, "reset": 1}

    def __init__(self, seed: int, record: Path, *, has_tiers: bool) -> None:
        rng = random.Random(seed)
        block_size, tiers = rng.choice([1, 2, 4, 8, 16]), None
        if has_tiers:
            arena = ArenaShape(rng.choice([5, 200]), (1,), (rng.choice([1 << 10, 1 << 26]),))
            tiers = OffloadOptions(arena, block_size, "cpu", b"{}", 0.01, is_host_tier=True)
        num_blocks = max(rng.randrange(4, 80), 3 + 80 // block_size)
        options = {"block_size": block_size, "num_blocks": num_blocks, "enable_prefix_caching": True, "tiers": tiers}
        vision = {"vision": new_vision(), "encoder_cache": 30, "max_item_embeds": 20}
        super().__init__(seed, record, Harness, **options, **vision)
        self.open_tiers()
        self.router = Router(self.harness)

    def open_tiers(self) -> None:
        """Let the tiers name their namespace before a block is there."""
        while self.harness.tier.act():
            pass

    def add_request(self, key: int) -> None:
        rng = self.rng
        parts = random_prompt(rng, 4, 20, self.stems[0]) if rng.random() < 0.3 else [self.draw_prompt(60)]
        prompt, media = with_images([*parts, prompt_of(rng, rng.randrange(1, 8))])
        self.harness.add(key, prompt, rng.randrange(1, 20), cache_salt=rng.choice(SALTS), media=media)

    def lose_core(self) -> None:
        super().lose_core()
        self.open_tiers()
        self.router.attach()

    def reset(self) -> None:
        self.harness.core.reset_prefix_cache()

    def check(self) -> None:
        super().check()
        self.router.check()

    def end(self) -> None:
        super().end()
        if self.harness.tiers is not None:
            settle(self.harness)


@pytest.mark.parametrize("has_tiers", [False, True])
def test_a_mirror_has_exactly_the_written_blocks(tmp_path: Path, has_tiers: bool) -> None:
    mirrors = []
    for seed in range(5 * DAY, 5 * DAY + 5):
        operations = EventOperations(seed, tmp_path / f"blocks-{seed}", has_tiers=has_tiers)
        operations.run(200)
        operations.router.check(is_idle=True)
        mirrors.append(operations.router.mirror)
    assert sum(mirror.num_stored for mirror in mirrors) > 100
    assert sum(mirror.num_removed for mirror in mirrors) > 10
    assert sum(mirror.num_with_media for mirror in mirrors) > 10
    assert sum(mirror.num_cleared for mirror in mirrors) > 2
    assert has_tiers or not any(mirror.keys["CPU"] for mirror in mirrors)


def test_old_names_stay_beside_new_ones_when_the_namespace_changes(tmp_path: Path) -> None:
    operations = EventOperations(0, tmp_path / "blocks", has_tiers=False)
    operations.run(100)
    operations.harness.core.scheduler.kv_cache.change_namespace()
    operations.harness.add(operations.num_added, prompt_of(operations.rng, 30))
    operations.harness.run_to_the_end()
    operations.router.mirror.take(operations.router.events.take())


def test_a_salt_is_not_told_but_keeps_tenants_apart() -> None:
    harness = Harness()
    router = Router(harness)
    for key, salt in enumerate((None, "tenant one", "tenant two", "tenant one")):
        harness.add(key, [1, 2, 3, 4, 5, 6, 7, 8, 9], 1, cache_salt=salt)
        harness.run()
    events = router.events.take()
    assert b"tenant" not in msgspec.msgpack.encode(events)
    router.mirror.take(events)
    assert len(router.mirror.keys["GPU"]) == 6, "two blocks for each tenant and for all others"
    extras = list(router.mirror.extra_by_key.values())
    assert extras[:2] == [None, None] and extras[2] == extras[3] != extras[4] == extras[5] is not None


def test_the_blocks_of_an_adapter_are_told_with_its_digest() -> None:
    harness = Harness(enable_lora=True)
    router = Router(harness)
    for key, adapter in enumerate((0, 1, 2, 1)):
        harness.add(key, [1, 2, 3, 4, 5, 6, 7, 8, 9], 1, adapter=adapter)
        harness.run()
    router.check()
    names = list(router.mirror.lora_by_key.values())
    assert names == [name for each in (0, 1, 2) for name in [digest_of(each).hex() or None] * 2], "two blocks each"


def test_the_images_of_a_block_are_told_with_their_places() -> None:
    harness = Harness(vision=new_vision(), encoder_cache=20, max_item_embeds=20)
    router = Router(harness)
    prompt, media = with_images([[1, 2, 3, 4, 5], (1, 5), (2, 3), [6, 7, 8, 9]])
    harness.add(1, prompt, 1, media=media, cache_salt="tenant")
    harness.run()
    stored = msgspec.msgpack.decode(msgspec.msgpack.encode(router.events.take()))[-1]
    one, two = image_digest(1).hex(), image_digest(2).hex()
    salt = stored["extra_keys"][0][0]
    assert stored["extra_keys"] == [[salt], [[one, 1], salt], [[one, -3], [two, 2], salt], [[two, -2], salt]]


def test_blocks_of_private_answers_are_not_told() -> None:
    harness = Harness(enable_prefix_caching=False)
    router = Router(harness)
    harness.add(1, list(range(9)), 1, n=3)
    harness.run()
    assert harness.core.scheduler.kv_cache.num_hit_tokens > 0, "the answers share their prompt"
    router.mirror.take(router.events.take())
    assert router.mirror.num_stored == 0 and not router.events._content_by_key


def test_the_content_of_a_recorded_block_is_told_when_a_request_uses_it(tmp_path: Path) -> None:
    harness = Harness(record=tmp_path / "blocks")
    harness.add(1, list(range(9)), 1)
    harness.run()
    harness.lose_core(0)
    router = Router(harness)
    router.mirror.take(router.events.take())
    assert router.mirror.num_cleared == 1 and not router.mirror.num_stored, "tokens are unknown"
    harness.add(2, list(range(9)), 1)
    harness.run()
    events = router.events.take()
    router.mirror.take(events)
    (stored,) = msgspec.msgpack.decode(msgspec.msgpack.encode(events))
    assert stored["type"] == "BlockStored" and stored["token_ids"] == list(range(8)), "both in one event"
