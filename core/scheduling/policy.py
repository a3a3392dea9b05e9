"""Policy: the sort key of requests, fixed at submit; lower runs first.

Priority ages: one level is worth AGING_S seconds of waiting, so that nothing starves and the queue is never sorted
again.
"""

from __future__ import annotations

AGING_S = 60.0


def sort_key_of(priority: int, arrival_time: float) -> float:
    """Return the sort key; `priority` is 0 for every request under fcfs."""
    return arrival_time + AGING_S * priority
