"""PeerPins: slots that the tier process reads for other engines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from ....ipc.codec import decode_ids, encode_ids
from ....ipc.messages.tier import PinBlocks, PinnedBlocks
from ...kv.block_hash import KEY_BYTES
from .slots import Slots


class PeerPins:
    """Pins of slots for other engines. Holds one reference to a slot for each time that it was pinned."""

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self._counts: Counter[int] = Counter()

    def pin(self, message: PinBlocks) -> PinnedBlocks:
        """Pin the slots that hold the blocks with these names. Return them in the order of the names, -1 for a block
        that is in no slot."""
        names = (message.keys[i : i + KEY_BYTES] for i in range(0, len(message.keys), KEY_BYTES))
        slots = [self._slots.find(name) or -1 for name in names]
        found = [slot for slot in slots if slot > 0]
        self._slots.touch(found)
        self._counts.update(found)
        return PinnedBlocks(serial=message.serial, slots=encode_ids(slots))

    def unpin(self, frame: bytes) -> None:
        """Remove one pin from each slot in `frame` (int32); skip slots that are not pinned."""
        for slot in decode_ids(frame):
            if self._counts[slot]:
                self._counts[slot] -= 1
                self._slots.free([slot])

    def clear(self) -> None:
        """Remove all pins: the process that reads the slots has ended."""
        self._slots.free(self.references())
        self._counts.clear()

    def references(self) -> Iterable[int]:
        """Return the pinned slots, once for each pin."""
        return list(self._counts.elements())
