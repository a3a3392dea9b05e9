"""Lines are WAITING, OPEN, ENDED, each once; a batch counts its lines; owners see only their own batches."""

from __future__ import annotations

import contextlib
import random
import sqlite3
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import TypeVar

import pytest

from tokenloom.frontend.forms.openai.batches.batch import BatchError, BatchUsage
from tokenloom.frontend.state.batches.lines import LineEnd, LineState, LineTokens, OpenLine
from tokenloom.frontend.state.batches.record import IllegalMove
from tokenloom.frontend.state.batches.store import MAX_OPEN, Batches, LineOutcome, reader_of
from tokenloom.frontend.state.schema import TABLES
from tokenloom.ipc.messages.intake import BatchChecked, FoundFault, FoundLine
from tokenloom.tests.frontend.state.batches.test_record import new_record
from tokenloom.tests.support.in_loop import in_loop
from tokenloom.tests.support.today import seeds

T = TypeVar("T")
OWNER = b"owner"


class PlainDatabase:
    """A database in memory, without a thread."""

    def __init__(self) -> None:
        self.connection = sqlite3.connect(":memory:", isolation_level=None)
        self.connection.executescript(TABLES)

    async def read(self, work: Callable[[sqlite3.Connection], T]) -> T:
        return work(self.connection)

    async def do(
        self, work: Callable[[sqlite3.Connection], T], *, synced: bool = False, is_deleting: bool = False
    ) -> T:
        with self.connection:
            self.connection.execute("BEGIN IMMEDIATE")
            return work(self.connection)


@contextlib.asynccontextmanager
async def plain_database(folder: Path) -> AsyncIterator[PlainDatabase]:
    yield PlainDatabase()


def found(count: int, first: int = 1) -> list[FoundLine]:
    return [FoundLine(number, 10 * number, 5, f"id {number}") for number in range(first, first + count)]


def checked(lines: list[FoundLine], faults: list[FoundFault] | None = None, *, is_end: bool = True) -> BatchChecked:
    last = lines[-1] if lines else FoundLine(0, 0, 0, "")
    end = last.offset + 10
    return BatchChecked(lines=lines, faults=faults or [], offset=end, number=last.number + 1, is_end=is_end)


def outcome(line: OpenLine, status: int) -> LineOutcome:
    return LineOutcome(LineEnd(line.batch, line.number, status, b"answer"), BatchUsage(total_tokens=3), "m")


def states(database: PlainDatabase) -> dict[int, int]:
    return dict(database.connection.execute("SELECT number, state FROM lines WHERE batch = 1"))


@pytest.mark.parametrize("seed", seeds(20, 200))
@in_loop(plain_database)
async def test_each_line_ends_once_whatever_comes_in_which_order(database: PlainDatabase, seed: int) -> None:
    rng = random.Random(seed)
    batches = Batches(database, lambda: 5.0)
    await batches.add(OWNER, new_record())
    await batches.add_checked(1, 0, checked(found(12)))
    known: list[OpenLine] = []  # all that were open once: an old frontend may still report them
    tokens: dict[int, bytes] = {}
    ended: dict[int, int] = {}
    for _ in range(60):
        before = states(database)
        match rng.randrange(5):
            case 0:
                opened = [line for _, line in await batches.open_lines(rng.randrange(1, 4), rng.choice((1, 100)))]
                assert [line.number for line in opened] == sorted(line.number for line in opened)
                assert all(before[line.number] == LineState.WAITING for line in opened)
                known += opened
            case 1:
                left = [line for _, line in await batches.take_over()]
                assert {line.number for line in left} == {n for n, state in before.items() if state == LineState.OPEN}
                assert all(line.tokens == tokens.get(line.number, b"") for line in left)
            case 2 | 3 if known:
                line, more = rng.choice(known), rng.randbytes(rng.randrange(1, 9))
                await batches.save([LineTokens(1, line.number, 1, 0, more)], [])
                if before[line.number] == LineState.OPEN:
                    tokens[line.number] = tokens.get(line.number, b"") + more
            case 4 if known:
                line, status = rng.choice(known), rng.choice((200, 400))
                await batches.save([], [outcome(line, status)])
                ended.setdefault(line.number, status)
        after = states(database)
        assert all(after[number] >= state for number, state in before.items())
        assert {number for number, state in after.items() if state == LineState.ENDED} == set(ended)
        [batch] = await batches.open_batches()
        counts = batch.record.batch.request_counts
        assert (counts.completed, counts.failed) == (list(ended.values()).count(200), list(ended.values()).count(400))
        assert batch.record.batch.usage.total_tokens == 3 * len(ended)
        assert (batch.record.batch.status == "finalizing") == (len(ended) == 12)


