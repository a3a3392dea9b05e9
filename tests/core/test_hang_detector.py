from __future__ import annotations

from tokenloom.core.hang_detector import FIRST_LIMIT_S, MARGIN, MIN_LIMIT_S, HangDetector


def test_the_limit_grows_with_longer_steps_and_with_more_tokens() -> None:
    watch = HangDetector()
    assert watch.limit_s(1) == FIRST_LIMIT_S
    watch.on_step(1, 0.01)
    assert watch.limit_s(1) == MIN_LIMIT_S
    watch.on_step(1, 1.0)
    assert watch.limit_s(1) == MARGIN
    assert watch.limit_s(2048) == MARGIN * 2048
    watch.on_step(2048, 3.0)
    assert watch.limit_s(2048) == MARGIN * 3.0
    assert watch.limit_s(4096) == MARGIN * 6.0


def test_the_operators_limit_is_taken_as_it_is() -> None:
    watch = HangDetector(0.5)
    watch.on_step(1, 100.0)
    assert watch.limit_s(1) == 0.5
