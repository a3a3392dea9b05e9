"""What several files of this room test against."""

from __future__ import annotations

import pytest

from .bench import Bench


@pytest.fixture
def bench() -> Bench:
    return Bench()
