"""One prompt among many streams doubles their step at most; a crowd of prompts gets the whole budget."""

from __future__ import annotations

import random

from tokenloom.core.scheduling.prefill_throttle import MIN_TOKENS, PrefillThrottle


def cost(num_decodes: int, num_prompt_tokens: int) -> float:
    """A machine: 10 ms for any decode step, 0.1 ms for each prompt token."""
    return (0.010 if num_decodes else 0.0) + 0.0001 * num_prompt_tokens


def taught(decode_s: float = 0.010) -> PrefillThrottle:
    """Return a throttle that knows decode steps of 16 rows, and prompt tokens of 0.1 ms."""
    throttle = PrefillThrottle()
    throttle.on_step(16, 0, decode_s)
    throttle.on_step(0, 512, 0.0512)
    return throttle


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
    throttle = taught(0.020)
    before = throttle.limit(16, 1, 2048)
    for _ in range(50):
        tokens = throttle.limit(16, 1, 2048)
        throttle.on_step(16, tokens, 0.020 + 0.004 + 0.0001 * tokens)
    assert before == 100 and abs(throttle.limit(16, 1, 2048) - 60) <= 1


def test_tokens_that_cost_more_in_small_chunks_are_held_to_the_same_limit() -> None:
    throttle = PrefillThrottle()
    throttle.on_step(16, 0, 0.100)
    throttle.on_step(0, 2048, 0.2048)
    for _ in range(50):
        tokens = min(throttle.limit(16, 1, 2048), 100)
        throttle.on_step(16, tokens, 0.100 + 0.001 * tokens)
    assert abs(throttle.limit(16, 1, 2048) - 50) <= 1


def test_the_time_of_a_decode_step_is_learned_for_each_size_of_batch() -> None:
    """Prompts join every step of 28 rows; the steps of 2 rows before them were three times as fast."""
    throttle = PrefillThrottle()
    throttle.on_step(0, 512, 0.0512)
    for _ in range(9):
        throttle.on_step(2, 0, 0.010)
    assert abs(throttle.limit(28, 1, 2048) - 50) <= 1  # as beside 2 rows, until a step had so many
    for _ in range(9):
        throttle.on_step(28, 50, 0.030 + 0.0001 * 50)
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
