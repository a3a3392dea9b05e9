"""Prompts may add a tenth of a second to a step of many streams, or half of a long step; a crowd of prompts gets the
whole budget."""

from __future__ import annotations

import random

import pytest

from tokenloom.core.scheduling.prefill_throttle import MIN_TOKENS, PAUSE_S, PrefillThrottle


def cost(num_decodes: int, num_prompt_tokens: int) -> float:
    """A slow machine: 1 s for any decode step, 10 ms for each prompt token."""
    return (1.0 if num_decodes else 0.0) + 0.01 * num_prompt_tokens


def taught(decode_s: float = 1.0) -> PrefillThrottle:
    """Return a throttle that knows decode steps of 16 rows, and prompt tokens of 10 ms."""
    throttle = PrefillThrottle()
    throttle.on_step(16, 0, decode_s)
    throttle.on_step(0, 512, 5.12)
    return throttle


def test_prompts_may_add_a_pause_to_a_short_step_however_many_they_are() -> None:
    for decode_s, expected in ((0.002, 1000), (0.02, 1000), (0.2, 1000), (0.4, 2000)):
        throttle = PrefillThrottle()
        throttle.on_step(16, 0, decode_s)
        throttle.on_step(0, 2048, 0.2048)
        assert throttle.limit(16, 1, 4096) == pytest.approx(expected, abs=1), "0.1 ms a token"
    throttle = PrefillThrottle()
    throttle.on_step(64, 0, 0.025)
    throttle.on_step(0, 2048, 0.2048)
    tokens = [throttle.limit(64, num_prompts, 4096) for num_prompts in (1, 8, 15)]
    assert tokens == pytest.approx([1000, 1000, 1875], abs=1)


def test_a_long_prompt_among_many_streams_is_taken_in_within_a_few_seconds() -> None:
    """16 rows whose steps take 40 ms, and a prompt of 2,048 tokens of 0.4 ms, 6 tokens of which take as long as 12."""
    throttle, left, waited_s = PrefillThrottle(), 2048, 0.0
    throttle.on_step(0, 512, 512 * 0.0004)
    throttle.on_step(16, 0, 0.040)
    while left > 0:
        tokens = min(throttle.limit(16, 1, 512), left)
        step_s = 0.040 + 0.0024 + 0.0004 * tokens
        throttle.on_step(16, tokens, step_s)
        assert step_s <= 0.040 + 1.1 * PAUSE_S
        left, waited_s = left - tokens, waited_s + step_s
    assert waited_s < 1.5


def test_one_prompt_among_many_streams_at_most_doubles_their_step() -> None:
    throttle, rng = PrefillThrottle(), random.Random(0)
    throttle.on_step(0, 512, cost(0, 512))
    for _ in range(50):
        throttle.on_step(16, 0, cost(16, 0) * rng.uniform(0.9, 1.1))
        tokens = throttle.limit(16, 1, 2048)
        assert tokens >= MIN_TOKENS and cost(16, tokens) <= 2.0 * cost(16, 0)
        throttle.on_step(16, tokens, cost(16, tokens) * rng.uniform(0.9, 1.1))
    assert 30 <= throttle.limit(16, 1, 2048) <= 70


def test_a_few_steps_that_other_work_slows_down_hardly_raise_the_share() -> None:
    throttle = PrefillThrottle()
    throttle.on_step(0, 512, cost(0, 512))
    for _ in range(50):
        throttle.on_step(16, 0, cost(16, 0))
    before = throttle.limit(16, 1, 2048)
    for _ in range(2):
        throttle.on_step(16, 0, 5 * cost(16, 0))
    assert before <= throttle.limit(16, 1, 2048) <= 1.1 * before
    for _ in range(100):
        throttle.on_step(16, 0, 5 * cost(16, 0))
    assert throttle.limit(16, 1, 2048) > 4.5 * before, "steps that stay slow are learned"


def test_many_prompts_for_few_streams_take_the_budget() -> None:
    throttle = taught()
    assert throttle.limit(4, 60, 2048) == 2048
    throttle.limit(64, 0, 2048)  # the burst ends
    assert throttle.limit(16, 1, 2048) < throttle.limit(16, 2, 2048) < throttle.limit(16, 4, 2048) == 2048


def test_the_last_prompts_of_a_burst_take_the_budget_for_as_many_steps_as_the_burst_had() -> None:
    throttle = taught()
    held = throttle.limit(28, 4, 512)
    burst = [throttle.limit(num_decodes, 32 - num_decodes, 512) for num_decodes in (0, 12, 24)]
    tail = [throttle.limit(28, 4, 512) for _ in range(4)]
    assert held < 512 and burst == [512] * 3 and tail == [512, 512, 512, held]
    throttle.limit(32, 0, 480)
    assert throttle.limit(32, 1, 480) < 100


def test_the_fixed_cost_of_a_mixed_step_lowers_the_number_of_prompt_tokens() -> None:
    throttle = taught(2.0)
    before = throttle.limit(16, 1, 2048)
    for _ in range(50):
        tokens = throttle.limit(16, 1, 2048)
        throttle.on_step(16, tokens, 2.0 + 0.4 + 0.01 * tokens)
    assert before == 100 and abs(throttle.limit(16, 1, 2048) - 60) <= 1


def test_tokens_that_cost_more_in_small_chunks_are_held_to_the_same_limit() -> None:
    throttle = PrefillThrottle()
    throttle.on_step(16, 0, 1.0)
    throttle.on_step(0, 2048, 2.048)
    for _ in range(50):
        tokens = min(throttle.limit(16, 1, 2048), 100)
        throttle.on_step(16, tokens, 1.0 + 0.01 * tokens)
    assert abs(throttle.limit(16, 1, 2048) - 50) <= 1


def test_the_time_of_a_decode_step_is_learned_for_each_size_of_batch() -> None:
    """Prompts join every step of 28 rows; the steps of 2 rows before them were three times as fast."""
    throttle = PrefillThrottle()
    throttle.on_step(0, 512, 5.12)
    for _ in range(9):
        throttle.on_step(2, 0, 1.0)
    assert abs(throttle.limit(28, 1, 2048) - 50) <= 1  # as beside 2 rows, until a step had so many
    for _ in range(9):
        throttle.on_step(28, 50, 3.0 + 0.01 * 50)
    assert abs(throttle.limit(28, 1, 2048) - 150) <= 1


def test_without_streams_or_without_knowledge_nothing_is_held_back() -> None:
    throttle = PrefillThrottle()
    assert throttle.limit(16, 1, 2048) == 2048
    throttle.on_step(16, 0, 0.010)
    assert throttle.limit(16, 1, 2048) == 2048
    throttle.on_step(0, 128, 6.4)
    assert throttle.limit(0, 1, 2048) == 2048
    throttle.limit(1, 0, 2048)  # the burst ends
    assert throttle.limit(16, 1, 2048) == MIN_TOKENS and throttle.limit(16, 1, 5) == 5
