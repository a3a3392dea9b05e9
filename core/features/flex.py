"""Flex: lets requests of the flex class compute in what other requests leave.

The class is for work that nobody waits for. It comes last in order, and gives way to every other request
(scheduling/preemption.py). This feature bounds its tokens in a step:

    others run   a share of the step, in which each row of another request counts as one token
    none runs    all rows decode; prompts take only so many tokens that a step ends soon, since a request of another
                 class may come during it, and would wait for its end: very soon if one has come lately

Admission ends at the first request for which no tokens are left: all after it in order are of the class, too.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from ..request import Ids, Request
from ..scheduling.scheduler import Scheduler
from ..scheduling.step_feature import StepFeature, StepPlan

LEAST_TOKENS = 2  # of a step; one token of a prompt would be taken for a decoding row
STEP_S = 0.25  # of the prompts in a step, while no other request runs
SOON_S = 0.05  # the same, if one has come within LATELY_S: shorter steps compute a tenth less
LATELY_S = 30.0
LEAST_ALONE = 128  # tokens of prompts in such a step: smaller chunks are inefficient
NO_BOUND = 1 << 30


class Flex(StepFeature):
    """Bound on the tokens of the flex class in each step. Reads the rows and the queue."""

    def __init__(self, scheduler: Scheduler, share: float, clock: Callable[[], float] = time.monotonic) -> None:
        """share: of the tokens of a step, while other requests run; 1: no bound. clock: seconds."""
        self._rows, self._waiting = scheduler.rows, scheduler.waiting
        self._throttle = scheduler.prefill_throttle
        self._share, self._clock = share, clock
        self._other_at = -LATELY_S  # time at which the last request of another class came
        self._left: int | None = None  # tokens of the next step that the class may still have; None: not known yet
        self._num_held = 0  # running requests of the class without a token in the next step
        self._admitted: Request | None = None  # the last one of the class that was admitted

    @property
    def _num_others(self) -> int:
        return self._rows.num_active - self._rows.num_flex

    def arrive(self, request: Request) -> None:
        if not request.is_flex:
            self._other_at = self._clock()

    def limit(self, ahead: Ids) -> None:
        self._num_held = 0
        if not self._rows.num_flex:
            return
        self._left = self._bound()
        are_alone = not self._num_others
        running = [request for request in self._rows.requests() if request.is_flex]
        for request in sorted(running, key=lambda each: each.sort_key):
            wanted = int(ahead[request.row])
            if wanted == 0 or (wanted == 1 and are_alone):
                continue
            given = min(wanted, self._left)
            if given < min(wanted, LEAST_TOKENS):
                given = 0
                self._num_held += 1
            ahead[request.row] = given
            self._left -= given

    def _bound(self) -> int:
        """Return how many tokens of a step the class may have; while no other request runs, how many of prompts."""
        if self._share == 1:
            return NO_BOUND
        if num_others := self._num_others:
            return max(int(num_others * self._share / (1 - self._share)), LEAST_TOKENS)
        is_alone_for_long = self._clock() - self._other_at > LATELY_S
        affordable = self._throttle.tokens_within(STEP_S if is_alone_for_long else SOON_S)
        return NO_BOUND if affordable is None else max(affordable, LEAST_ALONE)

    def _rest(self) -> int:
        """Return how many tokens are left of the next step. If `limit` was not asked, each row decodes again."""
        if self._left is None:
            num_decodes = self._rows.num_flex if self._num_others else 0
            self._left = self._bound() - num_decodes
        return self._left

    def num_later(self) -> int:
        return self._num_held + self._waiting.num_flex if self._num_others else 0

    def closes(self, request: Request) -> bool:
        return request.is_flex and self._rest() < LEAST_TOKENS

    def admit(self, request: Request, num_computed: int) -> None:
        if request.is_flex:
            self._admitted = request

    def cut(self, request: Request, count: int, most: int) -> int:
        """Cut the first chunk of a request; `limit` has cut those of running ones."""
        if request is not self._admitted:
            return count
        self._admitted = None
        left = self._rest()
        count = min(count, left)
        self._left = left - count
        return count

    def plan(self, step: StepPlan) -> None:
        self._left = None
