"""Slots: the arena as a cache of blocks by key that evicts the least recently used, with a quota for each tenant."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence

from ...kv.block_pool import BlockObserver, BlockPool


def owner_of(salt: str | None) -> int:
    """Return the number of the tenant with this cache salt; 0 without a salt."""
    return 0 if salt is None else int.from_bytes(hashlib.sha256(salt.encode()).digest()[:8], "little") or 1


class Slots(BlockPool):
    """A pool of slots. A tenant at its quota gets its own least recently used slot; requests without a salt have no
    quota."""

    def __init__(
        self,
        num_slots: int,
        observers: Sequence[BlockObserver] = (),
        key_by_slot: Mapping[int, bytes] | None = None,
        quota: float = 1.0,
    ) -> None:
        """quota: the share of all slots that a tenant may fill. key_by_slot: content that the slots hold already."""
        super().__init__(num_slots + 1, observers, key_by_slot)
        self.num_slots = num_slots
        self._max_owned = max(int(quota * num_slots), 1)
        self._owner_by_slot: dict[int, int] = {}  # of slots with an owner
        self._num_owned: Counter[int] = Counter()

    def allocate_for(self, owner: int) -> int | None:
        """Allocate a slot for a tenant; its former content leaves the index. Return None if all slots that the tenant
        may have are in use."""
        if owner and self._num_owned[owner] >= self._max_owned:
            oldest = next((slot for slot in self._free if self._owner_by_slot.get(slot) == owner), None)
            if oldest is None:
                return None
            self._free.move_to_end(oldest, last=False)
        slots = self.allocate(1)
        if slots is None:
            return None
        if (former := self._owner_by_slot.pop(slots[0], 0)) != 0:
            self._num_owned[former] -= 1
        if owner:
            self._owner_by_slot[slots[0]] = owner
            self._num_owned[owner] += 1
        return slots[0]
