"""StepSequencer: which messages of the core a worker takes, in which order.

Steps are numbered from 1 without gaps within one core_epoch. A new epoch begins with a Probe, never with a step, so
that what an old core left in a socket can never be computed. Pure state: no socket, no rows.
"""

from __future__ import annotations

from enum import Enum

from ..ipc.messages.workers import CoreToWorker, Probe, SchedulerOutput, TokenMask


class StreamAction(Enum):
    EXECUTE = "run this step"
    ACKNOWLEDGE = "answer this probe"
    RESET = "forget all rows, then answer this probe"
    RESEND = "ask for everything from `next_step`"
    DROP = "a gap that was asked for already; it comes again"
    STALE = "of another core or group, or done before: drop and count"


class StepSequencer:
    """One worker's place in the stream of its `generation`."""

    def __init__(self, generation: int) -> None:
        self._generation = generation
        self._core_epoch = -1
        self._asked_from = 0
        self.next_step = 1

    def classify(self, message: CoreToWorker) -> StreamAction:
        """What to do with a message; a step that is to be executed counts as taken. A mask is taken where it is waited
        for (`is_mask_of`); here it can only be late, or tell that its step was lost."""
        if message.generation != self._generation or message.core_epoch < self._core_epoch:
            return StreamAction.STALE
        if isinstance(message, Probe):
            return self._classify_probe(message)
        if message.core_epoch != self._core_epoch or message.step < self.next_step:
            return StreamAction.STALE
        if message.step == self.next_step and not isinstance(message, TokenMask):
            self.next_step += 1
            return StreamAction.EXECUTE
        if self._asked_from == self.next_step:
            return StreamAction.DROP
        self._asked_from = self.next_step
        return StreamAction.RESEND

    def is_mask_of(self, step: SchedulerOutput, mask: TokenMask) -> bool:
        place = (mask.generation, mask.core_epoch, mask.step)
        return place == (step.generation, step.core_epoch, step.step)

    def has_replaced(self, step: SchedulerOutput, message: CoreToWorker) -> bool:
        """Whether `message` shows that the core which sent `step` is gone, so that no mask will come."""
        return message.generation == step.generation and message.core_epoch > step.core_epoch

    def _classify_probe(self, probe: Probe) -> StreamAction:
        if probe.core_epoch == self._core_epoch:
            return StreamAction.ACKNOWLEDGE
        self._core_epoch = probe.core_epoch
        self._asked_from = 0
        self.next_step = 1
        return StreamAction.RESET
