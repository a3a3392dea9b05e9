"""ResumePacer: how fast requests that have lost their core are handed to the others.

When a core is lost, all its contexts are to be computed again at once. In any second each other core gets at most
FACTOR times as many of their tokens as it can compute: enough that it never waits for them, and few enough that they
do not fill its queue before the router knows how fast it gets on. A core that has got enough is passed over, so that
the request which came first goes on at the next best one. Pure: knows no clock and no requests.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Sequence

from .router import Router

FACTOR = 2.0  # times a core's measured rate
WINDOW_S = 1.0


class ResumePacer:
    """Owns what each core was sent in the last WINDOW_S. The request that reaches the limit may exceed it, so that each
    core gets one a second whatever its rate. `pick` for each request in turn, then `end`."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._sent: defaultdict[int, deque[tuple[float, int]]] = defaultdict(deque)  # by core: when, tokens
        self._full: dict[int, float] = {}  # cores that have got enough in this turn, and until when

    def pick(self, keys: Sequence[int], num_prompt: int, num_tokens: int, now: float) -> int | None:
        """Return the best core for a request of `num_tokens`, prompt and answers so far, and note that it gets it; None
        if there is none, or all have got enough."""
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
        """Let the router pick all cores again; return when the first of them may get the next request."""
        full, self._full = self._full, {}
        for core in full:
            self._router.resume(core)
        return min(full.values(), default=math.inf)

    def forget(self, core: int) -> None:
        """Forget a lost core: its successor has no work."""
        self._sent.pop(core, None)
