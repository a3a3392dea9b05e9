"""Slots: the arena as a cache of blocks that evicts the least recently used, with a quota for each tenant.

Each KV group has a pool of slots, and the groups share the arena's slabs as they share those of the KV pool. A slot is
named by its number (ArenaShape), and its content by the name of the block's object (block_hash.object_name), which the
indexes hold. Keys are those of the blocks, the same for all groups. Knows no blocks of the KV pool.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from heapq import merge

from ....ipc.process.arena import ArenaShape
from ...kv.block_hash import object_name
from ...kv.block_pool import BlockObserver, BlockPool
from ...kv.slab_pool import SlabPool
from ...kv.slabs import Memory, Slabs, WholePool


def owner_of(salt: str | None) -> int:
    """Return the number of the tenant with this cache salt; 0 without a salt."""
    return 0 if salt is None else int.from_bytes(hashlib.sha256(salt.encode()).digest()[:8], "little") or 1


class Slots:
    """Owner of the pools of slots, and of the bytes that each tenant has.

    A tenant has the slots that were allocated for it, until they are free and without content. At its quota its own
    least recently used slots make room; requests without a salt have no quota."""

    def __init__(
        self,
        shape: ArenaShape,
        observers: Sequence[BlockObserver] = (),
        names: Sequence[dict[int, bytes]] | None = None,
        quota: float = 1.0,
    ) -> None:
        """observers: of the slots of all groups. names: by group, the names of what slots hold already. quota: the
        share of the arena that a tenant may fill."""
        self._shape, self._num_groups = shape, shape.num_groups
        self.slot_bytes = shape.slot_bytes
        self.num_bytes = shape.num_slabs * max(
            count * size for count, size in zip(shape.slots_of_slab, shape.slot_bytes, strict=True)
        )
        self._owner_by_number: dict[int, int] = {}  # of slots with an owner
        self._owned_bytes: Counter[int] = Counter()
        self._pools: Sequence[BlockPool]
        self._memory: Memory
        observers = [self, *observers]  # content of `names` may be evicted at once, for the floors
        if self._num_groups == 1:
            self._pools = [BlockPool(shape.ids.num_slabs, observers, None if names is None else names[0])]
            self._memory = WholePool(self._pools[0], shape.slot_bytes[0])
        else:
            self._pools = pools = [SlabPool(shape.ids, observers, group) for group in range(self._num_groups)]
            floor = int(shape.num_slabs >= self._num_groups)  # no group takes all
            self._memory = Slabs(shape.ids, pools, [floor] * self._num_groups, names)
        self._one_of = [[int(group == each) for each in range(self._num_groups)] for group in range(self._num_groups)]
        self._max_owned_bytes = max(int(quota * self.num_bytes), *shape.slot_bytes)

    # ── sizes ────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def num_slots(self) -> int:
        """The most slots that there can be at a time: all, if there is one group."""
        return self._shape.num_slabs * max(self._shape.slots_of_slab)

    @property
    def num_used(self) -> int:
        """The number of slots that are referenced."""
        return sum(pool.num_used for pool in self._pools)

    @property
    def used_bytes(self) -> int:
        return sum(pool.num_used * size for pool, size in zip(self._pools, self.slot_bytes, strict=True))

    @property
    def num_filled(self) -> int:
        """The number of slots with content that lookups find."""
        return sum(pool.num_cached for pool in self._pools)

    @property
    def filled_bytes(self) -> int:
        return sum(pool.num_cached * size for pool, size in zip(self._pools, self.slot_bytes, strict=True))

    def group_of(self, number: int) -> int:
        """Return the KV group of a slot."""
        return number % self._num_groups

    def bytes_of(self, number: int) -> int:
        """Return the size of a slot. The sizes by group are `slot_bytes`."""
        return self.slot_bytes[number % self._num_groups]

    # ── content ──────────────────────────────────────────────────────────────────────────────────────────────────

    def lookup(self, key: bytes, group: int = 0) -> int | None:
        """Return the slot with this block of a group, without adding a reference; None if there is none."""
        slot = self._pools[group].lookup(object_name(key, group) if group else key)
        return None if slot is None else slot * self._num_groups + group

    def find(self, name: bytes) -> int | None:
        """Return the slot with the content of this name; see `lookup`."""
        for group, pool in enumerate(self._pools):
            if (slot := pool.lookup(name)) is not None:
                return slot * self._num_groups + group
        return None

    def holds(self, number: int, key: bytes) -> bool:
        """Return whether the slot has the block with this key."""
        return self.name_of(number) == object_name(key, number % self._num_groups)

    def name_of(self, number: int) -> bytes | None:
        """Return the name of the slot's content; None if lookups do not find any."""
        slot, group = divmod(number, self._num_groups)
        return self._pools[group].key_of(slot)

    def cache_block(self, number: int, key: bytes) -> None:
        """Let lookups find the block with this key in the slot, which the next step fills, unless another slot has
        it."""
        slot, group = divmod(number, self._num_groups)
        self._pools[group].cache_block(slot, object_name(key, group))

    def cache_written(self, number: int, key: bytes) -> None:
        """Let lookups find the block with this key in the slot, which has it already, unless another slot has it."""
        slot, group = divmod(number, self._num_groups)
        self._pools[group].cache_written(slot, object_name(key, group))

    def take_pending(self) -> list[tuple[int, bytes]]:
        """Return the slots that were given content with `cache_block` since the last call, with its names. Once the
        step that fills them is done, pass them to `mark_written`."""
        return self._memory.take_pending()

    def mark_written(self, filled: list[tuple[int, bytes]]) -> None:
        """Report to the observers that these slots have their content."""
        self._memory.mark_written(filled)

    def forget(self, numbers: Iterable[int]) -> None:
        """Let no lookup find the content of these slots. Free ones among them are reused before all others."""
        for number in numbers:
            slot, group = divmod(number, self._num_groups)
            self._pools[group].forget((slot,))

    def forget_all(self) -> None:
        """Let no lookup find any content."""
        for pool in self._pools:
            pool.forget_all()

    # ── references ───────────────────────────────────────────────────────────────────────────────────────────────

    def ref_count(self, number: int) -> int:
        """Return the number of references to the slot."""
        slot, group = divmod(number, self._num_groups)
        return self._pools[group].ref_count(slot)

    def touch(self, numbers: Iterable[int]) -> None:
        """Add a reference to each of the slots, which `lookup` has found."""
        for number in numbers:
            slot, group = divmod(number, self._num_groups)
            self._pools[group].touch((slot,))

    def free(self, numbers: Iterable[int]) -> None:
        """Remove one reference from each slot. Of free slots with content, those freed first are reused first; slots
        without any are reused before them."""
        self._memory.advance()
        for number in numbers:
            slot, group = divmod(number, self._num_groups)
            pool = self._pools[group]
            pool.free((slot,))
            if not pool.ref_count(slot) and pool.key_of(slot) is None:
                self._disown(number)

    def allocate_for(self, owner: int, group: int = 0) -> int | None:
        """Allocate a slot of a group for a tenant; its former content leaves the index. Return None if all slots that
        the tenant may have are in use."""
        if owner and not self._make_room(owner, group):
            return None
        slots = self._memory.allocate(self._one_of[group])
        if slots is None:
            return None
        number = slots[group][0] * self._num_groups + group
        if owner:
            self._owner_by_number[number] = owner
            self._owned_bytes[owner] += self.slot_bytes[group]
        return number

    def _make_room(self, owner: int, group: int) -> bool:
        """Forget the content of the tenant's least recently used slots, so many that it may have another one of the
        group. Return False, and forget none, if it gets none all the same."""
        excess_bytes = self._owned_bytes[owner] + self.slot_bytes[group] - self._max_owned_bytes
        if excess_bytes <= 0:
            return True
        if self._memory.num_missing(self._one_of[group]) > 0:
            return False
        oldest = list[int]()
        for number in self._oldest_of(owner):
            oldest.append(number)
            excess_bytes -= self.bytes_of(number)
            if excess_bytes <= 0:
                self.forget(oldest)
                return True
        return False

    def _oldest_of(self, owner: int) -> Iterator[int]:
        """Yield the free slots with content that a tenant has, the least recently used first."""
        # Stamps alone decide between groups: within one they rise, and slots with equal ones are in order of reuse.
        by_group = [self._last_uses(owner, group) for group in range(self._num_groups)]
        for _, number in merge(*by_group, key=lambda pair: pair[0]):
            yield number

    def _last_uses(self, owner: int, group: int) -> Iterator[tuple[int, int]]:
        """Yield (stamp of last use, number) of the tenant's free slots of a group with content, in the order of
        reuse."""
        for stamp, slot in self._pools[group].last_uses:
            number = slot * self._num_groups + group
            if self._owner_by_number.get(number) == owner:
                yield stamp, number

    def _disown(self, number: int) -> None:
        if (owner := self._owner_by_number.pop(number, 0)) != 0:
            self._owned_bytes[owner] -= self.bytes_of(number)

    # ── observers ────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def keys(self) -> list[bytes]:
        """The keys of the blocks of the first group that lookups find."""
        return self._pools[0].keys

    def add_observer(self, observer: BlockObserver) -> None:
        """Let an observer follow the slots of the first group, whose names are keys."""
        self._pools[0].add_observer(observer)

    def written(self, group: int, slot: int, name: bytes) -> None:
        pass

    def evicted(self, group: int, slot: int, name: bytes, *, is_demoted: bool = False) -> None:
        self._disown(slot * self._num_groups + group)

    def forgotten(self, group: int, slot: int, name: bytes) -> None:
        if not self._pools[group].ref_count(slot):
            self._disown(slot * self._num_groups + group)

    def cleared(self, group: int) -> None:
        pass

    # ── for tests ────────────────────────────────────────────────────────────────────────────────────────────────

    def check_invariants(self, tables: Iterable[Iterable[int]]) -> None:
        """Raise AssertionError unless `tables` has exactly the references to slots, and no slot of two groups has the
        same byte."""
        self._memory.check_invariants()
        slots_by_group: list[list[int]] = [[] for _ in self._pools]
        for table in tables:
            for number in table:
                slot, group = divmod(number, self._num_groups)
                slots_by_group[group].append(slot)
        for pool, slots in zip(self._pools, slots_by_group, strict=True):
            pool.check_invariants([slots])
        owned_bytes: Counter[int] = Counter()
        for number, owner in self._owner_by_number.items():
            assert self.ref_count(number) or self.name_of(number) is not None, f"slot {number} has an owner in vain"
            owned_bytes[owner] += self.bytes_of(number)
        assert owned_bytes == +self._owned_bytes, "wrong bytes of a tenant"
        assert all(count <= self._max_owned_bytes for count in owned_bytes.values()), "a tenant exceeds its quota"
