"""RunnerFeature: the interface of optional parts of a step, such as media; RunnerFeatures: the features of one runner.

A feature defines the verbs that it needs; others cost nothing. In one step they are called in this order:

    beside ( begin → update → prepare → read_hidden → follow )

Knows no feature; each has a folder in `workers/features/`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from ...ipc.errors import ProtocolError
from ...ipc.messages.media import FailedEntry
from ...ipc.messages.workers import DraftWork, Pooled, SchedulerOutput
from .step_inputs import StepInputs

REFUSALS = {  # orders that only a feature carries out, and the fault without it
    "stores": "copies KV blocks, but there is no arena",
    "loads": "copies KV blocks, but there is no arena",
    "fills": "fills adapter slots, the worker has none: --enable-lora is not set",
    "encodes": "encodes media, but the model takes none",
    "draft_limits": "asks for drafts, but there is no draft model",
}


class Pending(Protocol):
    """Work on the device that a step's result waits for."""

    @property
    def is_here(self) -> bool: ...

    def wait(self) -> None: ...


@dataclass(eq=False)
class BegunStep:
    """Parts of a step's result that features add while the step is started."""

    enter: Callable[[str], None]  # names the stage that follows, for error reports
    pending: Pending | None = None  # None: the result waits for nothing but tokens
    failed_entries: list[FailedEntry] = field(default_factory=list)
    pooled: list[Pooled] = field(default_factory=list)
    draft_work: DraftWork | None = None


class RunnerFeature:
    """Base class of features; its verbs do nothing. Any verb raises ProtocolError if the rows or the feature forbid the
    step."""

    orders: tuple[str, ...] = ()  # fields of SchedulerOutput that this feature carries out

    def beside(self, step: SchedulerOutput) -> AbstractContextManager[object]:
        """Return the context in which the step is started. One feature of a runner may define it."""
        return nullcontext()

    def begin(self, step: SchedulerOutput, begun: BegunStep) -> None:
        """Carry out orders that come before the changes of rows."""

    def update(self, step: SchedulerOutput) -> None:
        """Apply the step's changes of rows to the feature; the InputBatch has applied them already."""

    def prepare(self, inputs: StepInputs) -> StepInputs:
        """Return the step's inputs with the additions of this feature."""
        return inputs

    def read_hidden(self, hidden: Tensor, inputs: StepInputs, begun: BegunStep) -> None:
        """Read the hidden states [T, hidden_size] of a step that the host samples; [0, …] if it ran as a graph."""

    def follow(self, step: SchedulerOutput, begun: BegunStep) -> None:
        """Do work that comes after the tokens that the host has sampled in the step, which are in the InputBatch."""

    def clear(self) -> None:
        """Forget all rows."""


class RunnerFeatures:
    """The features of one runner. Each verb is passed to the features that define it, in their order."""

    def __init__(self, features: Sequence[RunnerFeature]) -> None:
        def answering(verb: str) -> list[RunnerFeature]:
            default = getattr(RunnerFeature, verb)
            return [each for each in features if getattr(type(each), verb) is not default]

        carried_out = {order for each in features for order in each.orders}
        self._refusals = [(order, reason) for order, reason in REFUSALS.items() if order not in carried_out]
        (beside,) = answering("beside") or [RunnerFeature()]
        self.beside = beside.beside
        self._begin = answering("begin")
        self._update = answering("update")
        self._prepare = answering("prepare")
        self._read_hidden = answering("read_hidden")
        self._follow = answering("follow")
        self._clear = answering("clear")

    def begin(self, step: SchedulerOutput, enter: Callable[[str], None]) -> BegunStep:
        """Begin a step. ProtocolError if it has orders for a feature that the runner lacks."""
        for order, reason in self._refusals:
            if getattr(step, order):
                raise ProtocolError(f"step {step.step} {reason}")
        begun = BegunStep(enter)
        for each in self._begin:
            each.begin(step, begun)
        return begun

    def update(self, step: SchedulerOutput) -> None:
        for each in self._update:
            each.update(step)

    def prepare(self, inputs: StepInputs) -> StepInputs:
        for each in self._prepare:
            inputs = each.prepare(inputs)
        return inputs

    def read_hidden(self, hidden: Tensor, inputs: StepInputs, begun: BegunStep) -> None:
        for each in self._read_hidden:
            each.read_hidden(hidden, inputs, begun)

    def follow(self, step: SchedulerOutput, begun: BegunStep) -> None:
        for each in self._follow:
            each.follow(step, begun)

    def clear(self) -> None:
        for each in self._clear:
            each.clear()
