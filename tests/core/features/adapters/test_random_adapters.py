"""Any order of adds, aborts, late, failed and hanging fills, reloads and losses keeps every invariant, with more
adapters than slots. The worker checks that no slot is filled under a step in flight, that each row computes with its
own adapter on all ranks, and that no block is read under another adapter."""

from __future__ import annotations

import random
from pathlib import Path
from typing import ClassVar

import pytest

from tokenloom.core.engine import BEAT_S
from tokenloom.tests.core.fake_adapters import digest_of
from tokenloom.tests.core.fake_worker import expected_tokens
from tokenloom.tests.core.random_operations import RandomOperations
from tokenloom.tests.support.today import seeds

START_TIMEOUT_S = 4.0


class AdapterOperations(RandomOperations):
    """A core with few slots."""

    weights: ClassVar[dict[str, float]] = RandomOperations.weights | {"reload": 0.7, "let_time_pass": 2, "fill": 12}

    def __init__(self, seed: int, record: Path) -> None:
        rng, self.now = random.Random(seed), 0.0
        self.num_adapters = rng.choice([2, 5, 9])
        super().__init__(
            seed,
            record,
            monotonic=lambda: self.now,
            enable_lora=True,
            max_loras=rng.choice([1, 2, 4]),
            tensor_parallel_size=rng.choice([1, 1, 2]),
            start_timeout_s=START_TIMEOUT_S,
        )
        self.harness.fills_by_itself = False

    def end(self) -> None:
        super().end()
        self.harness.core.adapters.check_invariants([])

    def add_request(self, key: int) -> None:
        rng, prompt = self.rng, self.draw_prompt(30)
        adapter, max_tokens = rng.randrange(self.num_adapters + 1), rng.randrange(1, 20)
        outputs = expected_tokens(prompt, key, max_tokens, [], digest_of(adapter))[: rng.choice([0, 0, 0, 5])]
        priority = rng.randrange(-2, 3)
        self.harness.add(key, prompt, max_tokens, outputs=outputs, adapter=adapter, priority=priority)

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


@pytest.mark.parametrize("seed", seeds(8, 92))
def test_random_operations_with_adapters_keep_every_invariant(seed: int, tmp_path: Path) -> None:
    AdapterOperations(seed, tmp_path / "blocks").run(500)
