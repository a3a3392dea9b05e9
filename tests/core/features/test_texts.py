"""Texts to pool share steps with generating rows, and callers take turns, so that no crowd of texts holds up others."""

from __future__ import annotations

import random

import pytest

from tokenloom.core.features.texts import DRAIN_S, SHARE
from tokenloom.core.scheduling.prefill_throttle import MIN_TOKENS, PAUSE_S
from tokenloom.ipc.params.pooling_params import PoolingParams
from tokenloom.tests.core.harness import Harness, prompt_of
from tokenloom.tests.support.today import seeds

DECODE_S = 0.05
EMBED = PoolingParams(method="mean")
BUDGET = 256


def generating(num_rows: int, token_s: float) -> Harness:
    """Return a core with rows that decode, which knows the costs of a step and of a prompt token."""
    harness = Harness(2000, max_num_seqs=64, steps_in_flight=1, max_num_batched_tokens=BUDGET, max_waiting_requests=900)
    for key in range(num_rows):
        harness.add(key, [key + 1] * 3, 100)
    if num_rows:
        harness.turn()
    throttle = harness.core.scheduler.prefill_throttle
    throttle._prompt_token_s, throttle._decode_step_s = token_s, {num_rows.bit_length(): DECODE_S}
    throttle.on_step = lambda *_: None  # type: ignore[method-assign]
    return harness


def step(harness: Harness) -> tuple[int, int]:
    """Make a step and answer it; return the tokens of texts in it, and those of generating requests."""
    harness.core.step()
    rows, batch = harness.core.scheduler.rows, harness.core.scheduler.ledger.entries[-1].batch
    num_pooled = sum(
        count
        for row, count in zip(batch.rows.tolist(), batch.counts.tolist(), strict=True)
        if rows.request(row).pooling is not None
    )
    num_others = int(batch.counts.sum()) - num_pooled
    harness.answer()
    harness.core.scheduler.check_invariants()
    return num_pooled, num_others


@pytest.mark.parametrize("seed", seeds(3, 20))
def test_texts_add_a_share_to_steps_of_generating_rows_and_more_if_they_would_wait_long(seed: int) -> None:
    rng = random.Random(seed)
    num_rows, token_s = rng.randrange(4, 17), rng.choice([0.0002, 0.0005, 0.001])
    harness = generating(num_rows, token_s)
    quick, most = int(SHARE * DECODE_S / token_s), int(PAUSE_S / token_s)
    for key in range(100, 105):  # in the older rule a burst, which gets the whole step
        harness.add(key, prompt_of(rng, quick), pooling=EMBED)
    for _ in range(5):
        num_pooled, num_others = step(harness)
        assert max(quick - 1, MIN_TOKENS) <= num_pooled <= max(quick, MIN_TOKENS) + 1 and num_others == num_rows
    backlog = 0
    for key in range(200, 800):
        prompt = prompt_of(rng, 20)
        harness.add(key, prompt, pooling=EMBED)
        backlog += len(prompt)
    due = BUDGET if backlog * token_s >= DRAIN_S else DECODE_S * backlog / DRAIN_S
    num_pooled, num_others = step(harness)
    assert min(due, most, BUDGET - num_rows) - 4 <= num_pooled <= min(most, BUDGET) and num_others == num_rows
    harness.run_to_the_end()


@pytest.mark.parametrize("num_rows", [0, 8])
def test_one_text_and_one_answer_are_a_few_steps_behind_hundreds_of_texts(num_rows: int) -> None:
    harness, rng = generating(num_rows, 0.001), random.Random(1)
    for key in range(100, 700):
        harness.add(key, prompt_of(rng, 30), pooling=EMBED, caller="the body")
    harness.turns(2)
    harness.add(90, prompt_of(rng, 30), pooling=EMBED, caller="another")
    harness.add(91, prompt_of(rng, 30), 2)
    harness.turns(4)
    assert 90 in harness.finished and harness.tokens[91]
    assert sum(key in harness.finished for key in range(100, 700)) < 100, "the body is far from its end"
    harness.run_to_the_end()
    order = [key for key in harness.finished if 100 <= key < 700]
    most = max(abs(key - 100 - place) for place, key in enumerate(order))
    assert most < 64, "the texts of a caller keep their order, apart from the rows of a step"
