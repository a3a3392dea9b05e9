"""Slots of several KV groups share the arena: no byte has two uses, and what a lookup finds is there."""

from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path

import pytest

from tokenloom.core.features.tiers.copy_plan import CopyPlan
from tokenloom.core.features.tiers.peer_pins import PeerPins
from tokenloom.core.features.tiers.slots import Slots, owner_of
from tokenloom.core.kv.block_hash import object_name
from tokenloom.core.kv.block_record import BlockRecord
from tokenloom.ipc.codec import decode_ids
from tokenloom.ipc.messages.tier import PinBlocks
from tokenloom.ipc.process.arena import PAGE, ArenaShape
from tokenloom.tests.support.today import seeds

SHAPE = ArenaShape(4, (1, 4), (4 * PAGE, PAGE))  # a slab has one large slot or four small ones
NUM_KEYS = 24
OWNERS = [0, 0, owner_of("a"), owner_of("b")]


def key_of(number: int) -> bytes:
    return b"%032d" % number


def pages_of(shape: ArenaShape, number: int) -> range:
    """The pages of the arena that a slot has."""
    slab, index = shape.place_of(number)
    group = shape.group_of(number)
    start = slab * shape.slab_bytes + index * shape.stride(group)
    return range(start // PAGE, -(-(start + shape.bytes_of(number)) // PAGE))


def store(slots: Slots, group: int, key: bytes, owner: int = 0) -> int:
    """Give a block a slot that nobody uses afterwards; return its number."""
    number = slots.allocate_for(owner, group)
    assert number is not None
    slots.cache_written(number, key)
    slots.free([number])
    return number


class Core:
    """Fills and uses slots in any order, and looks whether their bytes are those that were written."""

    def __init__(self, seed: int, folder: Path) -> None:
        self.rng = random.Random(seed)
        sizes = [self.rng.choice([1, PAGE, 2 * PAGE + 5, 8 * PAGE]) for _ in range(self.rng.randrange(2, 4))]
        num_slabs = self.rng.randrange(1, 9)
        self.shape = ArenaShape(num_slabs, tuple(8 * PAGE // (-(-size // PAGE) * PAGE) for size in sizes), tuple(sizes))
        self.quota, self.path = self.rng.choice([0.1, 0.4, 1.0]), folder / "slots"
        self.memory: dict[int, tuple[bytes, int]] = {}  # by page: name, and the page's index in the slot
        self.held: list[int] = []  # once for each reference
        self.owners: dict[int, int] = {}  # of held slots, when they were allocated
        self.num_refused = self.num_found = 0
        self.begin()

    def begin(self) -> None:
        """A core starts, with the record of the one before."""
        self.held.clear()
        record = BlockRecord(self.path, self.shape.ids.all_blocks, 1)
        names = [record.key_by_block(group) for group in range(self.shape.num_groups)]
        self.slots = Slots(self.shape, [record], names, self.quota)

    def allocate(self) -> None:
        group, key, owner = (
            self.rng.randrange(self.shape.num_groups),
            key_of(self.rng.randrange(NUM_KEYS)),
            self.draw_owner(),
        )
        if self.slots.lookup(key, group) is not None:
            return
        number = self.slots.allocate_for(owner, group)
        if number is None:
            self.num_refused += 1
            self.check_refusal(owner, group)
            return
        assert self.slots.group_of(number) == group and self.slots.name_of(number) is None
        self.held.append(number)
        self.owners[number] = owner
        if self.rng.random() < 0.5:
            self.slots.cache_block(number, key)
            self.write(number, key)
            if self.rng.random() < 0.9:
                self.slots.mark_written(self.slots.take_pending())
        elif self.rng.random() < 0.8:
            self.write(number, key)
            self.slots.cache_written(number, key)
        assert self.slots.lookup(key, group) in (None, number)

    def draw_owner(self) -> int:
        return self.rng.choice(OWNERS)

    def write(self, number: int, key: bytes) -> None:
        name = object_name(key, self.shape.group_of(number))
        for i, page in enumerate(pages_of(self.shape, number)):
            self.memory[page] = name, i

    def check_refusal(self, owner: int, group: int) -> None:
        """Nobody is refused a slot while there is room beside the slots in use."""
        size, used = self.shape.slot_bytes[group], {*self.held}
        owned_bytes = sum(self.shape.bytes_of(number) for number in used if self.owners[number] == owner)
        most = max(int(self.quota * self.slots.num_bytes), *self.shape.slot_bytes)
        if owner and owned_bytes + size > most:
            return
        slabs = {self.shape.place_of(number)[0] for number in used}
        assert self.shape.num_slabs - len(slabs) < self.shape.num_groups, "each other group keeps a slab at most"

    def free(self) -> None:
        self.rng.shuffle(self.held)
        count = self.rng.randrange(len(self.held) + 1)
        self.slots.free(self.held[:count])
        del self.held[:count]

    def look(self) -> None:
        group, key = self.rng.randrange(self.shape.num_groups), key_of(self.rng.randrange(NUM_KEYS))
        number = self.slots.lookup(key, group)
        assert self.slots.find(object_name(key, group)) == number
        if number is None:
            return
        self.num_found += 1
        assert self.slots.holds(number, key) and self.slots.group_of(number) == group
        content = [self.memory.get(page) for page in pages_of(self.shape, number)]
        assert content == [(object_name(key, group), i) for i in range(len(content))], "other bytes than the slot's"
        if self.rng.random() < 0.3:
            self.slots.touch([number])
            self.owners.setdefault(number, 0)
            self.held.append(number)

    def forget(self) -> None:
        if self.rng.random() < 0.2:
            self.slots.forget_all()
        else:
            found = [
                self.slots.lookup(key_of(self.rng.randrange(NUM_KEYS)), group) for group in range(self.shape.num_groups)
            ]
            self.slots.forget(number for number in found if number is not None)

    def check(self) -> None:
        self.slots.check_invariants([self.held])
        spans = sorted((pages.start, pages.stop) for pages in (pages_of(self.shape, each) for each in {*self.held}))
        assert all(end <= start for (_, end), (start, _) in pairwise(spans)), "two slots in use have the same byte"
        used_bytes = sum(self.shape.bytes_of(number) for number in {*self.held})
        assert self.slots.used_bytes == used_bytes <= self.slots.num_bytes
        assert self.slots.num_used == len({*self.held})


@pytest.mark.parametrize("seed", seeds(4, 196))
def test_any_order_of_operations_keeps_bytes_of_used_slots_disjoint_and_found_content_whole(
    seed: int, tmp_path: Path
) -> None:
    core = Core(seed, tmp_path)
    actions = [core.allocate, core.free, core.look, core.forget, core.begin]
    for action in core.rng.choices(actions, [50, 12, 60, 1, 1], k=1500):
        action()
        core.check()
    assert core.num_found, "the test looks at nothing"


def test_a_tenant_at_its_quota_loses_its_oldest_slots_of_any_group_and_nobody_elses() -> None:
    slots, a = Slots(SHAPE, quota=0.5), owner_of("a")  # 8 pages for a tenant
    store(slots, 0, key_of(0), a)
    for number in range(1, 5):
        store(slots, 1, key_of(number), a)
    store(slots, 1, key_of(9))
    store(slots, 1, key_of(5), a)
    assert slots.lookup(key_of(0), 0) is None, "the oldest has the bytes of four"
    for number in range(6, 9):
        store(slots, 1, key_of(number), a)
    found = [slots.lookup(key_of(number), 1) is not None for number in range(1, 9)]
    assert found == [True] * 8
    store(slots, 0, key_of(10), a)
    assert [slots.lookup(key_of(number), 1) is not None for number in range(1, 10)] == [False] * 4 + [True] * 5


def test_a_tenant_whose_slots_are_all_in_use_gets_none_and_loses_none() -> None:
    slots, a = Slots(SHAPE, quota=0.5), owner_of("a")
    kept = store(slots, 1, key_of(0), a)
    taken = [slots.allocate_for(a, group) for group in (0, 1, 1, 1)]
    assert None not in taken and slots.allocate_for(a, 0) is None and slots.lookup(key_of(0), 1) == kept
    assert slots.allocate_for(0, 0) is not None


def test_a_tenant_that_gets_no_slot_for_lack_of_slabs_loses_none() -> None:
    slots, a = Slots(SHAPE, quota=0.25), owner_of("a")  # a slab for a tenant
    held = [slots.allocate_for(0, 0) for _ in range(3)]
    for number in range(4):
        store(slots, 1, key_of(number), a)
    assert None not in held and slots.allocate_for(a, 0) is None
    assert all(slots.lookup(key_of(number), 1) is not None for number in range(4))


def test_no_group_takes_the_last_slab_of_another() -> None:
    slots = Slots(SHAPE)
    held = [slots.allocate_for(0, 0) for _ in range(4)]
    assert held[3] is None and None not in held[:3]
    small = [slots.allocate_for(0, 1) for _ in range(5)]
    assert small[4] is None and None not in small[:4]


def test_a_record_of_slots_in_all_slabs_leaves_a_slab_to_each_group() -> None:
    names = [{}, {slot: key_of(slot) for slot in range(SHAPE.ids.num_blocks(1))}]
    slots = Slots(SHAPE, names=names)
    assert slots.allocate_for(0, 0) is not None


def test_the_slots_used_longest_ago_of_all_groups_are_reused_first() -> None:
    slots = Slots(SHAPE)
    for number in range(8):
        store(slots, 1, key_of(number))
    for number in range(8, 10):
        store(slots, 0, key_of(number))
    last = slots.lookup(key_of(0), 1)
    assert last is not None
    slots.touch([last])
    slots.free([last])
    store(slots, 0, key_of(10))
    found = [slots.lookup(key_of(number), 1) is not None for number in range(8)]
    assert found == [True] * 4 + [False] * 4, "the slab with the slot used last stays"
    assert slots.lookup(key_of(8), 0) is not None and slots.lookup(key_of(10), 0) is not None


def test_slots_of_a_slab_that_another_group_gets_do_not_count_for_their_tenant() -> None:
    slots, a = Slots(SHAPE, quota=0.5), owner_of("a")
    for number in range(8):
        store(slots, 1, key_of(number), a)
    held = [slots.allocate_for(0, 0) for _ in range(3)]
    assert None not in held and sum(slots.lookup(key_of(number), 1) is not None for number in range(8)) == 4
    slots.check_invariants([[number for number in held if number is not None]])
    for number in range(10, 14):
        store(slots, 1, key_of(number), a)
    assert all(slots.lookup(key_of(number), 1) is not None for number in range(10, 14))


def test_a_block_has_a_name_in_each_group_and_is_found_by_key_or_name() -> None:
    slots = Slots(SHAPE)
    plan = CopyPlan(slots)
    first, second = plan.store(7, key_of(1), 0, group=0), plan.store(90, key_of(1), 0, group=1)
    assert first is not None and second is not None
    names = [key_of(1), object_name(key_of(1), 1)]
    assert (slots.lookup(key_of(1), 0), slots.lookup(key_of(1), 1)) == (first, second)
    copies = plan.take()
    assert copies is not None and decode_ids(copies.stores).tolist() == [7, first, 90, second]
    assert copies.filled == [(first, names[0]), (second, names[1])]
    pins = PeerPins(slots)
    pinned = pins.pin(PinBlocks(serial=1, keys=b"".join([names[1], key_of(2), names[0]])))
    assert decode_ids(pinned.slots).tolist() == [second, -1, first]
    pins.clear()
    plan.lost(copies)
    assert slots.find(names[0]) is None and slots.find(names[1]) is None, "a lost step has not filled them"


def test_an_added_observer_follows_the_first_group_alone() -> None:
    class Names:
        def __init__(self) -> None:
            self.seen: list[tuple[int, bytes]] = []

        def written(self, group: int, block: int, key: bytes) -> None:
            self.seen.append((group, key))

        def evicted(self, group: int, block: int, key: bytes, *, is_demoted: bool = False) -> None: ...

        def forgotten(self, group: int, block: int, key: bytes) -> None: ...

        def cleared(self, group: int) -> None: ...

    slots, names = Slots(SHAPE), Names()
    slots.add_observer(names)
    store(slots, 1, key_of(1))
    store(slots, 0, key_of(2))
    assert names.seen == [(0, key_of(2))] and slots.keys == [key_of(2)]
