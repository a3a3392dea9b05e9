"""The memory is bounded, and a successor reads it whole after a kill at any moment."""

from __future__ import annotations

import os
import random
import signal
import struct
import subprocess
import sys

import pytest

from tokenloom.frontend.listening.journal.journal import HttpJournal, read_counts
from tokenloom.frontend.listening.journal.pages import PAGE, JournalLimits, new_pages
from tokenloom.frontend.listening.journal.record import Reason, Record, State
from tokenloom.scripts.chaos.kernel_count import pattern
from tokenloom.tests.frontend.listening.journal.reads import read
from tokenloom.tests.support.today import seeds

LIMITS = JournalLimits(num_slots=50, max_body_bytes=1 << 20, max_bytes=2 << 20)
NUM_KILLS = 20
PLACE, TAKEN = PAGE + 40 * LIMITS.slot_bytes, struct.Struct("<Q")  # in a slot that nothing uses
WRITER = """
import random, sys
from types import SimpleNamespace
from tokenloom.frontend.listening.journal.journal import HttpJournal
from tokenloom.frontend.listening.journal.record import State
from tokenloom.ipc.codec import encode_ids
from tokenloom.scripts.chaos.kernel_count import pattern
from tokenloom.tests.frontend.listening.journal.reads import read
from tokenloom.tests.frontend.listening.journal.test_journal import LIMITS, PLACE, TAKEN
journal = HttpJournal(int(sys.argv[1]), LIMITS, "v")
slot = next(iter(journal.slots.values()), None) or journal.open_slot()
draw, memory = random.Random(sys.argv[2]), journal.pages.memory
print(flush=True)
while True:
    if slot.record.state is State.IDLE:
        # Nothing is pending, as the next line says. Bytes are copied in one move; `pack_into` would write zeros first.
        memory[PLACE : PLACE + 8] = TAKEN.pack(slot.record.out_end)
        read(slot, b"x" * 100)
    begin = slot.record.tokens_len // 4
    count = draw.randrange(1, 4)
    data = pattern(slot.record.out_end, draw.randrange(1, 3000))
    tokens = [(0, encode_ids(range(begin, begin + count)))]
    more = dict(ended=[], logprobs=[], sources=[], num_cached=0, seed=0)
    shown = SimpleNamespace(tokens=tokens, num_events=begin + count, **more)
    num_pending = min(draw.choice((0, 0, 3000)), slot.record.out_end - TAKEN.unpack_from(memory, PLACE)[0])
    memory[PLACE : PLACE + 8] = TAKEN.pack(slot.record.out_end - num_pending)  # the kernel's count
    end = State.IDLE if draw.random() < 0.01 else None
    if num_pending or end is not None or not slot.put_next(data, shown):
        slot.put_out(data, num_pending, shown, end)
"""


def num_resident(fd: int) -> int:
    return os.fstat(fd).st_blocks * 512


def test_bytes_and_tokens_agree_after_a_kill_at_any_moment() -> None:
    fd = new_pages()
    seen = HttpJournal(fd, LIMITS, "v").pages.memory
    for number in range(NUM_KILLS):
        command = [sys.executable, "-P", "-c", WRITER, str(fd), str(number)]
        with subprocess.Popen(command, pass_fds=[fd], stdout=subprocess.PIPE) as writer:
            assert writer.stdout is not None and writer.stdout.readline() == b"\n"
            while number % 2 and not Record.read(seen, PAGE).tokens_len:
                pass
            writer.send_signal(signal.SIGKILL)
        journal = HttpJournal(fd, LIMITS, "v")
        for slot in journal.slots.values():
            record, (num_taken,) = slot.record, TAKEN.unpack_from(seen, PLACE)
            assert slot.unsent(num_taken) == pattern(num_taken, record.out_end - num_taken)
            if record.state is State.OPEN:
                token_ids = slot.shown().answers[0].token_ids if record.tokens_len else []
                assert token_ids == list(range(record.num_events)) and slot.request() == b"x" * 100
    os.close(fd)


@pytest.mark.parametrize("seed", seeds(2, 20))
def test_memory_stays_within_its_limit_and_comes_back(seed: int) -> None:
    draw, fd = random.Random(seed), new_pages()
    journal = HttpJournal(fd, LIMITS, "v")
    num_lost = 0
    for _ in range(2000):
        if len(journal.slots) < 40 and draw.random() < 0.5:
            assert journal.open_slot() is not None
        elif journal.slots:
            slot = draw.choice(list(journal.slots.values()))
            kind = draw.random()
            if kind < 0.2:
                journal.free_slot(slot)
            elif slot.record.state in (State.IDLE, State.OPEN) and kind < 0.6:
                read(slot, bytes(draw.choice((100, 60_000, 200_000))))
            elif slot.record.state is not State.IDLE:
                slot.put_out(bytes(draw.choice((100, 20_000))), 0, end=draw.choice((None, State.IDLE)))
            num_lost += slot.record.reason is Reason.SIZE
        assert 0 <= journal.pages.num_used_bytes <= LIMITS.max_bytes
        assert num_resident(fd) <= LIMITS.max_bytes + (1 + LIMITS.num_slots) * 4096
    assert num_lost
    later = HttpJournal(fd, LIMITS, "v")
    assert later.pages.num_used_bytes <= journal.pages.num_used_bytes and set(later.slots) == set(journal.slots)
    for slot in list(later.slots.values()):
        later.free_slot(slot)
    assert num_resident(fd) <= (1 + LIMITS.num_slots * 7) * 4096
    os.close(fd)


def test_there_are_as_many_slots_as_were_asked_for() -> None:
    journal = HttpJournal(new_pages(), LIMITS, "v")
    slots = [journal.open_slot() for _ in range(LIMITS.num_slots)]
    assert None not in slots and journal.open_slot() is None
    journal.free_slot(slots[3])  # type: ignore[arg-type]
    assert journal.open_slot() is slots[3]


def test_another_version_is_noticed_and_another_layout_begins_anew() -> None:
    fd = new_pages()
    slot = HttpJournal(fd, LIMITS, "1").open_slot()
    assert slot is not None
    read(slot, b"x")
    later = HttpJournal(fd, LIMITS, "2")
    assert not later.is_of_this_version(later.slots[0]) and HttpJournal(fd, LIMITS, "1").is_of_this_version(slot)
    assert not HttpJournal(fd, LIMITS._replace(max_body_bytes=5 << 20), "1").slots


def test_counts_are_read_without_a_mapping() -> None:
    fd = new_pages()
    assert read_counts(fd).num_resumed == 0
    journal = HttpJournal(fd, LIMITS, "v")
    journal.count_resumed()
    journal.count_cut(Reason.TLS)
    journal.count_cut(Reason.TLS)
    counts = read_counts(fd)
    assert counts.num_resumed == 1 and counts.num_cut["tls"] == 2 and sum(counts.num_cut.values()) == 2
