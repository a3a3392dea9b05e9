"""A source's cost is learned from when its blocks come, however the orders for them are cut."""

from __future__ import annotations

import random

import pytest

from tokenloom.core.features.tiers.costs import SourceCost

LATENCY_S, BLOCK_S = 0.002, 0.001


def serve(cost: SourceCost, orders: list[tuple[float, int]], num_in_report: int, now: float = 0.0) -> float:
    """Let a source that brings one block after the other serve orders (seconds, blocks); return when it is done."""
    events = [(when, 0, count) for when, count in orders]
    waiting = 0
    for when, count in orders:
        now = max(now, when) + (LATENCY_S if when > now else 0.0)
        for _ in range(count):
            now += BLOCK_S
            waiting += 1
            if waiting == num_in_report or (when, count) == orders[-1]:
                events.append((now, 1, waiting))
                waiting = 0
    for when, is_report, count in sorted(events):
        if is_report:
            cost.on_report(count, 0, when)
        else:
            cost.on_order(count, when)
    return now


@pytest.mark.parametrize("num_in_report", [1, 4])
@pytest.mark.parametrize("size", [1, 2, 100])
def test_orders_that_wait_for_one_another_do_not_make_a_source_slow(size: int, num_in_report: int) -> None:
    cost, now = SourceCost(), 0.0
    for _ in range(5):
        begun = now + 1.0
        now = serve(cost, [(begun + 1e-6 * i, size) for i in range(200 // size)], num_in_report, now)
        assert cost.seconds(200) == pytest.approx(LATENCY_S + 200 * BLOCK_S, rel=0.1)


@pytest.mark.parametrize("seed", range(20))
def test_the_estimate_is_near_the_truth_for_orders_of_any_size_at_any_time(seed: int) -> None:
    rng, cost = random.Random(seed), SourceCost()
    when, orders = 1.0, []
    for _ in range(60):
        orders.append((when, rng.choice([1, 1, 2, 5, 30])))
        when += rng.choice([0.0001, 0.005, 0.1])
    serve(cost, orders, 1)
    assert 0.7 < cost.seconds(250) / (LATENCY_S + 250 * BLOCK_S) < 1.5


def test_blocks_that_do_not_come_teach_nothing() -> None:
    cost = SourceCost()
    cost.on_order(10, 1.0)
    cost.on_report(0, 10, 9.0)
    assert cost.seconds(10) == 0.0 and cost.told_at == 0.0
    cost.on_order(10, 10.0)
    cost.on_lost()
    serve(cost, [(100.0, 50)], 1)
    assert cost.seconds(50) == pytest.approx(LATENCY_S + 50 * BLOCK_S, rel=0.1)


def test_a_single_block_that_comes_fast_makes_a_slow_source_faster() -> None:
    cost = SourceCost()
    cost.on_order(2, 0.0)
    cost.on_report(1, 0, 5.0)
    cost.on_report(1, 0, 10.0)
    slow = cost.seconds(10)
    for number in range(20):
        cost.on_order(1, 100.0 + number)
        cost.on_report(1, 0, 100.001 + number)
    assert cost.seconds(10) < 0.1 * slow
