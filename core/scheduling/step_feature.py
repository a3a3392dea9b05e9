"""StepFeature: the interface of a part of the engine that has a say in steps, such as adapters, media or grammars.

A feature lives in core/features/ and defines the verbs that it needs; one that it lacks costs nothing. Its requests:

    arrive → wait → (holds)* → admit → leave → wait … → end

Each request that arrives ends once, and each that was admitted leaves once, before it waits again or ends. A feature
changes no row, and `plan` writes into the StepDelta alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from ...ipc.errors import ErrorInfo
from ...ipc.messages.base import FinishReason
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

    def send_masks(self, masks: TokenMask) -> None:
        """Send masks for the oldest step in flight to the workers."""

    def append_jump_tokens(self, jumps: list[tuple[Request, list[int]]]) -> NewTokens:
        """Append tokens of running requests that need no sampling; return those that were."""
        ...

    def enter_namespace(self, namespace: bytes | None) -> None:
        """Name blocks from now on after the given weights, or at random."""


class StepPlan:
    """The step that is being made, when its tokens are chosen."""

    def __init__(self, counts: Ids, delta: StepDelta) -> None:
        """counts: [max_num_seqs] its tokens by row, changed in place by the scheduler. delta: of its message."""
        self.counts, self.delta = counts, delta
        self.number = 0


class StepFeature:
    """A part of an engine that has a say in its steps. A verb that is not defined does nothing."""

    # ── requests ─────────────────────────────────────────────────────────────────────────────────────────────────

    def arrive(self, request: Request) -> None:
        """Note a new request, before it waits. It may get a WaitReason."""

    def wait(self, request: Request) -> None:
        """Note that a request begins to wait for a row, also after it has lost one. It may get a WaitReason."""

    def holds(self, request: Request) -> bool:
        """Return whether a request must wait, although it is the first in order that has no WaitReason. Features are
        asked in order, up to the first that holds it."""
        return False

    def admit(self, request: Request, num_computed: int) -> None:
        """Note that a request has got a row. Its first `num_computed` tokens were in the prefix cache."""

    def leave(self, request: Request, last_step: int) -> None:
        """Note that a request has lost its row. last_step: number of the last step that was scheduled."""

    def end(self, request: Request, reason: FinishReason | None) -> None:
        """Note that a request has ended, after it has left its row or the queue. None: another attempt replaces it."""

    # ── a step is made ───────────────────────────────────────────────────────────────────────────────────────────

    def delays_step(self) -> bool:
        """Return whether to make no step before the one in flight is back."""
        return False

    def is_due(self) -> bool:
        """Return whether a step is to be made even if no request runs or waits."""
        return False

    def limit(self, ahead: Ids) -> None:
        """Lower the numbers of tokens that rows could compute: [max_num_seqs]."""

    def num_later(self) -> int:
        """Return how many running and waiting requests are no prompts of the next step, whatever the budget."""
        return 0

    def make_room(self) -> None:
        """Prepare for admissions: requests wait."""

    def cut(self, request: Request, count: int, most: int) -> int:
        """Return how many of the next `count` tokens of a request its row may compute in the step: more only if they
        belong together, and at most `most`."""
        return count

    def plan(self, step: StepPlan) -> None:
        """Write orders for the workers into the delta of a step. If they are all that it has, it is sent too."""

    # ── a step's result, losses and time ─────────────────────────────────────────────────────────────────────────

    def on_result(self, entry: LedgerEntry, output: ModelRunnerOutput, new_tokens: NewTokens) -> None:
        """Apply a step's result. Its tokens and ends are queued already."""

    def reset(self, lost: Sequence[LedgerEntry]) -> None:
        """Note that the workers hold nothing any more, and that no result of the steps `lost` comes. No request has a
        row."""

    def in_work(self, oldest: LedgerEntry | None) -> Iterable[Request]:
        """Return requests for which the workers now do something, beside those in the rows of `oldest`, the oldest
        step in flight."""
        return ()

    def next_deadline(self) -> float | None:
        """Return when to call `expire` if nothing else happens, by the engine's clock; None: at no time."""
        return None

    def expire(self, now: float) -> None:
        """Apply the deadlines until `now`."""

    def report(self) -> Mapping[str, object]:
        """Return fields of Progress."""
        return {}

    def check_invariants(self, requests: Sequence[Request]) -> None:
        """Raise AssertionError unless the feature agrees with all open requests; for tests."""


class StepFeatures:
    """For each verb of a request, a step or a turn the features that define it, in order, as bound methods: a verb
    without features is an empty loop. They are bound once, by `use`. Of the other verbs there is no need."""

    def __init__(self) -> None:
        self.use([])

    def use(self, features: Sequence[StepFeature]) -> None:
        """Have these features from now on, and no others."""
        self.in_order = features
        self.arrive = self._bound(StepFeature.arrive)
        self.wait = self._bound(StepFeature.wait)
        self.holds = self._bound(StepFeature.holds)
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
        """Return whether a feature delays the next step; the others are not asked then."""
        for delays_step in self._delays_step:  # noqa: SIM110 - any() would call a generator, in each step
            if delays_step():
                return True
        return False

    def expire(self, now: float) -> None:
        for expire in self._expire:
            expire(now)
