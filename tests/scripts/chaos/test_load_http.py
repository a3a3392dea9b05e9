"""The load over HTTP and the kills of frontends: their short forms, and the verdict of the load on each fault."""

from __future__ import annotations

import pytest

from tokenloom.scripts.chaos import http_kills, load_http


@pytest.mark.nightly
@pytest.mark.timeout(240)
def test_killing_frontends_refuses_and_loses_no_connection() -> None:
    report = http_kills.start_and_measure(10.0, 4, rate=100.0)
    assert http_kills.is_clean(report), report
    assert report["kills"] == 4 and report["answered"] > 900  # type: ignore[operator]


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_a_hundred_streams_succeed_and_probes_stay_fast() -> None:
    assert load_http.main(["--minutes", "0.5", "--streams", "100"]) == 0


def test_the_load_report_detects_each_fault() -> None:
    clean: dict[str, object] = {
        "failures": {},
        "/health in ms": {"p50": 1.0, "p99": 200.0, "max": 900.0},
        "growth in MB over the last two thirds": {"core": 0.1, "frontend": 0.1, "worker 0": 0.1},
        "exit code": 0,
    }
    assert load_http.is_clean(clean)
    for spoiled in (
        {"failures": {"3 tokens instead of 4": 1}},
        {"/health in ms": {"p99": 201.0}},
        {"growth in MB over the last two thirds": {"core": 9.0, "frontend": 0.1, "worker 0": 0.1}},
        {"exit code": 1},
    ):
        assert not load_http.is_clean(clean | spoiled)
