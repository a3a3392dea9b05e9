"""StepFeature: the interface of a part of the engine that has a say in steps, such as adapters, media or grammars.

A feature lives in core/features/ and defines the verbs that it needs; others cost nothing. The verbs of a request:

    arrive → wait → (holds, closes)* → admit → leave → wait … → end

Each request that arrives ends once, and each that was admitted leaves once, before it waits again or ends. A feature
changes no row, and `plan` writes only into the StepDelta.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from ...ipc.errors import ErrorInfo
from ...ipc.messages.base import CacheMisses, FinishReason
from ...ipc.messages.workers import ModelRunnerOutput, TokenMask
from ..request import Ids, Request
from .result_processor import NewTokens
from .step.ledger import LedgerEntry
from .step.step_delta import StepDelta

ParamsT = ParamSpec("ParamsT")
ResultT = TypeVar("ResultT")


class Engine(Protocol):
    """The engine as its features use it."""

    def end(self, request: Request, reason: FinishReason, error: ErrorInfo | None = None) -> None:
        """End an open request."""

    def report_misses(self, request: Request, misses: CacheMisses) -> None:
        """Report why tokens of a request's prompt were not in the prefix cache."""

    def send_masks(self, masks: TokenMask) -> None:
        """Send masks for the oldest step in flight to the workers."""

    def append_jump_tokens(self, jumps: list[tuple[Request, list[int]]]) -> NewTokens:
        """Append tokens of running requests that need no sampling; return those that were appended."""
        ...

    def enter_namespace(self, namespace: bytes | None) -> None:
        """Compute block keys from now on in the given namespace, or in a random one if None."""


class StepPlan:
    """The step that is being made, after its tokens are chosen."""

    def __init__(self, counts: Ids, delta: StepDelta) -> None:
        """counts: [max_num_seqs] tokens of the step by row, changed in place by the scheduler. delta: changes that the
        step's message will carry."""
        self.counts, self.delta = counts, delta
        self.number = 0


class StepFeature:
    """A part of an engine that has a say in its steps. A verb that is not defined does nothing."""

    # ── requests ─────────────────────────────────────────────────────────────────────────────────────────────────

    def arrive(self, request: Request) -> None:
        """Record a new request, before it waits. The feature may give it a WaitReason."""

    def wait(self, request: Request) -> None:
        """Record that a request starts to wait for a row: a new one, or one that has lost its row. The feature may give
        it a WaitReason."""

    def holds(self, request: Request) -> bool:
        """Return whether a request must wait, although it is the first in order that has no WaitReason. Features are
        asked in order, up to the first that holds it."""
        return False

    def closes(self, request: Request) -> bool:
        """Return whether neither a request, which no feature holds, nor any after it in order may be admitted in this
        step."""
        return False

    def admit(self, request: Request, num_computed: int) -> None:
        """Record that a request has received a row. Its first `num_computed` tokens were in the prefix cache."""

    def leave(self, request: Request, last_step: int) -> None:
        """Record that a request has lost its row. last_step: number of the last step that was scheduled."""

    def end(self, request: Request, reason: FinishReason | None) -> None:
        """Record that a request has ended, after it has left its row or the queue. reason: None if another attempt
        replaces it."""

    # ── a step is made ───────────────────────────────────────────────────────────────────────────────────────────

    def delays_step(self) -> bool:
        """Return whether the next step must wait for the result of the one in flight."""
        return False

    def is_due(self) -> bool:
        """Return whether a step is to be made even if no request runs or waits."""
        return False

    def limit(self, ahead: Ids) -> None:
        """Lower, in place, the numbers of tokens that rows could compute in the next step. ahead: [max_num_seqs]."""

    def num_later(self) -> int:
        """Return how many running and waiting requests cannot be prefilled in the next step, whatever the budget."""
        return 0

    def make_room(self) -> None:
        """Make room for waiting requests, just before the scheduler admits some."""

    def cut(self, request: Request, count: int, most: int) -> int:
        """Return how many tokens of a request its row computes in the step, given that the scheduler has chosen
        `count`: fewer, or as many more (at most `most` in all) as must be computed together with them."""
        return count

    def plan(self, step: StepPlan) -> None:
        """Write orders for the workers into the delta of a step. A step without tokens is sent if it has orders."""

    # ── a step's result, losses and time ─────────────────────────────────────────────────────────────────────────

    def on_result(self, entry: LedgerEntry, output: ModelRunnerOutput, new_tokens: NewTokens) -> None:
        """Apply a step's result. Its tokens and the ends of requests are in the outbox already."""

    def reset(self, lost: Sequence[LedgerEntry]) -> None:
        """Forget what the workers hold, and the steps `lost`, whose results will not come. No request has a row."""

    def in_work(self, oldest: LedgerEntry | None) -> Iterable[Request]:
        """Return requests on which the workers work now, besides those in the rows of `oldest`, the oldest step in
        flight."""
        return ()

    def next_deadline(self) -> float | None:
        """Return when to call `expire` if nothing else happens, by the engine's clock; None: not at all."""
        return None

    def expire(self, now: float) -> None:
        """Act on the deadlines that have passed at `now`, by the engine's clock."""

    def report(self) -> Mapping[str, object]:
        """Return the fields of Progress that the feature knows, by name."""
        return {}

    def check_invariants(self, requests: Sequence[Request]) -> None:
        """Raise AssertionError unless the feature agrees with all open requests; for tests."""


class StepFeatures:
    """The features of an engine: for each verb that is called often, the bound methods of those features that define
    it, in order, so that an undefined verb is an empty loop. Other verbs are called on the features `in_order`."""

    def __init__(self) -> None:
        self.use([])

    def use(self, features: Sequence[StepFeature]) -> None:
        """Use exactly these features from now on."""
        self.in_order = features
        self.arrive = self._bound(StepFeature.arrive)
        self.wait = self._bound(StepFeature.wait)
        self.holds = self._bound(StepFeature.holds)
        self.closes = self._bound(StepFeature.closes)
        self.admit = self._bound(StepFeature.admit)
        self.leave = self._bound(StepFeature.leave)
        self.end = self._bound(StepFeature.end)
        self._delays_step = self._bound(StepFeature.delays_step)
        self.is_due = self._bound(StepFeature.is_due)
        self.limit = self._bound(StepFeature.limit)
        self.num_later = self._bound(StepFeature.num_later)
        self.make_room = self._bound(StepFeature.make_room)
        self.cut = self._bound(StepFeature.cut)
        self.plan = self._bound(StepFeature.plan)
        self.on_result = self._bound(StepFeature.on_result)
        self.next_deadline = self._bound(StepFeature.next_deadline)
        self._expire = self._bound(StepFeature.expire)

    def _bound(self, verb: Callable[Concatenate[StepFeature, ParamsT], ResultT]) -> list[Callable[ParamsT, ResultT]]:
        name = verb.__name__
        return [getattr(each, name) for each in self.in_order if getattr(type(each), name) is not verb]

    def delays_step(self) -> bool:
        """Return whether a feature delays the next step; stop at the first that does."""
        for delays_step in self._delays_step:  # noqa: SIM110 - any() would call a generator, in each step
            if delays_step():
                return True
        return False

    def expire(self, now: float) -> None:
        for expire in self._expire:
            expire(now)
