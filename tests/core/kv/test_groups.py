"""KV groups in any order of operations: keys that a row reads stand for its tokens, and hits are the longest.

The worker keeps facts in place of keys: a write to a block of one group destroys the facts of others in its bytes.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tokenloom.core.request import Request
from tokenloom.core.scheduling.step_feature import StepFeature
from tokenloom.ipc.kv.pool_shape import PoolShape
from tokenloom.tests.core.adversary import Adversary
from tokenloom.tests.core.fake_cache import STATE
from tokenloom.tests.core.fake_worker import FakeWorker
from tokenloom.tests.core.harness import Harness, prompt_of, random_sizes
from tokenloom.tests.core.kv.group_sets import SETS
from tokenloom.tests.core.random_operations import MAX_REQUESTS, RandomOperations
from tokenloom.tests.core.shadow_batch import ShadowedWorker
from tokenloom.tests.support.today import seeds, some


class GroupHarness(Harness):
    """A core that compares each hit with the longest that a search finds."""

    num_hits = 0
    new_worker: type[FakeWorker] = ShadowedWorker

    def renew_core(self) -> None:
        super().renew_core()
        features = self.core.scheduler.features
        features.use([*features.in_order, Oracle(self)])


class UnshadowedHarness(GroupHarness):
    """Of rows that bring several tokens without drafts, or none: no real worker does."""

    new_worker = FakeWorker


class Oracle(StepFeature):
    def __init__(self, harness: GroupHarness) -> None:
        self.harness, self.kv_cache = harness, harness.core.scheduler.kv_cache

    def admit(self, request: Request, num_computed: int) -> None:
        kv_cache, size = self.kv_cache, self.kv_cache.block_size
        has = [
            [pool.lookup(kv_cache.key(request, i)) is not None for i in range(kv_cache.num_readable_blocks(request))]
            for pool in kv_cache.pools
        ]

        def suits(end: int) -> bool:
            firsts = [
                max(end - (1 if each.is_state else -(-((each.window or 1 << 30) - 1) // size)), 0)
                for each in kv_cache.groups
            ]
            return all(all(there[first:end]) for there, first in zip(has, firsts, strict=True))

        longest = max(end for end in range(len(has[0]) + 1) if suits(end))
        assert num_computed == longest * size
        self.harness.num_hits += longest > 0


class GroupOperations(RandomOperations):
    """Operations on a core with groups, in a memory that holds little more than one long request."""

    harness: GroupHarness

    def __init__(self, name: str, seed: int, record: Path, harness: type[GroupHarness], **options: object) -> None:
        groups, rng = SETS[name], random.Random(seed)
        sizes = random_sizes(rng)
        step = sizes["block_size"], sizes["max_num_batched_tokens"]
        pool = groups.pool(rng.choice([0, 1, 4, 30]), *step)
        super().__init__(seed, record, harness, windows=groups.windows, pool=pool, **sizes, **options)
        self.most = groups.held(256, *step)

    def add(self) -> None:
        """Add a request, in one of four times for several answers, which may share blocks with one another alone."""
        rng, num_answers = self.rng, self.rng.randrange(2, 5)
        if rng.random() < 0.75 or self.num_added % 10 > 10 - num_answers:  # another frontend's
            super().add()
        elif self.harness.core.num_requests < MAX_REQUESTS:
            prompt, more = self.draw_prompt(30), {"n": num_answers, "skip_reading_prefix_cache": rng.random() < 0.5}
            self.harness.add(self.num_added, prompt, rng.randrange(1, 40), **more)  # type: ignore[arg-type]
            self.num_added += num_answers

    def check(self) -> None:
        super().check()
        assert all(held <= most for held, most in zip(self.harness.worker.cache.most_held, self.most, strict=True))


def operations_of(name: str, seed: int, record: Path) -> GroupOperations:
    """Operations without and with drafts, and with rewinds."""
    rng, options, harness = random.Random(seed), dict[str, object](), GroupHarness
    if seed % 3 == 1:
        options["proposer"] = Adversary(rng, accuracy=rng.choice([0.0, 0.8, 1.0]))
    elif seed % 3 == 2:
        fewest = STATE in SETS[name].windows  # a state cannot be taken back
        harness = UnshadowedHarness
        options["num_new_tokens"] = lambda: max(rng.choice([0, 1, 1, 1, 2, 3]), fewest)
    return GroupOperations(name, seed, record, harness, **options)


@pytest.mark.parametrize("name", some(list(SETS), 8))
@pytest.mark.parametrize("seed", seeds(3))
def test_random_operations_on_groups_keep_every_invariant(name: str, seed: int, tmp_path: Path) -> None:
    operations_of(name, seed, tmp_path / "blocks").run(250)


@pytest.mark.nightly
@pytest.mark.parametrize("name", SETS)
def test_a_hundred_thousand_operations_on_groups_keep_every_invariant(name: str, tmp_path: Path) -> None:
    cases: list[Any] = seeds(48)
    for number, case in enumerate(cases):
        operations_of(name, case.values[0], tmp_path / str(number)).run(300)


def test_a_prefix_is_found_where_a_window_is_kept_and_what_is_unusable_is_counted() -> None:
    pool, rng = PoolShape(16, 20, (3, 10)), random.Random(0)
    harness = GroupHarness(windows=(None, 6), pool=pool, max_num_seqs=1, max_num_batched_tokens=4)
    stem = prompt_of(rng, 80)
    for key in range(4):
        for number, prompt in ((key, stem + prompt_of(rng, 9)), (100 + key, prompt_of(rng, 30))):
            harness.add(number, prompt, 1)
            harness.run()
    kv_cache = harness.core.scheduler.kv_cache
    assert 0 < harness.cached[1] < 80, "no one expected that a request would begin at the end of the stem"
    assert harness.cached[2] == harness.cached[3] == 80
    assert kv_cache.num_unusable_tokens == [0, 80 - harness.cached[1]]


@pytest.mark.parametrize("name", SETS)
def test_the_next_core_finds_the_blocks_of_every_group_that_the_last_has_left(name: str, tmp_path: Path) -> None:
    groups, prompt = SETS[name], prompt_of(random.Random(0), 60)
    pool = PoolShape(200, groups.slab_bytes, groups.block_bytes)
    record = tmp_path / "blocks"
    harness = GroupHarness(windows=groups.windows, pool=pool, record=record, max_num_seqs=4, max_num_batched_tokens=16)
    harness.add(0, prompt, 8)
    harness.run()
    left = [set(each.keys) for each in harness.core.scheduler.kv_cache.pools]
    assert all(left)
    harness.lose_core(0)
    assert [set(each.keys) for each in harness.core.scheduler.kv_cache.pools] == left
    harness.add(1, prompt, 8)
    harness.run()
    assert harness.cached[1] == 56, "all whole blocks before the last token"
