"""A record is read whole or not at all."""

from __future__ import annotations

import random
import struct
from itertools import pairwise

import msgspec
import pytest

from tokenloom.frontend.listening.journal import record
from tokenloom.frontend.listening.journal.record import BANK_BYTES, NUM_BANKS, Record, State
from tokenloom.tests.support.today import seeds

PLACE = 64


def drawn(draw: random.Random, sequence: int) -> Record:
    return Record(
        sequence=sequence,
        state=draw.choice(list(State)),
        has_head=draw.random() < 0.5,
        losses=draw.randrange(4),
        version=draw.getrandbits(32),
        in_begin=draw.getrandbits(60),
        in_len=draw.getrandbits(40),
        out_begin=draw.getrandbits(60),
        out_end=draw.getrandbits(60),
        tokens_len=draw.getrandbits(32),
        created=draw.random(),
        nonce=draw.randbytes(16),
    )


def blank() -> bytearray:
    return bytearray(PLACE + NUM_BANKS * BANK_BYTES)


def test_an_empty_slot_is_free() -> None:
    assert Record.read(memoryview(blank()), PLACE) == Record(state=State.FREE)


class Packs:
    """A struct that notes the memory before each pack, and the place."""

    def __init__(self, packer: struct.Struct, noted: list[tuple[bytes, int, int]]) -> None:
        self._packer, self._noted, self.size = packer, noted, packer.size
        self.unpack_from = packer.unpack_from

    def pack_into(self, memory: memoryview, place: int, *values: object) -> None:
        self._noted.append((bytes(memory), place, place + self.size))
        self._packer.pack_into(memory, place, *values)


@pytest.mark.parametrize("seed", seeds(2, 20))
def test_a_record_torn_at_any_byte_leaves_the_one_before(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pack clears its bytes, in any order, and then writes them from the first to the last."""
    noted: list[tuple[bytes, int, int]] = []
    for name in ("PROGRESS", "_OTHERS"):
        monkeypatch.setattr(record, name, Packs(getattr(record, name), noted))
    draw, memory, known = random.Random(seed), blank(), Record()
    for sequence in range(8):
        new = drawn(draw, sequence)
        if sequence > 3:  # only the progress is new; the second time both banks have the other fields
            new = msgspec.structs.replace(known, out_end=draw.getrandbits(60), num_events=draw.getrandbits(32))
        noted.clear()
        write = new.write_progress if sequence > 4 else new.write
        write(memoryview(memory), PLACE)
        states = [*noted, (bytes(memory), 0, 0)]
        for (before, begin, end), (after, *_) in pairwise(states):
            for cut in range(begin, end + 1):
                written = after[:cut] + bytes(end - cut) + before[end:]
                cleared = before[:begin] + bytes(cut - begin) + before[cut:]
                cleared_back = before[:cut] + bytes(end - cut) + before[end:]
                for torn in (cleared, cleared_back, written):
                    assert Record.read(memoryview(torn), PLACE) in (known, new)
        assert Record.read(memoryview(memory), PLACE) == new
        known = new


def test_only_moves_of_the_table_are_legal() -> None:
    fresh = Record()
    with pytest.raises(AssertionError, match="FREE cannot become OPEN"):
        fresh.move(State.OPEN)
    assert fresh.state is State.FREE
