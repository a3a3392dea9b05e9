"""The fitted seconds of a step are those that made the steps."""

from __future__ import annotations

import random

import pytest

from tokenloom.scripts.fleet.fit_step_cost import fit
from tokenloom.scripts.fleet.replica import StepCost


def steps_of(cost: StepCost, noise: float) -> list[tuple[float, ...]]:
    draw = random.Random(0)
    found = []
    for _ in range(2000):
        rows, tokens = draw.randint(1, 32), draw.choice([0, 0, draw.randint(1, 2000)])
        context = rows * draw.randint(1, 4000)
        pairs = tokens * draw.randint(1, 4000)
        seconds = cost.seconds(rows, tokens, context, pairs) * draw.uniform(1 - noise, 1 + noise)
        found.append((rows, tokens, context, pairs, seconds))
    return found


def test_a_known_cost_is_found_in_exact_steps() -> None:
    cost = StepCost(6e-3, 2e-4, 1e-4, 4e-8, 1e-8)
    assert fit(steps_of(cost, 0.0)) == pytest.approx(cost, rel=1e-6)


def test_noise_moves_no_estimate_far() -> None:
    cost = StepCost(6e-3, 2e-4, 1e-4, 4e-8, 1e-8)
    found = fit(steps_of(cost, 0.2))
    for step in ((1, 0, 100, 0), (16, 0, 30_000, 0), (16, 1000, 30_000, 2_000_000)):
        assert found.seconds(*step) == pytest.approx(cost.seconds(*step), rel=0.05)


def test_no_part_of_a_cost_is_below_zero() -> None:
    cost = fit(steps_of(StepCost(6e-3, 0.0, 1e-4, 0.0), 0.3))
    assert min(cost) >= 0 and cost.prompt_token_s == pytest.approx(1e-4, rel=0.05)
