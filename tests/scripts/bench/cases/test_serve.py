"""Arrivals are Poisson and repeatable; the summary counts latencies and objectives as documented."""

from __future__ import annotations

import argparse
import itertools
import statistics

import pytest

from tokenloom.scripts.bench.cases.serve import Call, draw_calls, number_or_range, positive_rate, summarize


def options(num_requests: int = 2000, seed: int = 0) -> argparse.Namespace:
    return argparse.Namespace(num_requests=num_requests, workload_seed=seed, num_in=(3, 9), num_out=(2, 5))


def test_arrivals_have_exponential_gaps_of_the_given_rate() -> None:
    times = [call.arrival_s for call in draw_calls(options(), 4.0, 100)]
    gaps = [after - before for before, after in itertools.pairwise(times)]
    assert statistics.mean(gaps) == pytest.approx(0.25, rel=0.1)
    assert statistics.stdev(gaps) == pytest.approx(statistics.mean(gaps), rel=0.1)
    assert all(call.arrival_s == 0 for call in draw_calls(options(), float("inf"), 100))


def shape(calls: list[Call]) -> list[tuple[int, int]]:
    return [(len(call.prompt), call.num_out) for call in calls]


def test_a_seed_gives_the_same_lengths_and_gaps_at_every_rate() -> None:
    runs = ((1.0, 1), (8.0, 1), (1.0, 2), (1.0, -1))
    slow, fast, other, negative = (draw_calls(options(50, seed), rate, 100) for rate, seed in runs)
    assert shape(slow) == shape(fast)
    assert slow[-1].arrival_s == pytest.approx(8 * fast[-1].arrival_s)
    assert shape(slow) != shape(other) and shape(slow) != shape(negative)
    assert all(3 <= len(call.prompt) <= 9 and 2 <= call.num_out <= 5 for call in slow)


def test_no_two_rates_share_prompts() -> None:
    first, second = (draw_calls(options(50), 1.0, 10**6) for _ in range(2))
    assert not {tuple(call.prompt) for call in first} & {tuple(call.prompt) for call in second}


def test_the_summary_counts_calls_that_met_both_objectives() -> None:
    calls = [
        Call(0.0, [1], 3, sent_s=0.0, token_s=[0.1, 0.2, 0.3]),  # meets both
        Call(0.0, [1], 3, sent_s=0.0, token_s=[0.9, 1.0, 1.1]),  # first token too late
        Call(0.0, [1], 3, sent_s=1.0, token_s=[1.1, 1.6, 2.0]),  # too slow between
        Call(0.0, [1], 3, sent_s=0.0, error="Overloaded"),
    ]
    row = summarize(2.0, calls, ttft_slo_s=0.5, tpot_slo_s=0.2)
    assert (row["finished"], row["failed"]) == (3, 1)
    assert row["goodput_per_s"] == pytest.approx(1 / 2.0)
    assert row["out_tokens_per_s"] == pytest.approx(9 / 2.0)
    assert row["ttft_p50_ms"] == pytest.approx(100) and row["tpot_p50_ms"] == pytest.approx(100)
    assert row["itl_p99_ms"] == pytest.approx(495, abs=5)


def test_a_run_without_answers_has_no_latency_figures() -> None:
    row = summarize(1.0, [Call(0.0, [1], 1, error="dead")], 1.0, 1.0)
    assert row["failed"] == 1 and row["ttft_p50_ms"] is None and "goodput_per_s" not in row


@pytest.mark.parametrize("text", ["0", "5:3", "-1:2"])
def test_lengths_must_be_positive_and_ordered(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        number_or_range(text)
    assert number_or_range("7") == (7, 7) and number_or_range("2:9") == (2, 9)


def test_a_rate_is_positive() -> None:
    assert positive_rate("inf") == float("inf")
    with pytest.raises(argparse.ArgumentTypeError):
        positive_rate("0")
