"""The short form of scripts/flood.py: clients submit far more than the queue holds, and one client reads nothing."""

from __future__ import annotations

import pytest

from tokenloom.scripts import flood


@pytest.mark.timeout(180)
def test_a_flood_is_answered_in_full_and_health_stays_good() -> None:
    assert flood.main(["--requests", "1500", "--clients", "5"]) == 0
