"""PrefixIndex: the cores to which each prefix was sent, with the age of each entry, counted in tokens sent to the core
since.

A prompt is a chain of keys (prefix_keys.py). A core that has a key also has the keys before it: a prompt is added from
its end to its start, so the earlier keys are always newer, and bisection finds the longest prefix. Knows no loads and
no times.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence

MAX_CORE = (1 << 16) - 1
MAX_ENTRIES = 1 << 20  # pairs of key and core: 130 MB, 134M prompt tokens (engine-launch bench router)
POPULAR = 32  # a key with more holders is held by almost any core


class PrefixIndex:
    """Owner of pairs of key and core, each with a stamp; at most `max_entries`. The least recently sent keys are
    removed first. An entry with one holder, the usual case, is one integer: stamp << 16 | core."""

    def __init__(self, max_entries: int = MAX_ENTRIES) -> None:
        self._max_entries = max_entries
        self._entries: OrderedDict[int, int | dict[int, int]] = OrderedDict()
        self.num_entries = 0

    def add(self, core: int, keys: Sequence[int], stamp: int) -> None:
        """Record that the core was sent a prompt with these keys. stamp: not less than in an earlier call for this
        core."""
        entries, packed = self._entries, stamp << 16 | core
        for key in reversed(keys):
            entry = entries.get(key)
            if entry is None:
                entries[key] = packed
                self.num_entries += 1
                continue
            if type(entry) is dict:
                self.num_entries += core not in entry
                entry[core] = stamp
            elif type(entry) is int and entry & MAX_CORE == core:
                entries[key] = packed
            elif type(entry) is int:
                entries[key] = {entry & MAX_CORE: entry >> 16, core: stamp}
                self.num_entries += 1
            entries.move_to_end(key)
        while self.num_entries > self._max_entries:
            _, entry = entries.popitem(last=False)
            self.num_entries -= len(entry) if type(entry) is dict else 1

    def stamp_of(self, core: int, key: int) -> int:
        """Return the stamp of the core for a key; -1 if it does not have the key."""
        entry = self._entries.get(key, -1)
        if type(entry) is dict:
            return entry.get(core, -1)
        return entry >> 16 if type(entry) is int and entry & MAX_CORE == core else -1

    def depth(self, core: int, keys: Sequence[int], oldest: int, most: int | None = None) -> int:
        """Return how many of the first keys the core has with stamps of at least `oldest`. most: the number of first
        keys to search; None: all."""
        low, high = 0, len(keys) if most is None else most
        if not high or self.stamp_of(core, keys[0]) < oldest:
            return 0
        while low < high:
            middle = (low + high) // 2
            if self.stamp_of(core, keys[middle]) >= oldest:
                low = middle + 1
            else:
                high = middle
        return low

    def longest(self, keys: Sequence[int], oldest: Mapping[int, int], limit: int) -> dict[int, int]:
        """Return up to `limit` cores that have the most of the first keys, each with the number of these keys. oldest:
        the cores to consider, each with the least stamp that counts. Keys with more than POPULAR holders are ignored,
        as they do not distinguish cores."""
        found: dict[int, int] = {}
        end, num_seen = len(keys), 0  # holders of the keys from `end` on are in `found`
        while end and len(found) < limit:
            low, high = 0, end
            while low < high:
                middle = (low + high) // 2
                if self._num_holders(keys[middle]) > num_seen:
                    low = middle + 1
                else:
                    high = middle
            if not low:
                break
            entry = self._entries[keys[low - 1]]
            holders = entry if type(entry) is dict else {entry & MAX_CORE: entry >> 16} if type(entry) is int else {}
            num_seen, end = len(holders), low - 1
            if num_seen > POPULAR:
                break
            for core, stamp in holders.items():
                if core not in found and stamp >= oldest.get(core, stamp + 1) and len(found) < limit:
                    found[core] = low
        return found

    def _num_holders(self, key: int) -> int:
        entry = self._entries.get(key)
        return 0 if entry is None else len(entry) if type(entry) is dict else 1
