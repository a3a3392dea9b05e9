"""Files that hold one law, a killed process changes no answer, each beside another feature of an engine.

Each starts engines of its own. The default run takes some of them, other ones each day, and the nightly run all;
test_faults.py and test_replicas.py hold the law every day.
"""

from __future__ import annotations

import pytest

from tokenloom.tests.support.today import chosen

FEATURES = ["adapters", "codes", "groups", "groups over hosts", "groups in tiers", "media", "states"]
NUM_TODAY = 3


def turn_of(feature: str) -> list[pytest.MarkDecorator]:
    """Return the marks of the file of a feature: `nightly` unless it is one of the day's."""
    return [] if feature in chosen(FEATURES, NUM_TODAY) else [pytest.mark.nightly]
