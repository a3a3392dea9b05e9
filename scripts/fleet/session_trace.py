"""A trace of conversations with pauses among single long prompts, for replay_kv_trace.py.

Every second a request comes that is not the next of a conversation: four of five are single prompts, one begins a
conversation. Their lengths, the turns and the pauses (60 s in the median) are drawn anew for each seed.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count

SHARE_OF_SINGLE = 0.8
SINGLE, BEGIN, TURN = 60, 8, 3  # blocks in the median: of a single prompt, a conversation's first one, a later turn
NUM_SYSTEM_PROMPTS, SYSTEM = 5, 8  # how many prompts begin all others, and the blocks of each
MEAN_TURNS, PAUSE_S, SPREAD = 6.0, 60.0, 0.7


@dataclass(frozen=True)
class TracedRequest:
    """A prompt, the number of blocks of its answer, and whether its tokens count."""

    keys: Sequence[bytes]  # of its blocks
    num_new: int
    counts: bool = True


def keys_of(hash_ids: Iterable[int]) -> list[bytes]:
    """Return the keys of blocks that have numbers."""
    return [number.to_bytes(8, "little") for number in hash_ids]


def session_trace(seed: int = 1, duration_s: float = 3_600.0) -> Iterator[TracedRequest]:
    """Yield the requests, in order of time. Those of conversations count."""
    draw, numbers = random.Random(seed), count()

    def blocks(median: int) -> list[int]:
        return [next(numbers) for _ in range(1 + int(draw.lognormvariate(math.log(median), SPREAD)))]

    systems = [[next(numbers) for _ in range(SYSTEM)] for _ in range(NUM_SYSTEM_PROMPTS)]
    arrivals: list[tuple[float, list[int], bool]] = []
    at = 0.0
    while at < duration_s:
        at += draw.expovariate(1.0)
        prompt = list(draw.choice(systems))
        if draw.random() < SHARE_OF_SINGLE:
            arrivals.append((at, prompt + blocks(SINGLE), False))
            continue
        turn_at, prompt = at, prompt + blocks(BEGIN)
        for _ in range(1 + int(draw.expovariate(1 / MEAN_TURNS))):
            arrivals.append((turn_at, prompt, True))
            prompt = prompt + blocks(TURN)
            turn_at += draw.lognormvariate(math.log(PAUSE_S), SPREAD)
    for _, prompt, counts in sorted(arrivals, key=lambda each: each[0]):
        yield TracedRequest(keys_of(prompt), 0, counts)
