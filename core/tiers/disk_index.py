"""DiskIndex: which objects are on a disk, in the order of their last use, and how many bytes all objects take.

Bytes are reserved before a file is written and released after a file is removed, so that no write makes the files of a
folder exceed the limit. Objects of other namespaces count, too, and are removed first. Does no I/O; any thread may call
it.
"""

from __future__ import annotations

import heapq
import math
import threading
from collections import Counter, OrderedDict
from collections.abc import Sequence
from operator import itemgetter
from typing import NamedTuple

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


class DiskIndex:
    """Index of the objects on a disk.

    Invariants: `held_bytes` ≤ `max_bytes` once the folder was scanned and `excess` returns None; the objects of an
    owner other than 0 take at most `quota` × `max_bytes`."""

    def __init__(self, object_bytes: int, max_bytes: int, quota: float = 1.0) -> None:
        """`object_bytes`: the size of each object's file; `quota`: the largest share of the bytes for one owner."""
        self.object_bytes, self.max_bytes = object_bytes, max_bytes
        self.held_bytes = 0
        self._max_owned = int(max_bytes * quota) // object_bytes
        self._lock = threading.Lock()
        self._stamps: OrderedDict[bytes, int] = OrderedDict()  # last use as in the file, unix seconds; oldest use first
        self._owners: dict[bytes, int] = {}  # by key, for owners other than 0
        self._owned: dict[int, OrderedDict[bytes, None]] = {}  # keys by owner other than 0; oldest use first
        self._num_owned: Counter[int] = Counter()  # by owner, including objects that are being written
        self._foreign: list[tuple[float, str, int]] = []  # heap of (time of last use, path, bytes)
        self._num_clears = 0

    # ── reading ──────────────────────────────────────────────────────────────────────────────────────────────────

    def __len__(self) -> int:
        return len(self._stamps)

    def find(self, keys: Sequence[bytes]) -> int:
        """Return how many of the first keys are on the disk without a gap, and count that as their use. The first key
        counts as used last, since the blocks after it are of no use without it."""
        with self._lock:
            count = next((index for index, key in enumerate(keys) if key not in self._stamps), len(keys))
            for key in reversed(keys[:count]):
                self._touch(key)
            return count

    def owner_of(self, key: bytes) -> int | None:
        """Return the owner of an object; None if the object is not on the disk."""
        with self._lock:
            return self._owners.get(key, 0) if key in self._stamps else None

    def wants_stamp(self, key: bytes, now: int) -> bool:
        """Return whether the time in an object's file is too old at `now`, or in the future. If so, it counts as
        updated from now on."""
        with self._lock:
            is_old = key in self._stamps and not 0 <= now - self._stamps[key] < STAMP_S
            if is_old:
                self._stamps[key] = now
            return is_old

    def _touch(self, key: bytes) -> None:
        self._stamps.move_to_end(key)
        if key in self._owners:
            self._owned[self._owners[key]].move_to_end(key)

    # ── scan ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def add(self, files: Sequence[ScannedFile], is_foreign: bool, now: int) -> None:
        """Add files that a scan has found. If room is needed, files of other namespaces (`is_foreign`), of a wrong size
        and with a key that another file has are removed before objects; those of other namespaces last."""
        with self._lock:
            for file in files:
                self.held_bytes += file.num_bytes
                stamp = order_of_use(file.stamp, now)
                if is_foreign or file.num_bytes != self.object_bytes or file.key in self._stamps:
                    heapq.heappush(self._foreign, (stamp if is_foreign else -math.inf, file.path, file.num_bytes))
                else:
                    self._num_owned[file.owner] += 1
                    self._insert(file.key, file.owner, stamp)

    def sort(self) -> None:
        """Sort the objects by their times, after a scan."""
        with self._lock:
            self._stamps = OrderedDict(sorted(self._stamps.items(), key=itemgetter(1)))
            for owner, keys in self._owned.items():
                self._owned[owner] = OrderedDict.fromkeys(sorted(keys, key=self._stamps.__getitem__))

    def excess(self) -> Victim | None:
        """Return an object to remove because a limit is exceeded; None if no limit is. NoRoom if nothing is left to
        remove."""
        with self._lock:
            if self.held_bytes > self.max_bytes:
                return self._choose()
            owner, count = max(
                ((owner, self._num_owned[owner]) for owner in self._owned), key=lambda item: item[1], default=(0, 0)
            )
            return self._oldest_of(owner) if count > self._max_owned else None

    # ── writing ──────────────────────────────────────────────────────────────────────────────────────────────────

    def reserve(self, owner: int) -> Victim | int:
        """Reserve the bytes of one object, and return a ticket for `commit`; or return an object to remove first.
        NoRoom if there is nothing to remove."""
        with self._lock:
            if owner and self._num_owned[owner] >= self._max_owned:
                return self._oldest_of(owner)
            if self.held_bytes + self.object_bytes > self.max_bytes:
                return self._choose()
            self.held_bytes += self.object_bytes
            self._num_owned[owner] += 1
            return self._num_clears

    def commit(self, key: bytes, owner: int, ticket: int, now: int) -> bool:
        """Let lookups find an object that was written, and return True. If everything was cleared since `reserve`, or
        another thread has written the same object, return False and change nothing."""
        with self._lock:
            if ticket != self._num_clears or key in self._stamps:
                return False
            self._insert(key, owner, now)
            return True

    def cancel(self, owner: int) -> None:
        """Release the reserved bytes of an object that was not written."""
        with self._lock:
            self.held_bytes -= self.object_bytes
            self._num_owned[owner] -= 1

    def release(self, num_bytes: int) -> None:
        """Release the bytes of a file that was removed."""
        with self._lock:
            self.held_bytes -= num_bytes

    def discard(self, key: bytes) -> Victim | None:
        """Remove an object from lookups, and return it as the victim to remove; None if no lookup finds it."""
        with self._lock:
            return self._take(key) if key in self._stamps else None

    def put_back(self, victim: Victim, now: int) -> None:
        """Add a victim again, because its file could not be removed."""
        with self._lock:
            if victim.path:
                heapq.heappush(self._foreign, (now, victim.path, victim.num_bytes))
            else:
                self._num_owned[victim.owner] += 1
                self._insert(victim.key, victim.owner, now)

    def clear(self) -> list[Victim]:
        """Return all objects of the namespace, for removal. Objects that are being written can no longer be
        committed."""
        with self._lock:
            self._num_clears += 1
            return [self._take(key) for key in list(self._stamps)]

    def _insert(self, key: bytes, owner: int, stamp: int) -> None:
        self._stamps[key] = stamp
        if owner:
            self._owners[key] = owner
            self._owned.setdefault(owner, OrderedDict())[key] = None

    def _choose(self) -> Victim:
        if self._foreign:
            _, path, num_bytes = heapq.heappop(self._foreign)
            return Victim(num_bytes, path=path)
        if not self._stamps:
            raise NoRoom
        return self._take(next(iter(self._stamps)))

    def _oldest_of(self, owner: int) -> Victim:
        if not self._owned.get(owner):
            raise NoRoom
        return self._take(next(iter(self._owned[owner])))

    def _take(self, key: bytes) -> Victim:
        del self._stamps[key]
        owner = self._owners.pop(key, 0)
        if owner:
            del self._owned[owner][key]
            if not self._owned[owner]:
                del self._owned[owner]
        self._num_owned[owner] -= 1
        return Victim(self.object_bytes, key, owner)
