"""Any order of adds, aborts, late, failed and hanging fills, reloads and losses keeps every invariant, with more
adapters than slots. The worker checks that no slot is filled under a step in flight, that each row computes with its
own adapter on all ranks, and that no block is read under another adapter."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tokenloom.core.engine import BEAT_S
from tokenloom.tests.core.fake_adapters import digest_of
from tokenloom.tests.core.fake_worker import expected_tokens
from tokenloom.tests.core.harness import Harness, prompt_of, random_sizes

START_TIMEOUT_S = 4.0


class AdapterOperations:
    """A core with few slots, and random operations on it."""

    def __init__(self, seed: int, record: Path) -> None:
        self.rng = rng = random.Random(seed)
        self.now = 0.0
        self.num_adapters = rng.choice([2, 5, 9])
        self.harness = Harness(
            record=record,
            monotonic=lambda: self.now,
            scheduling_policy=rng.choice(["fcfs", "priority"]),
            enable_lora=True,
            max_loras=rng.choice([1, 2, 4]),
            tensor_parallel_size=rng.choice([1, 1, 2]),
            start_timeout_s=START_TIMEOUT_S,
            **random_sizes(rng),  # type: ignore[arg-type]
        )
        self.harness.fills_by_itself = False
        self.stems = [prompt_of(rng, 30) for _ in range(3)]
        self.num_added = 0

    def run(self, num_operations: int) -> None:
        operations = {
            self.add: 14,
            self.abort: 3,
            self.lose_worker: 0.5,
            self.lose_core: 1.5,
            self.reload: 0.7,
            self.let_time_pass: 2,
            self.fill: 12,
        }
        for _ in range(num_operations):
            if (draw := self.rng.random()) < 0.3:
                self.rng.choices(list(operations), list(operations.values()))[0]()
            elif draw < 0.62:
                self.harness.core.step()
            else:
                self.harness.answer()
            self.harness.core.scheduler.check_invariants()
        self.harness.fills_by_itself = True
        self.harness.run_to_the_end()
        self.harness.core.adapters.check_invariants([], [])

    def add(self) -> None:
        if self.harness.core.num_requests >= 40:
            return
        rng, key, self.num_added = self.rng, self.num_added, self.num_added + 1
        prompt = rng.choice(self.stems)[: rng.randrange(1, 30)] + prompt_of(rng, rng.randrange(0, 4))
        adapter, max_tokens = rng.randrange(self.num_adapters + 1), rng.randrange(1, 20)
        outputs = expected_tokens(prompt, key, max_tokens, [], digest_of(adapter))[: rng.choice([0, 0, 0, 5])]
        priority = rng.randrange(-2, 3)
        self.harness.add(key, prompt, max_tokens, outputs=outputs, adapter=adapter, priority=priority)

    def abort(self) -> None:
        if self.num_added:
            self.harness.abort(self.rng.randrange(self.num_added))

    def lose_worker(self) -> None:
        self.harness.lose_worker()

    def lose_core(self) -> None:
        self.harness.lose_core(self.rng.randrange(3), with_worker=self.rng.random() < 0.2)

    def reload(self) -> None:
        """Other weights are loaded: the engine is quiet, and the workers drop their adapters."""
        harness = self.harness
        harness.core.pause("keep")
        while harness.core.scheduler.ledger.entries:
            harness.answer()
        harness.core.forget_computed()
        harness.core.scheduler.take_step()
        harness.worker.reload()
        harness.core.resume()

    def fill(self) -> None:
        """A rank ends its oldest fill, mostly without an error."""
        if ranks := self.harness.worker.adapters.busy_ranks:
            self.harness.fill(self.rng.choice(ranks), self.rng.choice([""] * 9 + ["a damaged file"]))

    def let_time_pass(self) -> None:
        """Sometimes so much that fills have hung; their ranks answer later."""
        adapters, clock = self.harness.core.adapters, self.harness.awake_clock
        for _ in range(self.rng.choice([1, 3, 1 + int(START_TIMEOUT_S / BEAT_S)])):
            self.now += BEAT_S
            clock.look()
            hung = [
                each for each in adapters.table.slots if each.ranks_left and clock.now > each.begun_at + START_TIMEOUT_S
            ]
            self.harness.failed_adapters.update(each.digest for each in hung)
            if len(hung) == len(adapters.table.slots):
                self.harness.failed_adapters.update(adapters.wanting)
            adapters.expire(clock.now)
            self.harness.take()


@pytest.mark.parametrize("seed", range(30))
def test_random_operations_with_adapters_keep_every_invariant(seed: int, tmp_path: Path) -> None:
    AdapterOperations(seed, tmp_path / "blocks").run(500)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_100_000_random_operations_with_adapters_keep_every_invariant(tmp_path: Path) -> None:
    for seed in range(100, 200):
        AdapterOperations(seed, tmp_path / f"blocks-{seed}").run(1000)
