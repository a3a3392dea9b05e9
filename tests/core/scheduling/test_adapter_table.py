"""The table of slots: adapters from an earlier core, and the legal moves of a slot."""

from __future__ import annotations

import itertools

import pytest

from tokenloom.core.scheduling.adapter_table import LEGAL_MOVES, AdapterSlot, AdapterTable, SlotState
from tokenloom.ipc.messages.adapter import SlotContent
from tokenloom.ipc.messages.base import Rank
from tokenloom.tests.core.fake_adapters import digest_of


def test_a_core_adopts_an_adapter_once_and_only_into_its_own_slots() -> None:
    contents = [(1, 7), (2, 7), (3, 8), (4, 9)]
    table = AdapterTable(3, [Rank(0, 0)])
    table.adopt([SlotContent(slot=slot, digest=digest_of(adapter)) for slot, adapter in contents])
    assert [(slot.state, slot.digest) for slot in table.slots] == [
        (SlotState.READY, digest_of(7)),
        (SlotState.EMPTY, b""),
        (SlotState.READY, digest_of(8)),
    ]
    table.check_invariants([])


def test_an_illegal_move_of_a_slot_raises_and_changes_nothing() -> None:
    for state, other in itertools.product(SlotState, SlotState):
        slot = AdapterSlot(1, state)
        if (state, other) in LEGAL_MOVES:
            slot.move(other)
            assert slot.state is other
        else:
            with pytest.raises(AssertionError, match=f"slot 1: {state.name} → {other.name} is not a legal move"):
                slot.move(other)
            assert slot.state is state
