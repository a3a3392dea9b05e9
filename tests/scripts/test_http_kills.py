"""A killed frontend refuses no connection: the long form. The short one is in tests/system/test_http_door.py."""

from __future__ import annotations

import pytest

from tokenloom.scripts import http_kills


@pytest.mark.nightly
@pytest.mark.timeout(240)
def test_killing_frontends_refuses_and_loses_no_connection() -> None:
    report = http_kills.start_and_measure(10.0, 4, rate=100.0)
    assert http_kills.is_clean(report), report
    assert report["kills"] == 4 and report["answered"] > 900  # type: ignore[operator]