@in_loop(plain_database)
async def test_a_part_of_the_file_counts_once_and_double_ids_are_faults(database: PlainDatabase) -> None:
    batches = Batches(database, lambda: 5.0)
    await batches.add(OWNER, new_record())
    part = checked(found(3), is_end=False)
    assert await batches.add_checked(1, 0, part) and await batches.add_checked(1, 0, part)
    double = FoundLine(4, 50, 5, "id 2")
    assert not await batches.add_checked(1, part.offset, checked([double, *found(1, 5)]))
    failed = await batches.get(OWNER, "batch_1")
    assert failed is not None and failed.record.batch.status == "failed" and failed.record.batch.errors is not None
    [fault] = failed.record.batch.errors.data
    assert (fault.code, fault.param, fault.line) == ("duplicate_custom_id", "custom_id", 4)
    assert failed.record.batch.request_counts.total == 0 and await batches.open_batches() == []
    assert not await batches.delete_ended() and states(database) == {}


@in_loop(plain_database)
async def test_a_file_without_requests_and_one_with_faults_fail(database: PlainDatabase) -> None:
    batches = Batches(database)
    for number, part in enumerate((checked([]), checked(found(2), [FoundFault(9, "invalid_url", "why", "url")])), 1):
        await batches.add(OWNER, new_record(f"batch_{number}"))
        await batches.add_checked(number, 0, part)
        stored = await batches.get(OWNER, f"batch_{number}")
        assert stored is not None and stored.record.batch.status == "failed" and stored.record.batch.failed_at
    await batches.add(OWNER, new_record("batch_3"))
    await batches.fail(3, BatchError("file_not_found", "gone"))
    await batches.fail(3, BatchError("file_not_found", "gone"))
    stored = await batches.get(OWNER, "batch_3")
    assert stored is not None and stored.record.num_faults == 1


@in_loop(plain_database)
async def test_owners_see_their_own_batches_page_by_page(database: PlainDatabase) -> None:
    batches = Batches(database)
    for index in range(7):
        await batches.add(OWNER if index % 2 else b"other", new_record(f"batch_{index}"))
    page = await batches.page(OWNER, None, 2)
    assert page is not None and page.has_more
    assert [each.record.batch.id for each in page.batches] == ["batch_5", "batch_3"]
    rest = await batches.page(OWNER, "batch_3", 2)
    assert rest is not None and not rest.has_more and [each.record.batch.id for each in rest.batches] == ["batch_1"]
    assert await batches.page(OWNER, "batch_2", 2) is None and await batches.get(OWNER, "batch_2") is None
    assert await batches.cancel(OWNER, "batch_2") is None


@in_loop(plain_database)
async def test_an_owner_has_a_bounded_number_of_open_batches(database: PlainDatabase) -> None:
    batches = Batches(database)
    for index in range(MAX_OPEN):
        assert await batches.add(OWNER, new_record(f"batch_{index}"))
    assert not await batches.add(OWNER, new_record("batch_more"))
    assert await batches.add(b"other", new_record("batch_other"))
    await batches.fail(1, BatchError("file_not_found", "gone"))
    assert await batches.add(OWNER, new_record("batch_more"))


@in_loop(plain_database)
async def test_cancel_and_expiry_keep_what_has_ended(_: PlainDatabase) -> None:
    for is_cancelled in (True, False):
        database = PlainDatabase()
        batches = Batches(database, lambda: 7.0)
        await batches.add(OWNER, new_record())
        await batches.add_checked(1, 0, checked(found(5)))
        opened = [line for _, line in await batches.open_lines(3, 1000)]
        await batches.save([], [outcome(opened[0], 200)])
        assert reader_of(database.connection, "file-1") == "batch_1"
        if is_cancelled:
            await batches.cancel(OWNER, "batch_1")
            assert await batches.cancel(OWNER, "batch_1") is not None
        else:
            await batches.expire(1)
            await batches.expire(1)
        assert await batches.open_lines(3, 1000) == [] and await batches.take_over() == []
        await batches.close_lines(1)
        await batches.close_lines(1)
        await batches.save([], [outcome(opened[1], 200)])  # too late
        lines = await batches.ended_lines(1, 0, 100, 1000)
        assert [(line.number, line.status) for line in lines] == [(1, 200), (2, 0), (3, 0), (4, 0), (5, 0)]
        assert [line.number for line in await batches.ended_lines(1, 1, 2, 1000)] == [2, 3]
        assert reader_of(database.connection, "file-1") is None, "its room may be needed for the outputs"
        await batches.finish(1, "file-out", None)
        stored = await batches.get(OWNER, "batch_1")
        assert stored is not None
        batch = stored.record.batch
        assert (batch.status, batch.output_file_id) == ("cancelled" if is_cancelled else "expired", "file-out")
        assert (batch.request_counts.completed, batch.request_counts.failed) == (1, 4)
        with pytest.raises(IllegalMove):
            await batches.cancel(OWNER, "batch_1")
