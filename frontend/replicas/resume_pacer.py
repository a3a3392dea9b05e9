"""ResumePacer: how fast requests that have lost their core are handed to the others.

When a core is lost, all its contexts are to be computed again at once. In any second each other core gets at most
FACTOR times as many of their tokens as it can compute: enough that it never waits for them, and few enough that they
do not fill its queue before the router knows how fast it gets on. Pure: knows no clock and no requests.
"""

from __future__ import annotations

from collections import defaultdict, deque

FACTOR = 2.0  # times a core's measured rate
WINDOW_S = 1.0


class ResumePacer:
    """Owns what each core was sent in the last WINDOW_S. The request that reaches the limit may exceed it, so that each
    core gets one a second whatever its rate."""

    def __init__(self) -> None:
        self._sent: defaultdict[int, deque[tuple[float, int]]] = defaultdict(deque)  # by core: when, tokens

    def next_at(self, core: int, tokens_per_s: float, now: float) -> float:
        """Return when a core with this rate may get the next request: `now`, or later."""
        sent = self._sent[core]
        while sent and sent[0][0] + WINDOW_S <= now:
            sent.popleft()
        has_room = sum(num_tokens for _, num_tokens in sent) < FACTOR * tokens_per_s * WINDOW_S
        return now if has_room or not sent else sent[0][0] + WINDOW_S

    def on_resumed(self, core: int, num_tokens: int, now: float) -> None:
        """Note that a core was sent a request of `num_tokens`, prompt and answers so far."""
        self._sent[core].append((now, num_tokens))

    def forget(self, core: int) -> None:
        """Forget a lost core: its successor has no work."""
        self._sent.pop(core, None)
