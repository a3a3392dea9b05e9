"""AdapterTable: which adapter is in each of the workers' slots.

Rows may use a slot when every rank has filled it. It is filled with another adapter only when no row and no step in
flight uses it. If a fill fails on a rank or takes too long, the slot is spoiled until every rank has answered, since
some ranks may still write into it. Knows no requests and no queue.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from ....ipc.messages.adapter import NO_SLOT, AdapterRef, FillSlot, SlotContent
from ....ipc.messages.base import Rank


class SlotState(Enum):
    EMPTY = auto()
    FILLING = auto()
    READY = auto()
    CLOSED = auto()  # as READY, but it admits no rows
    SPOILED = auto()


LEGAL_MOVES = {
    (SlotState.EMPTY, SlotState.FILLING),
    (SlotState.EMPTY, SlotState.READY),  # adopted from an earlier core
    (SlotState.FILLING, SlotState.READY),  # every rank has filled it
    (SlotState.FILLING, SlotState.SPOILED),  # a rank failed, or the fill takes too long
    (SlotState.SPOILED, SlotState.EMPTY),  # every rank has answered
    (SlotState.READY, SlotState.FILLING),  # with another adapter
    (SlotState.READY, SlotState.CLOSED),
    (SlotState.CLOSED, SlotState.READY),  # no adapter needs it any more
    (SlotState.CLOSED, SlotState.FILLING),
}
HOLDS_CONTENT = (SlotState.READY, SlotState.CLOSED)


@dataclass(eq=False)
class AdapterSlot:
    """One slot. `digest`: the digest of the adapter that the slot holds or is being filled with; that of a failed fill
    until every rank has answered; else empty."""

    number: int
    state: SlotState = SlotState.EMPTY
    digest: bytes = b""
    num_rows: int = 0  # rows that use it
    used_until: int = 0  # no step after this one has a row of it, if `num_rows` is 0; also the order of last use
    fill_step: int = 0  # number of the step with its FillSlot
    ranks_left: set[Rank] = field(default_factory=set)  # ranks that have not answered the FillSlot
    begun_at: float = 0.0  # when the fill started, by the clock

    def move(self, state: SlotState) -> None:
        """Change state; an illegal move raises and changes nothing."""
        if (self.state, state) not in LEGAL_MOVES:
            raise AssertionError(f"slot {self.number}: {self.state.name} → {state.name} is not a legal move")
        self.state = state

    def is_free(self, last_done: int) -> bool:
        """Return whether the slot may be filled, if all steps up to `last_done` are done."""
        is_unused = self.num_rows == 0 and self.used_until <= last_done
        return is_unused if self.state in HOLDS_CONTENT else self.state is SlotState.EMPTY


class AdapterTable:
    """Owner of the slots 1 … num_slots. Invariant: no two slots hold, or are filled with, the same adapter."""

    def __init__(self, num_slots: int, ranks: Sequence[Rank]) -> None:
        self._num_slots, self._ranks = num_slots, ranks
        self.reset()

    def reset(self) -> None:
        """Empty all slots: the workers hold no adapters and answer no FillSlot any more. No row may use a slot."""
        self.slots = [AdapterSlot(number) for number in range(NO_SLOT + 1, NO_SLOT + 1 + self._num_slots)]
        self.filling: list[AdapterSlot] = []  # in the order of their fills
        self._slot_by_digest: dict[bytes, AdapterSlot] = {}

    def adopt(self, contents: Iterable[SlotContent]) -> None:
        """Record that all ranks hold these adapters, loaded for an earlier core. The table must be empty."""
        for content in contents:
            if NO_SLOT < content.slot <= self._num_slots and content.digest not in self._slot_by_digest:
                slot = self.slot(content.slot)
                slot.move(SlotState.READY)
                slot.digest = content.digest
                self._slot_by_digest[slot.digest] = slot

    def slot(self, number: int) -> AdapterSlot:
        return self.slots[number - NO_SLOT - 1]

    def find(self, digest: bytes) -> AdapterSlot | None:
        """Return the slot that holds an adapter or is being filled with it; None if there is none."""
        return self._slot_by_digest.get(digest)

    def count(self, state: SlotState) -> int:
        return sum(slot.state is state for slot in self.slots)

    def fill(self, slot: AdapterSlot, adapter: AdapterRef, step: int, now: float, num_waiting: int = 1) -> FillSlot:
        """Start to fill a free slot; return the order for the workers, to be sent with `step`. now: by the clock.
        num_waiting: adapters that wait for a slot, this one included."""
        assert slot.num_rows == 0 and adapter.digest not in self._slot_by_digest, "the slot is used, or not needed"
        slot.move(SlotState.FILLING)
        self.filling.append(slot)
        self._slot_by_digest.pop(slot.digest, None)
        self._slot_by_digest[adapter.digest] = slot
        slot.digest = adapter.digest
        slot.fill_step = slot.used_until = step
        slot.ranks_left, slot.begun_at = set(self._ranks), now
        return FillSlot(slot=slot.number, digest=adapter.digest, folder=adapter.folder, num_waiting=num_waiting)

    def slot_of(self, number: int, step: int, rank: Rank) -> AdapterSlot | None:
        """Return the slot to which a rank's answer to the FillSlot of `step` belongs; None if no answer is expected."""
        slot = self.slot(number) if NO_SLOT < number <= self._num_slots else None
        return slot if slot is not None and slot.fill_step == step and rank in slot.ranks_left else None

    def answer(self, slot: AdapterSlot, rank: Rank) -> None:
        """Record that a rank has answered. After the last answer the slot is ready, or empty if it was spoiled."""
        slot.ranks_left.remove(rank)
        if not slot.ranks_left and slot.state is SlotState.FILLING:
            slot.move(SlotState.READY)
            self.filling.remove(slot)
        elif not slot.ranks_left:
            slot.move(SlotState.EMPTY)
            slot.digest = b""

    def spoil(self, slot: AdapterSlot) -> None:
        """Record that a fill has failed, before the last rank has answered."""
        slot.move(SlotState.SPOILED)
        self.filling.remove(slot)
        del self._slot_by_digest[slot.digest]

    def check_invariants(self, digests_of_rows: Iterable[tuple[int, bytes]]) -> None:
        """Raise AssertionError unless the slots agree with `digests_of_rows`: slot and adapter of each running row."""
        rows = Counter(digests_of_rows)
        for slot in self.slots:
            assert slot.num_rows == rows.pop((slot.number, slot.digest), 0), "the rows of a slot are miscounted"
            assert slot.num_rows == 0 or slot.state in HOLDS_CONTENT
            assert bool(slot.ranks_left) == (slot.state in (SlotState.FILLING, SlotState.SPOILED))
        assert not rows, "a row's slot does not hold its adapter"
        assert set(self.filling) == {slot for slot in self.slots if slot.state is SlotState.FILLING}
        named = {slot.digest: slot for slot in self.slots if slot.state in (*HOLDS_CONTENT, SlotState.FILLING)}
        assert named == self._slot_by_digest, "an adapter is not found, or in two slots"
        assert len(named) + self.count(SlotState.EMPTY) + self.count(SlotState.SPOILED) == self._num_slots
