"""DiskIndex: which objects are on a disk, in the order of their last use, and how many bytes all objects take.

Objects may have several sizes: `num_bytes` is that of an object's file. Bytes are reserved before a file is written and
released after a file is removed, so that no write makes the files of a folder exceed the limit. Objects of other
namespaces count, too, and are removed first. Does no I/O; any thread may call it.
"""

from __future__ import annotations

import heapq
import math
import threading
from collections import Counter, OrderedDict
from collections.abc import Collection, Sequence
from typing import NamedTuple

import msgspec

from ...ipc.process.awake_clock import order_of_use
from .disk_scan import ScannedFile

STAMP_S = 60  # seconds in which a file's time of last use is written at most once


class NoRoom(Exception):
    """Error: the limit of the folder or the quota of the owner has no room for one more object, and nothing is left to
    remove."""


class Victim(NamedTuple):
    """Object to remove. Lookups no longer find it, but its bytes count until `release`."""

    num_bytes: int
    key: bytes = b""  # empty: a file of another namespace
    owner: int = 0
    path: str = ""  # path of a file of another namespace


class Reserved(NamedTuple):
    """Bytes that are reserved for an object of an owner."""

    owner: int
    num_bytes: int
    num_clears: int  # of the index until then


class _Object(msgspec.Struct, frozen=True, gc=False):
    """Object that lookups find."""

    stamp: int  # last use as in the file, unix seconds
    owner: int
    num_bytes: int


