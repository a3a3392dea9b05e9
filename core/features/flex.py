"""Flex: lets requests of the flex class compute in what other requests leave.

The class is for work that nobody waits for. It comes last in order, and gives way to every other request
(scheduling/preemption.py). This feature bounds its tokens in a step:

    others run        a share of the step, in which each row of another request counts as one token
    one has lately    so many tokens, of decoding rows and prompts, that the step ends very soon, since another request
                      that comes during it waits for its end
    none has          all rows decode; prompts take only so many tokens that the step ends soon

While the class runs alone, the next step is made when the one in flight has ended, so that another request waits for
one step and not for two. Where steps are short nobody notices the second, and it is made ahead as usual.

Admission ends at the first request for which no tokens are left: all after it in order are of the class, too.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from ..request import Ids, Request
from ..scheduling.scheduler import Scheduler
from ..scheduling.step.batch import Batch
from .step_room import StepRoom

LEAST_TOKENS = 2  # of a step; one token of a prompt would be taken for a decoding row
STEP_S = 0.25  # of the prompts in a step, while no other request runs
LEAST_ALONE = 256  # tokens of prompts in such a step: smaller chunks are inefficient
LONG_STEP_S = 0.1  # after such a step the gap to the next one does not count
LATELY_S = 30.0  # since another request ran
SOON_S = 0.02  # of a step, then
SLOWER = 1.5  # or so many times as long as a step of the fewest rows: a large model has no shorter one
NO_BOUND = 1 << 30


class Flex(StepRoom):
    """Bound on the tokens of the flex class in each step. Reads the rows and the queue."""

    def __init__(self, scheduler: Scheduler, share: float, clock: Callable[[], float] = time.monotonic) -> None:
        """share: of the tokens of a step, while other requests run; 1: no bound. clock: seconds."""
        super().__init__()
        self._rows, self._waiting, self._ledger = scheduler.rows, scheduler.waiting, scheduler.ledger
        self._throttle = scheduler.prefill_throttle
        self._share, self._clock = share, clock
        self._other_at = -LATELY_S  # time at which a request of another class came or ran last
        self._num_held = 0  # running requests of the class without a token in the next step

    @property
    def _num_others(self) -> int:
        return self._rows.num_active - self._rows.num_flex

    @property
    def _is_lately(self) -> bool:
        """Whether the class runs alone, and has not for long."""
        return not self._num_others and self._clock() - self._other_at <= LATELY_S

    def arrive(self, request: Request) -> None:
        if not request.is_flex:
            self._other_at = self._clock()

    def delays_step(self) -> bool:
        if self._share == 1 or self._num_others or not self._rows.num_flex or self._waiting.num_ready_others:
            return False
        return self._is_lately or self._takes_long(self._ledger.entries[-1].batch)

    def _takes_long(self, batch: Batch) -> bool:
        seconds = self._throttle.seconds(batch.num_tokens - batch.num_prompt_tokens, batch.num_prompt_tokens)
        return seconds is not None and seconds >= LONG_STEP_S

    def limit(self, ahead: Ids) -> None:
        self._num_held = 0
        if self._num_others:
            self._other_at = self._clock()
        if not self._rows.num_flex:
            return
        self._left = self._bound()
        are_alone = not (self._num_others or self._is_lately)
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
        """Return how many tokens of a step the class may have; if it runs alone for long, how many of prompts."""
        if self._share == 1:
            return NO_BOUND
        if num_others := self._num_others:
            return max(int(num_others * self._share / (1 - self._share)), LEAST_TOKENS)
        if self._is_lately:
            affordable, least = self._throttle.tokens_of_step(SOON_S, SLOWER), LEAST_TOKENS
        else:
            affordable, least = self._throttle.tokens_within(STEP_S), LEAST_ALONE
        return NO_BOUND if affordable is None else max(affordable, least)

    def _rest(self) -> int:
        """Return how many tokens are left of the next step. If `limit` was not asked, each row decodes again."""
        if self._left is None:
            self._left = self._bound()
            if self._num_others or self._is_lately:
                self._left -= self._rows.num_flex
        return self._left

    def num_later(self) -> int:
        return self._num_held + (self._waiting.num_flex if self._num_others else 0)

    def closes(self, request: Request) -> bool:
        return request.is_flex and self._rest() < LEAST_TOKENS

    def admit(self, request: Request, num_computed: int) -> None:
        if request.is_flex:
            self._admitted = request
