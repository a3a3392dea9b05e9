"""Requests of the flex class run in what others leave, and all of it if there are no others."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from tokenloom.core.features.flex import LATELY_S, LEAST_ALONE, LEAST_TOKENS, LONG_STEP_S, SOON_S, STEP_S, Flex
from tokenloom.core.request import Request
from tokenloom.tests.core.harness import Harness, prompt_of
from tokenloom.tests.support.today import seeds


def running(harness: Harness) -> list[Request]:
    return harness.core.scheduler.rows.requests()


def running_keys(harness: Harness) -> set[int]:
    return {request.key for request in running(harness)}


def add_flex(harness: Harness, key: int, prompt: list[int], max_tokens: int = 8, **more: Any) -> None:
    harness.add(key, prompt, max_tokens, service_tier="flex", **more)


def tokens_of_step(harness: Harness) -> dict[Request, int]:
    """Return the tokens of the newest step, by request."""
    harness.core.step()
    batch = harness.core.scheduler.ledger.entries[-1].batch
    rows = harness.core.scheduler.rows
    return {rows.request(row): count for row, count in zip(batch.rows.tolist(), batch.counts.tolist(), strict=True)}


@pytest.mark.parametrize("policy", ["priority", "fcfs"])
def test_a_request_takes_the_row_of_a_flex_one_under_each_policy(policy: str) -> None:
    harness = Harness(max_num_seqs=3, scheduling_policy=policy)
    add_flex(harness, 0, [1] * 3, 30, priority=-5)
    add_flex(harness, 1, [2] * 9, 30)
    harness.turn()
    harness.add(2, [3] * 2, 30)  # costs less than both
    harness.turn()
    assert running_keys(harness) == {0, 1, 2}
    harness.add(3, [4] * 5, 30, priority=1)
    harness.turn()
    assert running_keys(harness) == ({0, 2, 3} if policy == "priority" else {1, 2, 3})
    harness.add(4, [5] * 5, 30)
    harness.turn()
    assert running_keys(harness) == {2, 3, 4}
    harness.run_to_the_end()


def test_a_preempted_request_takes_its_row_back_from_a_flex_one() -> None:
    harness = Harness(num_blocks=17, max_num_seqs=4, steps_in_flight=1)
    harness.add(0, [1] * 20, 20)
    harness.add(1, [2] * 20, 30)  # loses its row when blocks run out
    while running_keys(harness) != {0}:
        harness.turn()
    add_flex(harness, 2, [3] * 8, 40)
    while 0 not in harness.finished:
        harness.turn()
    harness.turns(2)
    assert 1 in running_keys(harness)
    harness.run_to_the_end()


def test_blocks_of_all_flex_requests_are_taken_at_once() -> None:
    harness = Harness(num_blocks=65, max_num_seqs=32, steps_in_flight=1)
    for key in range(16):
        add_flex(harness, key, [key + 1] * 12, 4)
    harness.turn()
    assert len(running(harness)) > 10
    harness.add(99, [99] * 220, 8)
    harness.turn()
    assert 99 in running_keys(harness)
    harness.run_to_the_end()


def test_no_priority_brings_a_flex_request_before_another() -> None:
    harness = Harness(max_num_seqs=2, scheduling_policy="priority", steps_in_flight=1)
    harness.add(0, [1] * 4, 30)
    harness.turn()
    add_flex(harness, 1, [2] * 4, 30, priority=-(2**31))
    harness.add(2, [3] * 4, 30, priority=2**31 - 1)
    harness.turn()
    assert running_keys(harness) == {0, 2}
    harness.run_to_the_end()


def test_flex_requests_preempt_nobody() -> None:
    harness = Harness(num_blocks=33, max_num_seqs=2, scheduling_policy="priority")
    harness.add(0, [1] * 8, 20, priority=100)
    harness.add(1, [2] * 8, 20, priority=100)
    harness.turn()
    add_flex(harness, 2, [3] * 8, 8, priority=-100)
    harness.turns(4)
    assert running_keys(harness) == {0, 1}
    harness.run_to_the_end()


@pytest.mark.parametrize("seed", seeds(6, 40))
def test_others_leave_a_share_of_each_step(seed: int) -> None:
    rng = random.Random(seed)
    share = rng.choice([0.1, 0.25, 0.5])
    harness = Harness(400, max_num_seqs=16, steps_in_flight=1, max_num_batched_tokens=64, flex_share=share)
    rows, num_held = harness.core.scheduler.rows, 0
    for key in range(60):
        tier = rng.choice(["default", "flex"])
        prompt = prompt_of(rng, rng.randrange(1, 40))
        harness.add(key, prompt, rng.randrange(1, 20), service_tier=tier)
        for _ in range(rng.randrange(4)):
            if not harness.core.num_requests:
                break
            before = [request for request in running(harness) if not request.is_flex]
            ahead = {each: each.num_tokens - rows.num_scheduled[each.row] for each in running(harness)}
            tokens = tokens_of_step(harness)
            assert all(count > 1 for each, count in tokens.items() if ahead.get(each, 0) > 1), "it would seem to decode"
            num_flex = sum(count for request, count in tokens.items() if request.is_flex)
            if before:
                num_others = sum(not request.is_flex for request in running(harness))
                assert num_flex <= max(num_others * share / (1 - share), LEAST_TOKENS)
                assert all(request in tokens for request in before if request.row >= 0), "others are never held"
                num_held += any(request.is_flex and request not in tokens for request in running(harness))
            harness.answer()
    assert num_held, "the bound was never reached"
    harness.run_to_the_end()


def test_without_others_all_rows_decode_and_prompts_fill_a_step_that_ends_soon() -> None:
    harness = Harness(400, max_num_seqs=16, steps_in_flight=1, max_num_batched_tokens=800)
    for key in range(8):
        add_flex(harness, key, [key + 1] * 2, 60)
    harness.turn()
    assert len(tokens_of_step(harness)) == 8
    harness.answer()
    throttle = harness.core.scheduler.prefill_throttle
    for token_s, most in ((STEP_S / 300, 300), (STEP_S / 5, LEAST_ALONE)):
        throttle.on_step(0, 1000, 1000 * token_s)
        throttle._prompt_token_s = token_s
        for key in range(20, 24):
            add_flex(harness, key + int(token_s * 1e4) * 10, [key] * 200, 2)
        tokens = tokens_of_step(harness)
        assert sum(count for count in tokens.values() if count > 1) == most, "decoding rows are not counted"
        assert sum(count == 1 for count in tokens.values()) >= 8
        harness.answer()
    harness.run_to_the_end()


def of_clock(harness: Harness, clock: Callable[[], float]) -> None:
    (flex,) = (each for each in harness.core.features.in_order if isinstance(each, Flex))
    flex._clock = clock


def test_steps_end_sooner_for_a_while_after_another_request() -> None:
    harness = Harness(400, max_num_seqs=16, steps_in_flight=1, max_num_batched_tokens=800)
    now = 100.0
    of_clock(harness, lambda: now)
    throttle = harness.core.scheduler.prefill_throttle
    throttle._prompt_token_s, throttle._decode_step_s = SOON_S / 150, {1: SOON_S / 2}
    for number, most in enumerate((150, 150, 760)):
        for key in range(4):
            add_flex(harness, 10 * number + key, prompt_of(random.Random(number), 190), 1)
        if number == 0:
            harness.add(100, [1], 1)
            harness.turn()
            assert 100 in harness.finished
        now += number * LATELY_S
        assert most - 1 <= sum(tokens_of_step(harness).values()) <= most
        harness.answer()
        harness.run()
    harness.run_to_the_end()


def test_decoding_rows_share_short_steps_and_the_oldest_come_first() -> None:
    harness = Harness(400, max_num_seqs=32, steps_in_flight=1, max_num_batched_tokens=800)
    now = 100.0
    of_clock(harness, lambda: now)
    for key in range(16):
        add_flex(harness, key, [key + 1] * 2, 20)
    harness.turn()
    assert len(tokens_of_step(harness)) == 16
    harness.answer()
    throttle = harness.core.scheduler.prefill_throttle
    throttle._decode_step_s = {1: SOON_S / 2, 3: SOON_S * 0.9, 4: SOON_S * 2, 5: SOON_S * 4}
    harness.add(100, [1], 1)
    harness.turns(2)
    assert 100 in harness.finished
    for most, after_s in ((7, 0.0), (7, 1.0), (16, 2 * LATELY_S)):
        now += after_s
        harness.core.scheduler.rows.version += 1  # as when a row ends
        tokens = tokens_of_step(harness)
        assert {each.key for each in tokens} == set(range(most)) and set(tokens.values()) == {1}
        harness.answer()
    harness.run_to_the_end()


@pytest.mark.parametrize("has_had_another", [False, True])
def test_one_step_is_in_flight_while_the_class_runs_alone_and_steps_are_long_or_another_came_lately(
    has_had_another: bool,
) -> None:
    harness = Harness(400, max_num_seqs=16, steps_in_flight=2)
    now = 100.0
    of_clock(harness, lambda: now)
    entries, throttle = harness.core.scheduler.ledger.entries, harness.core.scheduler.prefill_throttle
    for key in range(4):
        add_flex(harness, key, [key + 1] * 2, 50)
    if has_had_another:
        harness.add(100, [1], 1)
    for _ in range(4):
        harness.core.step()
        while entries:
            harness.answer()
    harness.core.step()
    assert len(entries) == (1 if has_had_another else 2)
    harness.add(101, [1], 30)  # it waits for no result
    harness.core.step()
    assert len(entries) == 2
    harness.abort(101)
    while entries:
        harness.answer()
    now += 2 * LATELY_S
    for step_s, count in ((LONG_STEP_S / 2, 2), (LONG_STEP_S, 1)):
        throttle._decode_step_s = dict.fromkeys(range(1, 8), step_s)
        harness.core.step()
        assert len(entries) == count
        while entries:
            harness.answer()
    harness.run_to_the_end()


def test_a_long_queue_of_flex_requests_costs_one_look_a_step() -> None:
    harness = Harness(400, max_num_seqs=64, steps_in_flight=1, max_waiting_requests=600)
    harness.add(0, [1] * 4, 100)
    harness.turn()
    for key in range(1, 500):
        add_flex(harness, key, [2] * 4, 4)
    harness.turn()
    waiting, num_popped = harness.core.scheduler.waiting, 0
    pop = waiting.pop

    def counted() -> Request | None:
        nonlocal num_popped
        num_popped += 1
        return pop()

    waiting.pop = counted  # type: ignore[method-assign]
    harness.turns(5)
    assert num_popped <= 10
    harness.run_to_the_end()


def test_each_class_has_a_queue_of_its_own() -> None:
    harness = Harness(max_num_seqs=1, max_waiting_requests=4)
    for key in range(8):
        add_flex(harness, key, [1, 2], 4)
    assert [key for key in range(8) if key in refused(harness)] == [4, 5, 6, 7]
    for key in range(10, 18):
        harness.add(key, [1, 2], 4)
    assert [key for key in range(10, 18) if key in refused(harness)] == [14, 15, 16, 17]
    harness.run()


def refused(harness: Harness) -> set[int]:
    harness.take()
    return {key for key, finished in harness.finished.items() if finished.reason == "error"}


def test_a_growing_request_takes_the_blocks_of_a_flex_one_before_those_of_another() -> None:
    harness = Harness(num_blocks=35, max_num_seqs=4, steps_in_flight=1)
    add_flex(harness, 0, [1] * 60, 40)  # costs more than request 2
    harness.turn()
    harness.add(1, [2] * 20, 40)
    harness.add(2, [3] * 4, 40)
    while harness.core.scheduler.num_preemptions == 0:
        harness.turn()
    assert running_keys(harness) == {1, 2} and harness.core.scheduler.num_preemptions == 1, "no detour over request 2"
    harness.run_to_the_end()
