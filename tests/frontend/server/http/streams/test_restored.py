"""Streams outlive their frontend: each reader gets every text once, whoever was there when it was lost."""

from __future__ import annotations

import os
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tokenloom.frontend.listening.journal.journal import HttpJournal, read_counts
from tokenloom.frontend.listening.journal.pages import JournalLimits, new_pages
from tokenloom.frontend.listening.journal.record import MAX_LOSSES, State
from tokenloom.frontend.server.api.continuation import working_on
from tokenloom.tests.frontend.server.api.cut_answers import CutApp, Part, continuation_of, some_turns, texts_of
from tokenloom.tests.frontend.server.api.test_continuation import FORM, SCRIPTS
from tokenloom.tests.frontend.server.http.streams.test_resumable import NAMES, Reader, _until
from tokenloom.tests.support.in_loop import in_loop
from tokenloom.tests.support.today import seeds, some

LIMITS = JournalLimits(num_slots=6, max_body_bytes=1 << 16, max_bytes=8 << 20)
COPY_BYTES = 1 << 20


class Frontends:
    """The frontends of an engine, one after the other; `now` is the present one."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._num_lost = folder, 0
        self.begin(new_pages())

    def begin(self, fd: int, version: str = "v") -> None:
        self.fd = fd
        self.journal = HttpJournal(fd, LIMITS, version)
        folder = self._folder / f"{self._num_lost}"
        folder.mkdir()
        self.now = CutApp(folder, SCRIPTS, FORM, journal=self.journal)

    async def lose(self, version: str = "v") -> None:
        """Go on with another frontend, with the memory as it is at this moment."""
        lost, fd = self.now, _copy(self.fd)
        self._num_lost += 1
        self.begin(fd, version)
        self.now.tokens_per_turn = lost.tokens_per_turn
        self.now.streams.restore()
        await lost.close()

    async def forget_all(self) -> None:
        """Forget all streams, since the next one has the same nonce."""
        for each in list(self.now.streams.by_id.values()):
            await self.now.streams.delete(each)

    def go_on(self) -> None:
        self.now.streams.go_on(self.now.app)


def _copy(fd: int) -> int:
    """Return a copy of a memory with holes."""
    copy, end, place = new_pages(), os.fstat(fd).st_size, 0
    os.ftruncate(copy, end)
    while place < end:
        try:
            start = os.lseek(fd, place, os.SEEK_DATA)
        except OSError:
            break
        place = os.lseek(fd, start, os.SEEK_HOLE)
        for at in range(start, place, COPY_BYTES):
            os.pwrite(copy, os.pread(fd, min(COPY_BYTES, place - at), at), at)
    return copy


@asynccontextmanager
async def _frontends(folder: Path) -> AsyncIterator[Frontends]:
    frontends = Frontends(folder)
    yield frontends
    await frontends.now.close()


async def _calm(frontends: Frontends, name: str) -> Reader:
    calm = Reader(frontends.now)
    await calm.post(name)
    return calm


@pytest.mark.parametrize("name", some(NAMES, 3))
@in_loop(_frontends)
async def test_a_stream_without_a_reader_goes_on_in_the_next_frontend(frontends: Frontends, name: str) -> None:
    calm = await _calm(frontends, name)
    num_given = frontends.now.num_given
    for num_parts in range(1, len(calm.parts), 5):
        await frontends.forget_all()
        frontends.now.num_given = 0
        first = Reader(frontends.now, num_parts)
        await first.post(name, x_stream_resume="60")
        given_before = frontends.now.num_given
        await frontends.lose()
        frontends.go_on()
        (stream,) = frontends.now.streams.by_id.values()
        await _until(lambda stream=stream: not stream.done.is_set())  # type: ignore[misc]
        await _until(stream.done.is_set)  # its answer is made while nobody reads
        assert num_given <= given_before + frontends.now.num_given <= num_given + 9, "few are made again"
        rest = Reader(frontends.now)
        await rest.ask("GET", f"/v1/streams/{stream.id}", last_event_id=first.last_id)
        assert texts_of(first.events + rest.events) == texts_of(calm.events), f"left after {num_parts} parts"


@pytest.mark.parametrize("name", some(NAMES, 3))
@pytest.mark.parametrize("seed", seeds(2, 20))
@in_loop(_frontends)
async def test_readers_who_leave_and_frontends_that_are_lost_change_no_text(
    frontends: Frontends, name: str, seed: int
) -> None:
    calm, draw = await _calm(frontends, name), random.Random(seed)
    await frontends.forget_all()
    frontends.now.tokens_per_turn = some_turns(seed)
    connection: list[Part] = []  # parts that the client has got on its present connection
    events, after, from_id, is_post = b"", "", "", True
    while not after.endswith("/end"):
        reader = Reader(frontends.now, draw.randint(1, 4))
        begun = continuation_of(connection)
        if is_post:
            await reader.post(name, begun, x_stream_resume="60")
        else:
            begun.nonce = draw.randbytes(16)  # of the reader's own request
            with working_on(begun):
                await reader.ask("GET", f"/v1/streams/{from_id.partition('/')[0]}", last_event_id=from_id)
        assert reader.status == 200, reader.parts
        events, connection = events + reader.events, connection + reader.sent
        after = reader.last_id if reader.has_id or not after else after
        what = draw.choice(("leave", "lose", "leave and lose", "lose and leave"))
        if "lose" in what:
            await frontends.lose()
        if what != "lose":
            is_post, connection, from_id = False, [], after
        if draw.random() < 0.5:
            frontends.go_on()
    assert texts_of(events) == texts_of(calm.events)


@in_loop(_frontends)
async def test_a_stream_whose_frontends_are_lost_often_or_of_another_version_is_given_up(frontends: Frontends) -> None:
    for version, reason in (("w", "version"), ("w", "lost_often")):
        await frontends.forget_all()
        await Reader(frontends.now, 2).post("chat", x_stream_resume="60")
        (slot,) = frontends.journal.stream_slots()
        if reason == "lost_often":
            for _ in range(MAX_LOSSES):
                slot.count_loss()
        await frontends.lose(version)
        assert not frontends.now.streams.by_id and not frontends.journal.slots
        assert read_counts(frontends.fd).num_cut[reason] == 1


@in_loop(_frontends)
async def test_a_stream_that_is_over_or_deleted_leaves_no_slot(frontends: Frontends) -> None:
    first = Reader(frontends.now, 2)
    await first.post("chat", x_stream_resume="60")
    assert [slot.record.state for slot in frontends.journal.slots.values()] == [State.STREAM]
    await Reader(frontends.now).ask("DELETE", f"/v1/streams/{first.last_id.partition('/')[0]}")
    assert not frontends.journal.slots
    await Reader(frontends.now, 2).post("chat", x_stream_resume="0.001")
    await _until(lambda: not frontends.journal.slots)
    await Reader(frontends.now).post("chat")
    assert not frontends.journal.slots, "a stream that nobody may read on needs none"
