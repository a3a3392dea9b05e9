"""Drafts of the draft model are asked for where steps with them give more tokens per second, and seldom elsewhere."""

from __future__ import annotations

import pytest

from tokenloom.core.features.speculation.ask_rates import AskRates
from tokenloom.ipc.messages.workers import DraftWork

WORK = DraftWork(num_passes=4, duration_s=0.004)


def run(rates: AskRates, num_rows: int, num_steps: int, gain: float) -> int:
    """Make steps that give `gain` times as many tokens per second if they ask as others do; return how many ask."""
    num_asking = 0
    for _ in range(num_steps):
        asks = rates.should_ask(num_rows)
        num_asking += asks
        tokens, seconds = (2 * num_rows, 0.020 / gain) if asks else (num_rows, 0.010)
        rates.on_step(num_rows, tokens, seconds, WORK if asks else None)
    return num_asking


@pytest.mark.parametrize(("gain", "least", "most"), [(0.8, 8, 120), (1.0, 8, 120), (1.3, 1880, 1992)])
def test_steps_ask_where_it_pays(gain: float, least: int, most: int) -> None:
    assert least <= run(AskRates(), 1, 2000, gain) <= most


def test_the_first_steps_do_not_ask_and_sizes_are_apart() -> None:
    rates = AskRates()
    assert run(rates, 1, 8, 2.0) == 0
    assert run(rates, 1, 8, 2.0) == 8
    assert run(rates, 32, 8, 0.5) == 0
    run(rates, 32, 100, 0.5)
    assert rates.should_ask(1) and not rates.should_ask(32)


def test_a_change_of_the_text_is_noticed() -> None:
    rates = AskRates()
    run(rates, 1, 200, 1.5)
    assert run(rates, 1, 300, 0.7) < 60, "after a few steps the slower kind is a trial"
    assert run(rates, 1, 2000, 1.5) > 1500, "a trial shows that it pays again"


def test_a_draft_must_be_worth_its_pass_and_its_place_in_the_next_step() -> None:
    rates = AskRates()
    run(rates, 4, 400, 1.0)
    # 400 tokens/s; a pass takes 1 ms for 4 rows, a draft 0.25 ms more: 0.5 ms of a row, 0.2 tokens.
    assert rates.least_chance(4, 0.010, 0.00025) == pytest.approx(0.2)
    assert rates.least_chance(4, 0.010, 1.0) == 0.9
