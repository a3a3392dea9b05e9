"""A tenant fills its share of the slots at most, and loses its own oldest ones first."""

from __future__ import annotations

from tokenloom.core.features.tiers.slots import Slots, owner_of
from tokenloom.ipc.process.arena import ArenaShape


def fill(slots: Slots, owner: int, names: range) -> list[int]:
    """Store a block of each name; return the slots."""
    taken = []
    for name in names:
        slot = slots.allocate_for(owner)
        assert slot is not None
        slots.cache_written(slot, f"{owner} {name}".encode())
        slots.free([slot])
        taken.append(slot)
    return taken


def held(slots: Slots, owner: int, names: range) -> list[int]:
    return [name for name in names if slots.lookup(f"{owner} {name}".encode()) is not None]


def test_a_tenant_at_its_quota_takes_its_own_oldest_slots() -> None:
    slots, a, b = Slots(ArenaShape(20, (1,), (1,)), quota=0.25), owner_of("a"), owner_of("b")
    fill(slots, 0, range(4))
    fill(slots, b, range(3))
    fill(slots, a, range(100))
    assert held(slots, a, range(100)) == list(range(95, 100))
    assert held(slots, b, range(3)) == [0, 1, 2] and held(slots, 0, range(4)) == [0, 1, 2, 3]


def test_requests_without_a_salt_have_no_quota_and_others_make_room_for_them() -> None:
    slots, a = Slots(ArenaShape(20, (1,), (1,)), quota=0.25), owner_of("a")
    fill(slots, a, range(5))
    fill(slots, 0, range(100))
    assert held(slots, 0, range(100)) == list(range(80, 100)) and not held(slots, a, range(5))
    assert fill(slots, a, range(5)) and held(slots, a, range(5)) == [0, 1, 2, 3, 4]


def test_a_tenant_gets_no_slot_while_all_of_its_share_is_in_use() -> None:
    slots, a = Slots(ArenaShape(20, (1,), (1,)), quota=0.1), owner_of("a")
    first, second = slots.allocate_for(a), slots.allocate_for(a)
    assert first is not None and second is not None and slots.allocate_for(a) is None
    assert slots.allocate_for(0) is not None
    slots.free([first])
    assert slots.allocate_for(a) == first
