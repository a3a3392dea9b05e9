"""No caller's body delays others: scripts/chaos/flood_bodies.py, short and long; and its report detects faults."""

from __future__ import annotations

import pytest

from tokenloom.scripts.chaos import flood_bodies


@pytest.mark.nightly
def test_large_bodies_and_very_many_answers_delay_no_other_caller() -> None:
    assert flood_bodies.main(["--megabytes", "0.3", "--answers", "4096", "--only", "/v1/completions"]) == 0


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_the_largest_bodies_delay_no_other_caller() -> None:
    assert flood_bodies.main(["--megabytes", "1", "8", "31"]) == 0


def test_the_flood_report_detects_each_fault() -> None:
    clean: dict[str, object] = {
        "failures": [],
        "/health in ms": {"p50": 1.0, "p99": 200.0, "max": 900.0},
        "longest gap of a stream in s": 0.5,
        "frontend was replaced": False,
        "exit code": 0,
    }
    assert flood_bodies.is_clean(clean)
    for spoiled in (
        {"failures": ["ConnectionResetError"]},
        {"/health in ms": {"p99": 201.0}},
        {"longest gap of a stream in s": 2.5},
        {"frontend was replaced": True},
        {"exit code": 1},
    ):
        assert not flood_bodies.is_clean(clean | spoiled)
