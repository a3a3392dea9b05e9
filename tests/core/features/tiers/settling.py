"""Tiers of a Harness that are slow to compute, so that loads are worth it, and that come to rest."""

from __future__ import annotations

from tokenloom.tests.core.harness import TURN_S, Harness


def make_slow(harness: Harness, token_s: float) -> None:
    """Let a token seem to take so long to compute."""
    harness.worker.token_s = token_s
    harness.offload.compute._c0 = token_s


def settle(harness: Harness) -> None:
    """Go on until every copy, load and write is done."""
    for _ in range(10_000):
        harness.now += TURN_S
        harness.offload.tick(is_idle=True)
        harness.fill_all()
        is_busy = harness.core.step() + len(harness.worker.queue)
        harness.answer()
        if not harness.tier.act() and not is_busy and not harness.offload.writes.num_queued:
            return
    raise AssertionError("the tiers never come to rest")
