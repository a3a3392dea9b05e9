"""Any order of adds, aborts, late answers and losses keeps every invariant and loses no token."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tokenloom.ipc.pooling_params import PoolingParams
from tokenloom.tests.core.adversary import Adversary
from tokenloom.tests.core.fake_worker import expected_tokens
from tokenloom.tests.core.harness import Harness, prompt_of, random_sizes


def run_random_operations(
    seed: int, num_operations: int, record: Path, max_new_tokens: int = 1, accuracy: float | None = None
) -> None:
    """Add, abort, resume, answer late or early, lose workers and cores, on pools of random sizes; check the invariants
    after each operation. A row brings 0 … `max_new_tokens` tokens a step, or exactly one if that is 1. accuracy: of
    drafts; None: there are none."""
    rng = random.Random(seed)
    policy = rng.choice(["fcfs", "priority"])

    def num_new_tokens() -> int:
        return 1 if max_new_tokens == 1 else rng.randrange(max_new_tokens + 1)

    harness = Harness(
        record=record,
        num_new_tokens=num_new_tokens,
        proposer=None if accuracy is None else Adversary(rng, accuracy),
        scheduling_policy=policy,
        **random_sizes(rng),  # type: ignore[arg-type]
    )
    stems = [prompt_of(rng, 30) for _ in range(3)]
    key = 0
    for _ in range(num_operations):
        action = rng.random()
        if action < 0.15 and harness.core.num_requests < 40:
            prompt = rng.choice(stems)[: rng.randrange(1, 30)] + prompt_of(rng, rng.randrange(0, 8))
            max_tokens = rng.randrange(1, 40)
            stop = prompt_of(rng, rng.choice([0, 2, 30, 200]))
            outputs = expected_tokens(prompt, key, max_tokens, stop)[: rng.choice([0, 0, rng.randrange(40)])]
            pooling = PoolingParams(method=rng.choice(["last", "mean"])) if rng.random() < 0.3 else None
            outputs, stop = (outputs, stop) if pooling is None else ([], [])
            priority = rng.randrange(-2, 3)
            harness.add(key, prompt, max_tokens, stop=stop, outputs=outputs, pooling=pooling, priority=priority)
            key += 1
        elif action < 0.18 and key:
            harness.abort(rng.randrange(key))
        elif action < 0.185:
            harness.lose_worker()
        elif action < 0.20:
            harness.lose_core(rng.randrange(3), with_worker=rng.random() < 0.2)
        elif action < 0.6:
            harness.core.step()
        else:
            harness.answer()
        harness.core.scheduler.check_invariants()
    harness.run_to_the_end()


@pytest.mark.parametrize("seed", range(20))
def test_random_operations_keep_every_invariant(seed: int, tmp_path: Path) -> None:
    run_random_operations(seed, 500, tmp_path / "blocks")


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("max_new_tokens", [2, 6])
def test_rows_may_bring_any_number_of_tokens_in_a_step(seed: int, max_new_tokens: int, tmp_path: Path) -> None:
    run_random_operations(seed, 400, tmp_path / "blocks", max_new_tokens)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_100_000_random_operations_keep_every_invariant(tmp_path: Path) -> None:
    for seed in range(100, 200):
        run_random_operations(seed, 1000, tmp_path / f"blocks-{seed}", max_new_tokens=1 + seed % 4)
