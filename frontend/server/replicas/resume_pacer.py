"""ResumePacer: limits how fast requests that have lost their core are sent to the other cores.

When a core is lost, all its contexts have to be computed again at once. In any second each other core is sent requests
until they have FACTOR times as many tokens as it can compute: enough to keep it busy, and few enough not to fill its
queue before the router has measured its progress. A core at its limit is skipped, so that the oldest request is resumed
on the next best core. Pure: knows no clock and no requests.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Sequence

from .router import Router

FACTOR = 2.0  # multiple of a core's measured rate
WINDOW_S = 1.0


class ResumePacer:
    """Owner of the record of what each core was sent in the last WINDOW_S. The request that reaches a core's limit may
    exceed it, so that each core gets one a second whatever its rate. Call `pick` for each request, in order, then
    `end`."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._sent: defaultdict[int, deque[tuple[float, int]]] = defaultdict(deque)  # by core: (time, number of tokens)
        self._full: dict[int, float] = {}  # cores at their limit in this turn, and when that ends

    def pick(self, keys: Sequence[int], num_prompt: int, num_tokens: int, now: float) -> int | None:
        """Return the best core for a request, and record that it gets the request; None if there is no core or all are
        at their limit. `num_tokens`: the length of the prompt and of the answers so far."""
        while (core := self._router.pick(keys, num_prompt, now)) is not None:
            if (next_at := self._next_at(core, now)) <= now:
                self._sent[core].append((now, num_tokens))
                return core
            self._full[core] = next_at
            self._router.drain(core)
        return None

    def _next_at(self, core: int, now: float) -> float:
        sent = self._sent[core]
        while sent and sent[0][0] + WINDOW_S <= now:
            sent.popleft()
        most = FACTOR * self._router.tokens_per_s(core, now) * WINDOW_S
        return now if not sent or sum(num_tokens for _, num_tokens in sent) < most else sent[0][0] + WINDOW_S

    def end(self) -> float:
        """Let the router pick all cores again, and return the earliest time at which a core at its limit may get
        another request; inf if none is at its limit."""
        full, self._full = self._full, {}
        for core in full:
            self._router.resume(core)
        return min(full.values(), default=math.inf)

    def forget(self, core: int) -> None:
        """Drop the record of a lost core: its successor has no work yet."""
        self._sent.pop(core, None)
