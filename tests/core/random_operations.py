"""Any order of operations on a core of random sizes, with its invariants checked after each.

`weights` says how often an operation is drawn; a subclass adds operations, and requests of its own."""

from __future__ import annotations

import random
from pathlib import Path
from typing import ClassVar

from tokenloom.ipc.messages.core import TenantRef
from tokenloom.ipc.params.pooling_params import PoolingParams
from tokenloom.tests.core.fake_worker import expected_tokens
from tokenloom.tests.core.harness import Harness, prompt_of, random_sizes

MAX_REQUESTS = 40


class RandomOperations:
    """A core that gets requests, aborts and late or early answers, and loses workers and cores."""

    weights: ClassVar[dict[str, float]] = {
        "add": 15,
        "abort": 3,
        "lose_worker": 0.5,
        "lose_core": 1.5,
        "step": 40,
        "answer": 40,
    }

    def __init__(self, seed: int, record: Path, new_harness: type[Harness] = Harness, /, **options: object) -> None:
        """options: of the harness, beside or in place of random ones."""
        self.rng = rng = random.Random(seed)
        policy = rng.choice(["fcfs", "priority"])
        drawn = {"record": record, "scheduling_policy": policy, **random_sizes(rng)}
        self.harness = new_harness(**drawn | options)  # type: ignore[arg-type]
        several = [
            None,
            *(TenantRef(name=name, weight=weight) for name, weight in (("a", 1.0), ("b", 0.25), ("c", 8.0))),
        ]
        self.tenants = rng.choice([[None], several])
        self.stems = [prompt_of(rng, 60) for _ in range(3)]
        self.num_added = 0

    def run(self, num_operations: int) -> None:
        operations = [getattr(self, name) for name in self.weights]
        for operation in self.rng.choices(operations, list(self.weights.values()), k=num_operations):
            operation()
            self.check()
        self.end()

    def end(self) -> None:
        """Run until no request is left, and check its answers."""
        self.harness.run_to_the_end()

    def check(self) -> None:
        self.harness.core.scheduler.check_invariants()

    def add(self) -> None:
        if self.harness.core.num_requests < MAX_REQUESTS:
            self.add_request(self.num_added)
            self.num_added += 1

    def add_request(self, key: int) -> None:
        rng, prompt = self.rng, self.draw_prompt(30)
        max_tokens, priority = rng.randrange(1, 40), rng.randrange(-2, 3)
        tier = rng.choice(["default", "default", "flex"])
        tenant = rng.choice(self.tenants)
        if rng.random() < 0.3:
            self.harness.add(
                key, prompt, pooling=self.draw_pooling(), priority=priority, service_tier=tier, tenant=tenant
            )
            return
        stop = prompt_of(rng, rng.choice([0, 2, 30, 200]))
        outputs = expected_tokens(prompt, key, max_tokens, stop)[: rng.choice([0, 0, rng.randrange(40)])]
        more = {"priority": priority, "service_tier": tier, "tenant": tenant}
        more["prompt_cache_retention"] = rng.choice([None, None, "5m", "24h"])
        self.harness.add(key, prompt, max_tokens, stop=stop, outputs=outputs, **more)

    def draw_prompt(self, longest: int) -> list[int]:
        """Return tokens that others may have computed, and a few more."""
        return self.rng.choice(self.stems)[: self.rng.randrange(1, longest)] + prompt_of(
            self.rng, self.rng.randrange(8)
        )

    def draw_pooling(self) -> PoolingParams:
        return PoolingParams(method=self.rng.choice(["last", "mean"]))

    def abort(self) -> None:
        if self.num_added:
            self.harness.abort(self.rng.randrange(self.num_added))

    def lose_worker(self) -> None:
        self.harness.lose_worker()

    def lose_core(self) -> None:
        self.harness.lose_core(self.rng.randrange(3), with_worker=self.rng.random() < 0.2)

    def step(self) -> None:
        self.harness.core.step()

    def answer(self) -> None:
        self.harness.answer()

    def reload(self) -> None:
        """Other weights are loaded: the engine is quiet, and the workers drop their rows and adapters."""
        core = self.harness.core
        core.pause("keep")
        while core.scheduler.ledger.entries:
            self.harness.answer()
        core.forget_computed()
        core.scheduler.take_step()
        self.harness.worker.reload()
        core.resume()
