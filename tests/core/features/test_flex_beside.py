"""A full batch of the flex class beside other requests, in simulated time with the costs of two cores of a CPU."""

from __future__ import annotations

import itertools
import random

import pytest

from tokenloom.core.features.flex import Flex
from tokenloom.ipc.codec import decode_ids
from tokenloom.tests.core.harness import Harness

STEP_S, TOKEN_S = 0.012, 0.0006  # of a model with 135M parameters: of a step, and of each token in it
NUM_OTHERS, RATE, PROMPT, ANSWER = 40, 2.0, 128, 64
NUM_OPEN, BATCH_PROMPT, BATCH_ANSWER = 64, 180, 60


class Simulation:
    """Requests that arrive at random beside `num_open` of the flex class, each of which another one follows."""

    def __init__(self, seed: int, num_open: int) -> None:
        self._draw, self._num_open = random.Random(seed), num_open
        self._harness = Harness(4000, max_num_seqs=80, max_num_batched_tokens=2048, max_waiting_requests=100)
        self._harness.worker.step_s, self._harness.worker.token_s = STEP_S, TOKEN_S
        self.now = 100.0
        (flex,) = (each for each in self._harness.core.features.in_order if isinstance(each, Flex))
        flex._clock = lambda: self.now
        self._keys = itertools.count(1)
        self._add(PROMPT, 1)  # the cost of prompts is known
        self._harness.run()
        self._flex = {self._add(BATCH_PROMPT, BATCH_ANSWER, "flex") for _ in range(num_open)}
        self._times: dict[int, list[float]] = {}  # of another request: its arrival, and the times of its tokens

    def _add(self, num_tokens: int, answer: int, tier: str = "default") -> int:
        key = next(self._keys)
        self._harness.add(key, self._draw.choices(range(1, 990), k=num_tokens), answer, service_tier=tier)
        return key

    def run(self, gaps: list[float]) -> tuple[list[float], list[float]]:
        """Return the seconds to the first token of each other request, and all those between two tokens."""
        harness, ends_at = self._harness, float("inf")
        arrivals = [self.now + after for after in itertools.accumulate(gaps)]
        while arrivals or any(len(times) <= ANSWER for times in self._times.values()):
            harness.core.step()
            if ends_at == float("inf") and harness.worker.queue:
                ends_at = self.now + STEP_S + TOKEN_S * sum(decode_ids(harness.worker.queue[0].counts))
            if arrivals and arrivals[0] < ends_at:
                self.now = arrivals.pop(0)
                self._times[self._add(PROMPT, ANSWER)] = [self.now]
                continue
            self.now, ends_at = ends_at, float("inf")
            harness.answer()
            for key, times in self._times.items():
                times += [self.now] * (len(harness.tokens[key]) + 1 - len(times))
            ended = {key for key in self._flex if key in harness.finished}
            self._flex = self._flex - ended | {self._add(BATCH_PROMPT, BATCH_ANSWER, "flex") for _ in ended}
        first = [times[1] - times[0] for times in self._times.values()]
        between = [after - before for times in self._times.values() for before, after in itertools.pairwise(times[1:])]
        return first, between


def p99(values: list[float]) -> float:
    return sorted(values)[int(0.99 * len(values))]


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(3))
def test_others_hardly_wait_beside_a_full_batch(seed: int) -> None:
    draw = random.Random(seed)
    gaps = [draw.expovariate(RATE) for _ in range(NUM_OTHERS)]
    alone, beside = (Simulation(seed, num_open).run(gaps) for num_open in (0, NUM_OPEN))
    assert p99(beside[0]) <= 1.2 * p99(alone[0]), "with two steps in flight 1.3 to 1.75"
    assert p99(beside[1]) <= 1.15 * p99(alone[1])
