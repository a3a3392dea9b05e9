"""Slots that a step was to fill: found once it has ended, never after it was lost, and free when nobody copies."""

from __future__ import annotations

import pytest

from tokenloom.core.features.tiers.copy_plan import CopyPlan
from tokenloom.core.features.tiers.slots import Slots
from tokenloom.core.scheduling.step.step_copies import StepCopies
from tokenloom.ipc.process.arena import ArenaShape

KEY = b"block 5"


@pytest.fixture
def slots() -> Slots:
    return Slots(ArenaShape(4, (1,), (1,)))


def sent_store(slots: Slots) -> tuple[CopyPlan, int, StepCopies]:
    """Return a plan, the slot that it fills and the copies of the step that does so."""
    plan = CopyPlan(slots)
    slot = plan.store(5, KEY, 0)
    copies = plan.take()
    assert slot is not None and copies is not None
    return plan, slot, copies


def test_a_slot_stays_found_and_is_free_once_its_step_has_ended(slots: Slots) -> None:
    plan, slot, copies = sent_store(slots)
    assert slots.ref_count(slot) == 1
    plan.done(copies)
    assert slots.lookup(KEY) == slot and slots.ref_count(slot) == 0


def test_a_slot_of_a_lost_step_is_not_found_and_is_kept_until_its_workers_have_ended(slots: Slots) -> None:
    plan, slot, copies = sent_store(slots)
    assert plan.lost(copies) == []
    assert slots.lookup(KEY) is None
    assert slots.ref_count(slot) == 1 and plan.references() == [slot]
    plan.release_lost()
    assert slots.ref_count(slot) == 0 and plan.references() == []


def test_a_slot_of_a_step_that_is_not_sent_is_neither_found_nor_kept(slots: Slots) -> None:
    plan = CopyPlan(slots)
    slot = plan.store(5, KEY, 0)
    assert slot is not None and plan.drop() == []
    assert slots.lookup(KEY) is None and slots.ref_count(slot) == 0 and not plan
