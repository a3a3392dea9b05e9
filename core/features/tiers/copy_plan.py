"""CopyPlan: copies between blocks of the pool and slots of the arena, which the workers make in the order of the steps.

The tier process does not follow that order (step_copies.py), so it gets a slot only after the step that fills it.
Invariant: a slot has one reference for each planned copy of it, until the copy's step has ended. Slots of a lost step
are kept until its workers have ended, since these may still copy.
"""

from __future__ import annotations

from ....ipc.codec import encode_ids
from ...scheduling.step.step_copies import StepCopies, Write
from .slots import Slots


class CopyPlan:
    """Owner of the copies for the next step, and of the references to the slots of lost steps."""

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self._lost: list[StepCopies] = []  # copies that workers of lost steps may still make
        self._clear()

    def _clear(self) -> None:
        self._stores: list[int] = []
        self._loads: list[int] = []
        self._used: list[int] = []
        self._writes: list[Write] = []

    def __bool__(self) -> bool:
        return bool(self._stores or self._loads or self._writes)

    def store(self, block: int, key: bytes, owner: int, group: int = 0) -> int | None:
        """Plan the copy of a block of a KV group to a slot, which can be found by `key` from now on. Return the slot;
        None if all slots that the tenant `owner` may have are in use."""
        slot = self._slots.allocate_for(owner, group)
        if slot is None:
            return None
        self._slots.cache_block(slot, key)
        self._stores += (block, slot)
        self._used.append(slot)
        return slot

    def load(self, slot: int, block: int) -> None:
        """Plan the copy of a slot to a block of its KV group."""
        self._slots.touch([slot])
        self._loads += (slot, block)
        self._used.append(slot)

    def write(self, write: Write) -> None:
        """Plan that the tier process writes a slot after the next step."""
        self._slots.touch([write.slot])
        self._writes.append(write)

    def references(self) -> list[int]:
        """Return the slots of the planned copies and writes, and of lost steps, once for each reference."""
        lost = [slot for copies in self._lost for slot in copies.slots]
        return [*self._used, *(write.slot for write in self._writes), *lost]

    def take(self) -> StepCopies | None:
        """Return the copies for the next step and forget them; None if there are none."""
        if not self:
            return None
        filled = self._slots.take_pending()
        copies = StepCopies(encode_ids(self._stores), encode_ids(self._loads), self._used, filled, self._writes)
        self._clear()
        return copies

    def done(self, copies: StepCopies) -> None:
        """Record that a step has copied: filled slots have their content, and the references of its copies end. Those
        of its writes pass to the caller."""
        self._slots.mark_written(copies.filled)
        self._slots.free(copies.slots)

    def drop(self) -> list[Write]:
        """Forget the copies of the next step, because it will not be sent, and release their slots. Return its writes,
        which no longer refer to slots."""
        if (copies := self.take()) is None:
            return []
        self._forget(copies)
        self._slots.free(copies.slots)
        return copies.writes

    def lost(self, copies: StepCopies) -> list[Write]:
        """Record that the workers of a sent step were lost, before or after they copied, or while they still do. Keep
        the slots of its copies until `release_lost`. Return its writes, which no longer refer to slots."""
        self._forget(copies)
        self._lost.append(copies)
        return copies.writes

    def _forget(self, copies: StepCopies) -> None:
        """Remove the slots that a step was to fill from the index, and release those that it was to write."""
        self._slots.forget(slot for slot, name in copies.filled if self._slots.name_of(slot) == name)
        self._slots.free(write.slot for write in copies.writes)

    def release_lost(self) -> None:
        """Release the slots of lost steps: their workers have ended."""
        for copies in self._lost:
            self._slots.free(copies.slots)
        self._lost = []