class DiskIndex:
    """Index of the objects on a disk.

    Invariants: `held_bytes` ≤ `max_bytes` once the folder was scanned and `excess` returns None; the objects of an
    owner other than 0 take at most `quota` × `max_bytes`."""

    def __init__(self, sizes: Collection[int], max_bytes: int, quota: float = 1.0) -> None:
        """`sizes`: those that objects may have; `quota`: the largest share of the bytes for one owner."""
        self.max_bytes, self.held_bytes = max_bytes, 0
        self._sizes, self._max_owned = frozenset(sizes), int(max_bytes * quota)
        self._lock = threading.Lock()
        self._objects: OrderedDict[bytes, _Object] = OrderedDict()  # by key; oldest use first
        self._owned: dict[int, OrderedDict[bytes, None]] = {}  # keys by owner other than 0; oldest use first
        self._owned_bytes: Counter[int] = Counter()  # by owner other than 0, with objects that are being written
        self._foreign: list[tuple[float, str, int]] = []  # heap of (time of last use, path, bytes)
        self._num_clears = 0

    # ── reading ──────────────────────────────────────────────────────────────────────────────────────────────────

    def __len__(self) -> int:
        return len(self._objects)

    def find(self, keys: Sequence[bytes], num_bytes: int) -> int:
        """Return how many of the first keys are on the disk without a gap, as objects of `num_bytes`, and count that as
        their use. The first key counts as used last, since the blocks after it are of no use without it."""
        with self._lock:
            count = next((index for index, key in enumerate(keys) if not self._has(key, num_bytes)), len(keys))
            for key in reversed(keys[:count]):
                self._touch(key)
            return count

    def contains(self, keys: Sequence[bytes], num_bytes: int) -> list[bool]:
        """Return for each key whether it is on the disk, as an object of `num_bytes`; that is no use of it."""
        with self._lock:
            return [self._has(key, num_bytes) for key in keys]

    def _has(self, key: bytes, num_bytes: int) -> bool:
        found = self._objects.get(key)
        return found is not None and found.num_bytes == num_bytes

    def owner_of(self, key: bytes) -> int | None:
        """Return the owner of an object; None if the object is not on the disk."""
        with self._lock:
            return self._objects[key].owner if key in self._objects else None

    def wants_stamp(self, key: bytes, now: int) -> bool:
        """Return whether the time in an object's file is too old at `now`, or in the future. If so, it counts as
        updated from now on."""
        with self._lock:
            is_old = key in self._objects and not 0 <= now - self._objects[key].stamp < STAMP_S
            if is_old:
                self._objects[key] = msgspec.structs.replace(self._objects[key], stamp=now)
            return is_old

    def _touch(self, key: bytes) -> None:
        self._objects.move_to_end(key)
        if owner := self._objects[key].owner:
            self._owned[owner].move_to_end(key)

    # ── scan ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def add(self, files: Sequence[ScannedFile], is_foreign: bool, now: int) -> None:
        """Add files that a scan has found. If room is needed, files of other namespaces (`is_foreign`), of a size that
        no object has and with a key that another file has are removed before objects; those of other namespaces
        last."""
        with self._lock:
            for file in files:
                self.held_bytes += file.num_bytes
                stamp = order_of_use(file.stamp, now)
                if is_foreign or file.num_bytes not in self._sizes or file.key in self._objects:
                    heapq.heappush(self._foreign, (stamp if is_foreign else -math.inf, file.path, file.num_bytes))
                else:
                    self._count_owned(file.owner, file.num_bytes)
                    self._insert(file.key, _Object(stamp, file.owner, file.num_bytes))

    def sort(self) -> None:
        """Sort the objects by their times, after a scan."""
        with self._lock:
            self._objects = OrderedDict(sorted(self._objects.items(), key=lambda item: item[1].stamp))
            for owner, keys in self._owned.items():
                self._owned[owner] = OrderedDict.fromkeys(sorted(keys, key=lambda key: self._objects[key].stamp))

    def excess(self) -> Victim | None:
        """Return an object to remove because a limit is exceeded; None if no limit is. NoRoom if nothing is left to
        remove."""
        with self._lock:
            if self.held_bytes > self.max_bytes:
                return self._choose()
            owner = max(self._owned, key=self._owned_bytes.__getitem__, default=0)
            return self._oldest_of(owner) if owner and self._owned_bytes[owner] > self._max_owned else None

    # ── writing ──────────────────────────────────────────────────────────────────────────────────────────────────

    def reserve(self, owner: int, num_bytes: int) -> Victim | Reserved:
        """Reserve the bytes of an object for `commit` or `cancel`; or return an object to remove first. NoRoom if there
        is nothing to remove, or if the object alone exceeds a limit."""
        with self._lock:
            if num_bytes > self.max_bytes or (owner and num_bytes > self._max_owned):
                raise NoRoom
            if owner and self._owned_bytes[owner] + num_bytes > self._max_owned:
                return self._oldest_of(owner)
            if self.held_bytes + num_bytes > self.max_bytes:
                return self._choose()
            self.held_bytes += num_bytes
            self._count_owned(owner, num_bytes)
            return Reserved(owner, num_bytes, self._num_clears)

    def commit(self, key: bytes, reserved: Reserved, now: int) -> bool:
        """Let lookups find an object that was written, and return True. If everything was cleared since `reserve`, or
        another thread has written the same object, return False and change nothing."""
        with self._lock:
            if reserved.num_clears != self._num_clears or key in self._objects:
                return False
            self._insert(key, _Object(now, reserved.owner, reserved.num_bytes))
            return True

    def cancel(self, reserved: Reserved) -> None:
        """Release the reserved bytes of an object that was not written."""
        with self._lock:
            self.held_bytes -= reserved.num_bytes
            self._count_owned(reserved.owner, -reserved.num_bytes)

    def release(self, num_bytes: int) -> None:
        """Release the bytes of a file that was removed."""
        with self._lock:
            self.held_bytes -= num_bytes

    def discard(self, key: bytes) -> Victim | None:
        """Remove an object from lookups, and return it as the victim to remove; None if no lookup finds it."""
        with self._lock:
            return self._take(key) if key in self._objects else None

    def put_back(self, victim: Victim, now: int) -> None:
        """Add a victim again, because its file could not be removed."""
        with self._lock:
            if victim.path:
                heapq.heappush(self._foreign, (now, victim.path, victim.num_bytes))
            else:
                self._count_owned(victim.owner, victim.num_bytes)
                self._insert(victim.key, _Object(now, victim.owner, victim.num_bytes))

    def clear(self) -> list[Victim]:
        """Return all objects of the namespace, for removal. Objects that are being written can no longer be
        committed."""
        with self._lock:
            self._num_clears += 1
            return [self._take(key) for key in list(self._objects)]

    def _count_owned(self, owner: int, num_bytes: int) -> None:
        if owner:
            self._owned_bytes[owner] += num_bytes

    def _insert(self, key: bytes, added: _Object) -> None:
        self._objects[key] = added
        if added.owner:
            self._owned.setdefault(added.owner, OrderedDict())[key] = None

    def _choose(self) -> Victim:
        if self._foreign:
            _, path, num_bytes = heapq.heappop(self._foreign)
            return Victim(num_bytes, path=path)
        if not self._objects:
            raise NoRoom
        return self._take(next(iter(self._objects)))

    def _oldest_of(self, owner: int) -> Victim:
        if not self._owned.get(owner):
            raise NoRoom
        return self._take(next(iter(self._owned[owner])))

    def _take(self, key: bytes) -> Victim:
        removed = self._objects.pop(key)
        owner, num_bytes = removed.owner, removed.num_bytes
        if owner:
            del self._owned[owner][key]
            if not self._owned[owner]:
                del self._owned[owner]
        self._count_owned(owner, -num_bytes)
        return Victim(num_bytes, key, owner)
