"""When the core tells how it is."""

from __future__ import annotations

from tokenloom.tests.core.harness import Harness


def test_progress_is_reported_at_intervals_under_load_and_at_once_for_a_pause_and_its_end() -> None:
    harness = Harness()
    harness.add(1, [1, 2, 3], max_tokens=50)
    core, now = harness.core, 1000.0
    assert core.progress(now) is not None and core.progress(now) is None
    for is_paused in (True, False):
        if is_paused:
            core.pause("keep")
        else:
            core.resume()
        progress = core.progress(now)
        assert progress is not None and progress.is_paused == is_paused
        assert core.progress(now) is None
