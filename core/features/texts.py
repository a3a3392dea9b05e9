"""Texts: lets requests that pool share each step with generating rows, and with each other.

A text, that is a prompt to embed, classify or score, is short and comes with many others. Without a bound, four of them
beside 16 generating rows would be a burst of prompts, which takes a whole step. Texts wait in a queue of this feature
(WaitReason.TURN), from which as many are released as the next step has tokens for:

    rows decode    SHARE of the time of their step; more if the texts that are open would need longer than DRAIN_S, up
                   to the pause that a prompt may add
    none decodes   the whole budget, so that a request that comes is behind the texts of one step, not behind all

While other prompts wait, texts get half as much, since the others may come after them in order. The queue is fair:
callers take turns by tokens, so that one text of another caller does not wait for the thousands of a body. None
starves: a priority is worth a number of tokens. Texts of the flex class are the Flex feature's.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Mapping, Sequence

import numpy as np

from ...ipc.messages.base import FinishReason
from ..request import Ids, Request, State, WaitReason
from ..scheduling.prefill_throttle import MIN_TOKENS, pause_s
from ..scheduling.scheduler import Scheduler
from .step_room import StepRoom

SHARE = 0.2  # of a decode step's time that texts may add to it: 1.3 times the step is noticed, and estimates err
DRAIN_S = 0.3  # in which the open texts are to be computed
LEVEL_TOKENS = 1 << 16  # of texts, after which one comes before new ones of a priority that is one level higher
LEAST_TOKENS = 2  # of a text in a step: one token would be taken for a decoding row
_KEPT_TURNS = 64  # of callers, at least


class Texts(StepRoom):
    """Owner of the queue of texts. Reads the rows and the throttle. `_queue`: (place, tie, turn, request); a request
    that has ended is skipped when it surfaces."""

    def __init__(self, scheduler: Scheduler, budget: int) -> None:
        """budget: largest number of tokens of a step."""
        super().__init__()
        self._rows, self._waiting, self._throttle = scheduler.rows, scheduler.waiting, scheduler.prefill_throttle
        self._budget = budget
        self._ahead = (
            budget if scheduler.kv_cache.is_of_step else 0
        )  # so that whole prompts are found that fit the rest
        self._queue: list[tuple[int, int, int, Request]] = []
        self._tie = itertools.count()
        self._turn = 0  # of the text released last
        self._next_turns: dict[str, int] = {}  # by caller: the turn of its next text
        self._released: set[Request] = set()  # texts that wait without this feature's WaitReason
        self._num_open = 0
        self._num_queued = self._num_queued_tokens = 0
        self._num_unfed = 0  # running texts with several tokens left, for which the step may have no room
        self._is_stuck = False  # no text was admitted since texts were released last

    # ── the queue ────────────────────────────────────────────────────────────────────────────────────────────────

    def arrive(self, request: Request) -> None:
        self._num_open += is_text(request)

    def wait(self, request: Request) -> None:
        if not is_text(request):
            return
        turn = max(self._turn, self._next_turns.get(request.caller, 0))
        self._next_turns[request.caller] = turn + request.num_tokens
        request.waits_for.add(WaitReason.TURN)
        heapq.heappush(self._queue, (turn + request.priority * LEVEL_TOKENS, next(self._tie), turn, request))
        self._count(request, 1)
        if len(self._next_turns) > _KEPT_TURNS + 2 * len(self._queue):
            self._next_turns = {caller: turn for caller, turn in self._next_turns.items() if turn > self._turn}

    def _count(self, request: Request, sign: int) -> None:
        self._num_queued += sign
        self._num_queued_tokens += sign * request.num_tokens

    def make_room(self) -> None:
        """Release texts in turn, as many as the step has tokens for."""
        if not self._num_queued:
            return
        room = self._rest() + self._ahead - sum(each.num_tokens for each in self._released if not each.waits_for)
        if self._is_stuck:  # perhaps another feature holds these, until one that is queued has run
            room = max(room, LEAST_TOKENS)
        self._is_stuck = True
        while room >= LEAST_TOKENS and self._queue:
            _, _, turn, request = heapq.heappop(self._queue)
            if request.state is not State.WAITING:
                continue
            self._turn = max(self._turn, turn)
            room -= request.num_tokens
            self._released.add(request)
            self._count(request, -1)
            self._waiting.release(request, WaitReason.TURN)

    def end(self, request: Request, reason: FinishReason | None) -> None:
        if not is_text(request):
            return
        self._num_open -= 1
        self._released.discard(request)
        if WaitReason.TURN in request.waits_for:
            self._count(request, -1)
        if not self._num_queued:
            self._queue.clear()

    # ── a step is made ───────────────────────────────────────────────────────────────────────────────────────────

    def limit(self, ahead: Ids) -> None:
        self._num_unfed = 0
        if not self._num_open:
            return
        self._left = left = self._bound()
        rows = self._rows
        places = np.flatnonzero((ahead > 0) & rows.is_pooled)
        for row in places[np.argsort(rows.sort_key[places], kind="stable")].tolist():
            if rows.request(row).is_flex:
                continue
            wanted = int(ahead[row])
            given = min(wanted, max(left, 0))
            if given < min(wanted, LEAST_TOKENS):
                given = 0
            self._num_unfed += wanted > 1
            ahead[row] = given
            left -= given
        self._left = left

    def _bound(self) -> int:
        """Return how many tokens of the next step texts may have."""
        rows, throttle = self._rows, self._throttle
        generates = rows.is_active & ~rows.is_pooled
        num_decodes = int(np.count_nonzero(generates & (rows.num_scheduled >= rows.num_prompt_tokens)))
        has_prompts = self._num_waiting_prompts > 0 or num_decodes < np.count_nonzero(generates)
        part = 2 if has_prompts else 1  # of the tokens for prompts: the first in order could take them all
        decode_s, token_s = throttle.seconds(num_decodes, 0), throttle.token_beside_s
        if not num_decodes or decode_s is None or token_s is None:
            return max(self._budget // part, LEAST_TOKENS)
        drain_s = self._num_queued_tokens * token_s  # of the open texts alone
        due_s = decode_s * drain_s / (DRAIN_S - drain_s) if drain_s < DRAIN_S else math.inf
        added_s = max(SHARE * decode_s, min(due_s, pause_s(decode_s, 1)) / part)
        return min(max(int(added_s / token_s), MIN_TOKENS // part), max(self._budget // part, LEAST_TOKENS))

    @property
    def _num_waiting_prompts(self) -> int:
        """Number of waiting requests that could be admitted and are neither texts nor of the flex class."""
        waiting = self._waiting
        return len(waiting) - waiting.num_blocked - waiting.num_flex - len(self._released)

    def _rest(self) -> int:
        """Return how many tokens are left of the next step. If `limit` was not asked, no text runs."""
        if self._left is None:
            self._left = self._bound()
        return self._left

    def num_later(self) -> int:
        return self._num_unfed + self._num_queued + len(self._released)

    def holds(self, request: Request) -> bool:
        return is_text(request) and self._rest() < min(LEAST_TOKENS, request.num_tokens)

    def admit(self, request: Request, num_computed: int) -> None:
        if is_text(request):
            self._released.discard(request)
            self._admitted = request
            self._is_stuck = False

    # ── reports ──────────────────────────────────────────────────────────────────────────────────────────────────

    def report(self) -> Mapping[str, object]:
        """Do not count texts as deferred: they wait for room in steps, as others do."""
        return {"num_deferred": self._waiting.num_blocked - self._num_queued}

    def check_invariants(self, requests: Sequence[Request]) -> None:
        texts = [request for request in requests if is_text(request)]
        queued = [request for request in texts if WaitReason.TURN in request.waits_for]
        assert self._num_open == len(texts) and self._num_queued == len(queued)
        assert self._num_queued_tokens == sum(request.num_tokens for request in queued)
        assert {each[-1] for each in self._queue} >= set(queued)
        waiting = {request for request in texts if request.state is State.WAITING}
        assert self._released == waiting - set(queued)


def is_text(request: Request) -> bool:
    return request.pooling is not None and not request.is_flex
