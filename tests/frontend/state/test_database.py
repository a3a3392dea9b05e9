"""A call to the Database is one transaction, and a synced one is on the disk when it returns."""

from __future__ import annotations

import asyncio
import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tokenloom.frontend.state.database import Database
from tokenloom.frontend.state.failures import MENDS, state_failure
from tokenloom.frontend.state.schema import FILE
from tokenloom.ipc.errors import InternalError


def note(database: sqlite3.Connection) -> None:
    database.execute("INSERT INTO events VALUES (NULL, 1, x'')")


def num_notes(database: sqlite3.Connection) -> int:
    count: int = database.execute("SELECT COUNT(*) FROM events").fetchone()[0]
    return count


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    opened = Database(tmp_path / FILE, is_durable=True)
    yield opened
    opened.close()


def test_an_error_in_the_work_undoes_it_and_passes(database: Database) -> None:
    def fail(connection: sqlite3.Connection) -> None:
        note(connection)
        raise KeyError("ours")

    async def work() -> int:
        with pytest.raises(KeyError, match="ours"):
            await database.do(fail)
        await database.do(note)
        return await database.read(num_notes)

    assert asyncio.run(work()) == 1


def test_nothing_is_written_to_a_database_that_nobody_would_find_again(tmp_path: Path) -> None:
    folder, away = tmp_path / "state", tmp_path / "away"
    folder.mkdir()

    async def work(database: Database) -> int:
        await database.do(note)
        folder.rename(away)
        for call in (database.do(note), database.read(num_notes)):
            with pytest.raises(
                InternalError, match=f"{folder}/.*: No such file or directory: put it back as it was, or"
            ):
                await call
        folder.mkdir()
        (folder / FILE).touch()
        with pytest.raises(InternalError, match="another file has taken its place: stop the engine, put the folder"):
            await database.do(note)
        shutil.rmtree(folder)
        away.rename(folder)
        await database.do(note)
        return await database.read(num_notes)

    with closing(Database(folder / FILE, is_durable=True)) as database:
        assert asyncio.run(work(database)) == 2


@pytest.mark.parametrize("number", MENDS)
def test_a_failure_of_the_folder_names_the_cause_and_the_mend(number: int) -> None:
    error = state_failure(OSError(number, os.strerror(number)), "the folder x cannot be used")
    assert str(error) == f"the folder x cannot be used: {os.strerror(number)}: {MENDS[number]}"


def test_a_decision_and_its_change_are_one_transaction_of_all_processes(tmp_path: Path) -> None:
    """Two that count and then write see each other's rows."""
    both = [Database(tmp_path / FILE, is_durable=True) for _ in range(2)]

    def count_up(connection: sqlite3.Connection) -> int:
        number = num_notes(connection)
        note(connection)
        return number

    async def work() -> list[int]:
        return await asyncio.gather(*(each.do(count_up) for _ in range(50) for each in both))

    assert sorted(asyncio.run(work())) == list(range(100))
    for each in both:
        each.close()


SYNCS = """
import asyncio, sys
from pathlib import Path
from tokenloom.frontend.state.database import Database
from tokenloom.tests.frontend.state.test_database import note

async def work():
    database = Database(Path(sys.argv[1]), is_durable=sys.argv[2] == "durable")
    await database.do(note)
    for number in range(7):
        print(f"before {number}", flush=True)
        await database.do(note, synced=sys.argv[3] == "synced")
    print("after", flush=True)
    database.close()

asyncio.run(work())
"""


def num_syncs(path: Path, *words: str) -> int:
    """Return how often seven transactions sync a file, from the system calls of a process that executes them."""
    trace = path.with_suffix(".trace")
    command = ["strace", "-f", "-o", str(trace), "-e", "trace=fsync,fdatasync,write", sys.executable, "-P", "-c", SYNCS]
    subprocess.run([*command, str(path), *words], check=True, timeout=60, capture_output=True)
    _, _, rest = trace.read_text().partition('"before 0"')
    calls = rest.partition('"after"')[0]
    return sum("sync(" in line for line in calls.splitlines())


CAN_TRACE = subprocess.run(["sh", "-c", "strace -o /dev/null true"], capture_output=True, check=False, timeout=30)


@pytest.mark.skipif(CAN_TRACE.returncode != 0, reason="no strace on this machine")
def test_each_synced_transaction_waits_for_the_disk_and_no_other_does(tmp_path: Path) -> None:
    assert num_syncs(tmp_path / "a", "durable", "synced") >= 7
    assert num_syncs(tmp_path / "b", "durable", "later") == 0
    assert num_syncs(tmp_path / "c", "brief", "synced") == 0
