"""A record is read whole or not at all."""

from __future__ import annotations

import random

import pytest

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


@pytest.mark.parametrize("seed", seeds(2, 20))
def test_a_record_torn_at_any_byte_leaves_the_one_before(seed: int) -> None:
    """Packing clears a record, in any order, and then writes it from its first byte to its last."""
    draw, memory = random.Random(seed), blank()
    known = Record()
    for sequence in range(4):
        before, new = bytes(memory), drawn(draw, sequence)
        new.write(memoryview(memory), PLACE)
        after = bytes(memory)
        changed = [i for i, (old, now) in enumerate(zip(before, after, strict=True)) if old != now]
        end = changed[-1] + 1
        end += (PLACE - end) % 8 or 0  # the last number's zeros
        bank = PLACE + new.sequence % NUM_BANKS * BANK_BYTES
        for cut in range(bank, bank + 1 + (end - bank)):
            written = after[:cut] + bytes(max(end - cut, 0)) + before[max(cut, end) :]
            cleared = before[:bank] + bytes(cut - bank) + before[cut:]
            cleared_back = before[:cut] + bytes(max(end - cut, 0)) + before[max(cut, end) :]
            for torn in (cleared, cleared_back, written):
                found = Record.read(memoryview(torn), PLACE)
                assert found in (known, new) and (torn == after or found.sequence in (known.sequence, new.sequence))
                if torn[bank + 8 :] != after[bank + 8 :] and torn[:bank] == after[:bank] and found == new:
                    assert torn[bank:end] == after[bank:end]
        known = Record.read(memoryview(memory), PLACE)
        assert known == new


def test_only_moves_of_the_table_are_legal() -> None:
    record = Record()
    with pytest.raises(AssertionError, match="FREE cannot become OPEN"):
        record.move(State.OPEN)
    assert record.state is State.FREE
