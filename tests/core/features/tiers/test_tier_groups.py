"""Blocks of several KV groups go out of the pool and come back; of windows only those that later requests need."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from tokenloom.core.features.tiers.hits import HOST
from tokenloom.core.features.tiers.options import OffloadOptions
from tokenloom.core.kv.block_hash import object_name
from tokenloom.core.kv.computed import Computed
from tokenloom.core.kv.outer_blocks import POOL
from tokenloom.core.request import Request
from tokenloom.ipc.codec import encode_ids
from tokenloom.ipc.kv.pool_shape import PoolShape
from tokenloom.ipc.messages.tier import STORE_ON_DISK
from tokenloom.ipc.process.arena import ArenaShape
from tokenloom.tests.core.features.tiers.settling import make_slow, settle
from tokenloom.tests.core.harness import Harness, prompt_of

DISK = 2  # place
SIZE, WINDOW = 4, 9  # tokens: a row needs two blocks of the window's group
LENGTH, ANSWER = 60, 23
LESS, PART = 8, 10  # blocks: a boundary at which windows are kept, and one behind it at which none are


def new_harness(sources: int = STORE_ON_DISK, num_slabs: int = 60, arena_slabs: int = 60, **options: object) -> Harness:
    tiers = OffloadOptions(
        arena=ArenaShape(arena_slabs, (2, 1), (8192, 16384)),
        block_size=SIZE,
        device="cpu",
        facts=b"{}",
        token_s=1.0,
        is_host_tier=not sources,
        sources=sources,
        has_sources=bool(sources),
    )
    pool = PoolShape(num_slabs, 2, (1, 2))
    harness = Harness(tiers=tiers, windows=(None, WINDOW), pool=pool, block_size=SIZE, **options)  # type: ignore[arg-type]
    make_slow(harness, 1.0)
    settle(harness)
    return harness


def ask(harness: Harness, key: int, prompt: list[int], num_tokens: int = ANSWER) -> list[int]:
    """Run one request to its end; return the tokens found at each place."""
    before = list(harness.offload.hits.num_tokens_by_place)
    harness.add(key, prompt, num_tokens)
    harness.run_to_the_end()
    settle(harness)
    return [after - was for after, was in zip(harness.offload.hits.num_tokens_by_place, before, strict=True)]


def keys_of(harness: Harness, tokens: list[int]) -> list[bytes]:
    return harness.core.scheduler.kv_cache.prompt_keys(encode_ids(tokens), None, b"", [])[:-1]


@pytest.mark.parametrize("chunk", [512, 12])
def test_of_windows_only_blocks_before_kept_boundaries_and_the_end_are_written(chunk: int) -> None:
    harness = new_harness(max_num_batched_tokens=chunk, max_num_seqs=2)
    prompt = prompt_of(random.Random(0), LENGTH)
    ask(harness, 0, prompt)
    keys = keys_of(harness, prompt + harness.tokens[0])
    end = (LENGTH + ANSWER - 1) // SIZE  # the last token sampled is not computed
    spacing = harness.core.scheduler.kv_cache.sizes.spacing
    last = (LENGTH - 1) // SIZE
    kept = {*range(spacing, last, spacing), last, end}
    needed = {i for boundary in kept for i in range(max(boundary - 2, 0), boundary)}
    assert len(needed) < end
    written = {name for _, name in harness.tier.objects}
    assert written == {*keys[:end], *(object_name(keys[i], 1) for i in needed)}


@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_the_next_turn_continues_at_the_answers_end_from_the_disk(steps_in_flight: int) -> None:
    harness, rng = new_harness(num_slabs=200, steps_in_flight=steps_in_flight), random.Random(0)
    prompt, end = prompt_of(rng, LENGTH), 0
    for turn in range(5):
        found = ask(harness, turn, prompt)
        assert found[DISK] == sum(found) == end, "all of the turn before, from the disk"
        end = (len(prompt) + ANSWER - 1) // SIZE * SIZE
        prompt = [*prompt, *harness.tokens[turn], *prompt_of(rng, 7)]
        harness.core.reset_prefix_cache()
        harness.offload.slots.forget_all()
        harness.lose_core(0, with_worker=True)
        make_slow(harness, 1.0)
        settle(harness)


def test_a_prefetch_that_is_too_large_loads_a_smaller_boundary_with_its_windows() -> None:
    harness, most_bytes = new_harness(num_slabs=200, arena_slabs=24), 0.75 * 24 * 16384
    prompt = prompt_of(random.Random(0), 200)
    ask(harness, 0, prompt)
    cache = harness.core.scheduler.kv_cache
    harness.core.reset_prefix_cache()
    harness.offload.slots.forget_all()
    num_loaded = list[int]()
    harness.offload.prefetch(encode_ids(prompt), None, b"", [], num_loaded.append)
    settle(harness)
    end, spacing = num_loaded[0] // SIZE, cache.sizes.spacing
    assert end % spacing == 0 and 0 < end < 50, "a boundary where the window is kept"
    assert end * 8192 + 2 * 16384 <= most_bytes < (end + spacing) * 8192 + 2 * 16384, "the largest that fits"


def test_evicted_windows_come_back_from_the_host_tier_and_demoted_ones_are_not_kept() -> None:
    harness, rng = new_harness(sources=0, num_slabs=44), random.Random(0)
    prompt = prompt_of(rng, LENGTH)
    ask(harness, 0, prompt)
    for key in range(1, 5):
        ask(harness, key, prompt_of(rng, LENGTH))
    slots, keys = harness.offload.slots, keys_of(harness, prompt + harness.tokens[0])
    assert sum(slots.lookup(key, 1) is not None for key in keys) < len(keys) / 2, "blocks behind windows fill the slots"
    turn = [*prompt, *harness.tokens[0], 1]
    found = ask(harness, 9, turn)
    assert sum(found) == (LENGTH + ANSWER - 1) // SIZE * SIZE and found[HOST] > 0 and found[DISK] == 0
    assert found[POOL] + found[HOST] == sum(found)


def test_a_window_block_that_cannot_be_read_makes_it_ask_once_more_for_a_smaller_boundary() -> None:
    harness, rng = new_harness(), random.Random(0)
    prompt = prompt_of(rng, LENGTH)
    ask(harness, 0, prompt)
    harness.core.reset_prefix_cache()
    harness.offload.slots.forget_all()
    keys, num_asked = keys_of(harness, prompt + harness.tokens[0]), harness.tier.num_questions
    end = (LENGTH + ANSWER - 1) // SIZE
    broken = 0, object_name(keys[end - 1], 1)
    load = harness.tier._load

    def lose(job: object, slot: int) -> bool:
        if job.keys[slot] == broken[1]:  # type: ignore[attr-defined]
            harness.tier.objects.pop(broken, None)
        return load(job, slot)  # type: ignore[arg-type]

    harness.tier._load = lose  # type: ignore[method-assign]
    found = ask(harness, 1, [*prompt, *harness.tokens[0], 1])
    assert harness.tier.num_questions == num_asked + 2
    assert sum(found) == (LENGTH - 1) // SIZE * SIZE, "it continues at the prompt's last boundary"


def test_a_prefix_whose_keys_alone_are_on_the_disk_is_kept_for_the_next_request() -> None:
    """The first request has written no window where others part from it. The second computes it and keeps it, so that
    the third, after the loss of all memory, continues there."""
    harness, rng = new_harness(num_slabs=200), random.Random(0)
    common = prompt_of(rng, PART * SIZE)
    for key, num_blocks in enumerate((0, LESS, PART)):
        found = ask(harness, key, [*common, *prompt_of(rng, LENGTH)])
        assert found[DISK] == sum(found) == num_blocks * SIZE
        harness.core.reset_prefix_cache()
        harness.offload.slots.forget_all()


def test_an_admission_looks_each_block_up_once() -> None:
    harness, rng = new_harness(sources=0, num_slabs=44), random.Random(0)
    prompt = prompt_of(rng, LENGTH)
    for key in range(5):
        ask(harness, key, prompt_of(rng, LENGTH) if key else prompt)
    kv_cache, slots = harness.core.scheduler.kv_cache, harness.offload.slots
    counts, admitted = Counter[tuple[str, int, bytes]](), list[Counter[tuple[str, int, bytes]]]()
    get, take, find_slot = kv_cache.get_computed_blocks, kv_cache.take_computed, slots.lookup

    def look(request: Request) -> Computed:
        counts.clear()
        return get(request)

    def admit(request: Request, computed: Computed, *, has_rows: bool) -> bool:
        is_admitted = take(request, computed, has_rows=has_rows)
        admitted.append(+counts)
        return is_admitted

    def counted_slot(key: bytes, group: int = 0) -> int | None:
        counts["slot", group, key] += 1
        return find_slot(key, group)

    def count_lookups_of(group: int) -> None:
        pool = kv_cache.pools[group]
        find_block = pool.lookup

        def counted_block(key: bytes) -> int | None:
            counts["pool", group, key] += 1
            return find_block(key)

        pool.lookup = counted_block  # type: ignore[method-assign]

    kv_cache.get_computed_blocks, kv_cache.take_computed = look, admit  # type: ignore[method-assign, assignment]
    slots.lookup = counted_slot  # type: ignore[method-assign]
    for group in range(2):
        count_lookups_of(group)
    found = ask(harness, 9, [*prompt, *harness.tokens[0], 1])
    end = (LENGTH + ANSWER - 1) // SIZE
    assert found[POOL] + found[HOST] == end * SIZE and found[HOST] > 0
    assert [{*each.values()} for each in admitted] == [{1}]
    assert sum(kind == "pool" for kind, _, _ in admitted[0]) >= end + 2, "both groups"
