"""A slot against a plain model: all bytes that the kernel has not taken can be written again, with their tokens."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from tokenloom.frontend.listening.journal.journal import HttpJournal
from tokenloom.frontend.listening.journal.pages import RING_BYTES, JournalLimits, new_pages
from tokenloom.frontend.listening.journal.record import Reason, Record, State
from tokenloom.frontend.listening.journal.slot import KEPT_BYTES, Slot
from tokenloom.ipc.codec import encode_ids
from tokenloom.tests.frontend.listening.journal.reads import place, read
from tokenloom.tests.support.today import seeds

LIMITS = JournalLimits(num_slots=4, max_body_bytes=1 << 20, max_bytes=8 << 20)


@pytest.fixture
def fd() -> Iterator[int]:

    fd = new_pages()
    yield fd
    os.close(fd)


def shown(*token_ids: int, num_events: int = 1, num_cached: int = 0) -> Any:
    return SimpleNamespace(
        tokens=[(0, encode_ids(token_ids))] * bool(token_ids),
        ended=[],
        logprobs=[],
        sources=[],
        num_events=num_events,
        num_cached=num_cached,
        seed=0,
    )


class Kernel:
    """Takes the bytes that are written, some at once and some later."""

    def __init__(self, draw: random.Random) -> None:
        self._draw = draw
        self.written, self.num_taken = bytearray(), 0

    @property
    def num_pending(self) -> int:
        return len(self.written) - self.num_taken

    def write(self, data: bytes) -> None:
        self.written += data
        self.num_taken += self._draw.choice((0, self._draw.randrange(self.num_pending + 1), self.num_pending))


@pytest.mark.parametrize("seed", seeds(6, 60))
def test_bytes_that_the_kernel_lacks_are_kept_through_any_pieces(fd: int, seed: int) -> None:
    draw = random.Random(seed)
    kernel, journal = Kernel(draw), HttpJournal(fd, LIMITS, "v")
    slot = journal.open_slot()
    assert slot is not None
    other = HttpJournal(fd, LIMITS, "v")  # a second mapping, as a successor's
    num_read = 0
    for _ in range(20):
        request, tokens = draw.randbytes(draw.choice((1, 900, 100_000))), list[int]()
        begun = num_read
        while num_read - begun < len(request):
            part = request[num_read - begun :][: draw.choice((1, len(request)))]
            num_read += (size := place(slot, part, kernel.num_pending))
            found = HttpJournal(fd, LIMITS, "v").slots[slot.number]  # the process is lost here, before it says so
            found.take_read(num_read, kernel.num_pending)
            is_lost = found.record.state is State.LOST or bool(found.record.aside and kernel.num_pending)
            assert is_lost or found.request() == request[: num_read - begun]
            slot.put_in(size, kernel.num_pending)
        is_lost = slot.record.state is State.LOST  # a large answer to the request before is not taken yet
        num_pieces = draw.randrange(1, 30)
        for number in range(num_pieces):
            is_last = number == num_pieces - 1
            data = draw.randbytes(draw.choice((0, 50, 5000, 70_000, 300_000 if is_last else 1)))
            while not is_last and kernel.num_pending + len(data) > RING_BYTES:
                kernel.write(b"")
            token_id = draw.getrandbits(31)
            tokens.append(token_id)
            new = shown(token_id, num_events=number, num_cached=draw.choice((0, 0, 0, 16)))
            if is_last or kernel.num_pending or not slot.put_next(data, new):
                slot.put_out(data, kernel.num_pending, new, State.IDLE if is_last else None)
            kernel.written += data  # not yet written: the process may be lost here
            found = Slot(other.pages, slot.number, 0)
            if not is_lost:
                assert found.record == slot.record
                assert (found.record.num_events, found.record.num_cached) == (new.num_events, new.num_cached)
                assert found.unsent(kernel.num_taken) == bytes(kernel.written[kernel.num_taken :])
                if not is_last:
                    assert found.request() == request and found.shown().answers[0].token_ids == tokens
            kernel.write(b"")
        assert slot.record.state is State.IDLE and slot.record.in_begin + slot.record.in_len == num_read
        if is_lost:
            kernel.num_taken = len(kernel.written)
    slot.record.write(journal.pages.memory, journal.pages.place_of(slot.number))
    assert Record.read(other.pages.memory, other.pages.place_of(slot.number)) == slot.record


def test_a_quick_reader_s_stream_touches_one_page_of_the_ring(fd: int) -> None:
    journal = HttpJournal(fd, LIMITS, "v")
    slot = journal.open_slot()
    assert slot is not None
    read(slot, b"x" * 1500)
    for token_id in range(800):
        if not slot.put_next(b"y" * 250, shown(token_id)):
            slot.put_out(b"y" * 250, 0, shown(token_id))
    assert slot.shown().answers[0].token_ids == list(range(800))
    assert journal.pages.num_used_bytes <= 2 * 4096


def test_a_request_that_is_too_large_gives_its_memory_back_before_its_end(fd: int) -> None:
    journal = HttpJournal(fd, LIMITS, "v")
    slot = journal.open_slot()
    assert slot is not None
    read(slot, bytes(journal.pages.body_bytes))
    assert slot.record.state is State.OPEN and journal.pages.num_used_bytes >= journal.pages.body_bytes
    read(slot, b"x")
    assert slot.record.state is State.LOST and slot.record.reason is Reason.SIZE
    assert journal.pages.num_used_bytes <= KEPT_BYTES
    read(slot, b"y")
    slot.put_out(b"answer", 0, end=State.IDLE)
    read(slot, b"next")
    assert slot.record.state is State.OPEN and slot.request() == b"next"


def test_more_than_the_ring_is_lost_unless_it_is_the_last_piece(fd: int) -> None:
    journal = HttpJournal(fd, LIMITS, "v")
    slot = journal.open_slot()
    assert slot is not None
    read(slot, b"x")
    slot.put_out(bytes(RING_BYTES + 1), 0)
    assert slot.record.state is State.LOST and slot.record.reason is Reason.SIZE
    slot.put_out(b"end", 0, end=State.IDLE)
    read(slot, b"y")
    assert slot.record.state is State.OPEN and slot.request() == b"y"
    slot.put_out(b"z" * 10, 10, end=State.IDLE)
    read(slot, b"y")
    large = random.Random(0).randbytes(RING_BYTES * 2)
    slot.put_out(large, 0, end=State.CLOSING)
    assert slot.unsent(slot.record.out_end - len(large)) == large
    assert slot.unsent(slot.record.out_end - 5) == large[-5:] and slot.unsent(slot.record.out_end + 1) is None


@pytest.mark.parametrize("uncovered", [Reason.OFF, Reason.TLS])
def test_an_uncovered_connection_says_why_while_a_request_is_open(fd: int, uncovered: Reason) -> None:
    slot = HttpJournal(fd, LIMITS, "v").open_slot(uncovered)
    assert slot is not None and slot.record.state is State.IDLE
    read(slot, b"x")
    assert (slot.record.state, slot.record.reason) == (State.LOST, uncovered)
    slot.put_out(b"y", 0, end=State.IDLE)
    assert slot.record.state is State.IDLE


def test_losses_are_counted_until_a_new_token(fd: int) -> None:
    slot = HttpJournal(fd, LIMITS, "v").open_slot()
    assert slot is not None
    read(slot, b"x")
    slot.count_loss()
    slot.put_out(b"ping", 0, shown(num_events=2))
    assert slot.record.losses == 1
    slot.put_tokens(shown(4))
    assert slot.record.losses == 0 and slot.shown().answers[0].token_ids == [4]
