"""StepSequencer: the order in which a worker accepts the core's messages.

Steps, and orders that take the place of a step, are numbered from 1 without gaps within one core_epoch. A new epoch
starts with a Probe, never with a step, so that an old core's steps left in a socket are never computed. Pure state: no
socket, no rows.
"""

from __future__ import annotations

from enum import Enum

from ..ipc.messages.workers import CoreToWorker, Probe, SchedulerOutput, TokenMask


class StreamAction(Enum):
    EXECUTE = "run this step"
    ACKNOWLEDGE = "answer this probe"
    RESET = "forget all rows, then answer this probe"
    RESEND = "request all messages from `next_step` again"
    DROP = "ignore: the missing steps were requested already"
    STALE = "drop and count: of another core or group, or executed before"


class StepSequencer:
    """One worker's position in the core's stream of messages to worker group `generation`."""

    def __init__(self, generation: int) -> None:
        self._generation = generation
        self._core_epoch = -1
        self._requested_from = 0
        self.next_step = 1

    def classify(self, message: CoreToWorker) -> StreamAction:
        """Return the action for a message, and record that a step is executed, a core is new, or a resend is requested.
        Masks that `is_mask_of` accepts must not be passed: any other mask is late, or shows that its step was lost."""
        if message.generation != self._generation or message.core_epoch < self._core_epoch:
            return StreamAction.STALE
        if isinstance(message, Probe):
            return self._classify_probe(message)
        if message.core_epoch != self._core_epoch or message.step < self.next_step:
            return StreamAction.STALE
        if message.step == self.next_step and not isinstance(message, TokenMask):
            self.next_step += 1
            return StreamAction.EXECUTE
        if self._requested_from == self.next_step:
            return StreamAction.DROP
        self._requested_from = self.next_step
        return StreamAction.RESEND

    def is_mask_of(self, step: SchedulerOutput, mask: TokenMask) -> bool:
        place = (mask.generation, mask.core_epoch, mask.step)
        return place == (step.generation, step.core_epoch, step.step)

    def has_replaced(self, step: SchedulerOutput, message: CoreToWorker) -> bool:
        """Return whether `message` is from a newer core than `step`, so that the mask of `step` will not arrive."""
        return message.generation == step.generation and message.core_epoch > step.core_epoch

    def _classify_probe(self, probe: Probe) -> StreamAction:
        if probe.core_epoch == self._core_epoch:
            return StreamAction.ACKNOWLEDGE
        self._core_epoch = probe.core_epoch
        self._requested_from = 0
        self.next_step = 1
        return StreamAction.RESET
