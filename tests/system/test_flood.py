"""The short form of scripts/chaos/flood.py: clients submit far more than the queue holds, one client reads nothing."""

from __future__ import annotations

from tokenloom.scripts.chaos import flood


def test_a_flood_is_answered_in_full_and_health_stays_good() -> None:
    assert flood.main(["--requests", "300", "--clients", "3", "--queue", "64"]) == 0
