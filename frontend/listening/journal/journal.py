"""HttpJournal: the slots of all HTTP connections of one frontend, and the counts of answers that losses cut."""

from __future__ import annotations

import os
import struct
import zlib
from typing import NamedTuple

from .pages import JournalLimits, Pages
from .record import Reason, State
from .slot import Slot

MAX_SLOTS = 1 << 16
_NUM_USED, _NUM_RESUMED, _NUM_CUT = 8, 16, 24  # places of counts in the header; the last is that of reason 0
_NUM_TAKEN = 1024  # place of a count for the supervisor
_COUNT = struct.Struct("<Q")


class Counts(NamedTuple):
    """Answers that were open when a frontend was lost."""

    num_resumed: int
    num_cut: dict[str, int]  # by reason


class HttpJournal:
    """Owner of the slots, in memory that outlives this frontend; `slots` has those of its connections, by number."""

    def __init__(self, fd: int, limits: JournalLimits, version: str) -> None:
        """`fd`: of the memory. `version`: of the program."""
        self.pages, self._version = Pages(fd, limits), zlib.crc32(version.encode())
        self._free: list[Slot] = []
        self.slots: dict[int, Slot] = {}
        for number in range(self._get(_NUM_USED)):
            slot = Slot(self.pages, number, self._version)
            if slot.record.state is State.FREE:
                self._free.append(slot)
            else:
                self.slots[number] = slot

    def open_slot(self, uncovered: Reason = Reason.NONE, connection: int = 0) -> Slot | None:
        """Return a slot for a new connection, which has this number; None if all are in use."""
        slot = self._take_slot()
        if slot is not None:
            slot.open(uncovered, connection)
        return slot

    def open_stream(self, request: bytes, nonce: bytes, created: float) -> Slot | None:
        """Return a slot for a stream that outlives its connections; None if there is no room."""
        slot = self._take_slot()
        if slot is None or slot.begin_stream(request, nonce, created):
            return slot
        self.free_slot(slot)
        return None

    def stream_slots(self) -> list[Slot]:
        """Return the slots of streams that outlive their connections."""
        return [slot for slot in self.slots.values() if slot.record.state is State.STREAM]

    def _take_slot(self) -> Slot | None:
        number = self._get(_NUM_USED)
        if self._free:
            slot = self._free.pop()
        elif number < self.pages.limits.num_slots:
            slot = Slot(self.pages, number, self._version)
            self._set(_NUM_USED, number + 1)
        else:
            return None
        self.slots[slot.number] = slot
        return slot

    def free_slot(self, slot: Slot) -> None:
        """Free the slot of a connection or a stream that has ended."""
        slot.free()
        del self.slots[slot.number]
        self._free.append(slot)

    def is_of_this_version(self, slot: Slot) -> bool:
        """Return whether a slot's request was begun by this version of the program."""
        return slot.record.version == self._version

    def count_taken(self) -> None:
        """Count a new connection that was received from the supervisor."""
        self._set(_NUM_TAKEN, self._get(_NUM_TAKEN) + 1)

    def count_resumed(self) -> None:
        """Count an open answer that goes on after a loss."""
        self._set(_NUM_RESUMED, self._get(_NUM_RESUMED) + 1)

    def count_cut(self, reason: Reason) -> None:
        """Count an open answer that does not."""
        place = _NUM_CUT + reason * _COUNT.size
        self._set(place, self._get(place) + 1)

    def _get(self, place: int) -> int:
        count: int = _COUNT.unpack_from(self.pages.memory, place)[0]
        return count

    def _set(self, place: int, count: int) -> None:
        _COUNT.pack_into(self.pages.memory, place, count)


def read_num_taken(fd: int) -> int:
    """Return the number of connections that were received, from memory that this process has not mapped."""
    found = os.pread(fd, _COUNT.size, _NUM_TAKEN)
    return int.from_bytes(found, "little")


def read_counts(fd: int) -> Counts:
    """Return the counts in memory that this process has not mapped."""
    size = _NUM_CUT + len(Reason) * _COUNT.size
    header = os.pread(fd, size, 0).ljust(size, b"\0")
    num_cut = {}
    for reason in Reason:
        if reason is not Reason.NONE:
            (num_cut[reason.name.lower()],) = _COUNT.unpack_from(header, _NUM_CUT + reason * _COUNT.size)
    return Counts(_COUNT.unpack_from(header, _NUM_RESUMED)[0], num_cut)
