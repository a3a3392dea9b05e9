"""Who runs first: one number per request, lower first, fixed at its submit.

Priority ages: a level of priority is worth AGING_S seconds of waiting, so nothing starves and no queue is resorted.
"""

from __future__ import annotations

AGING_S = 60.0


def sort_key_of(priority: int, arrival_time: float) -> float:
    """`priority` is 0 for every request under fcfs."""
    return arrival_time + AGING_S * priority
