"""Files belong to their owners, stay within quotas, and go when they expire and nothing reads them."""

from __future__ import annotations

import asyncio
import sqlite3
import subprocess
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

import pytest

from tokenloom.frontend.state.clock import StateClock
from tokenloom.frontend.state.database import Database
from tokenloom.frontend.state.files import Description, FileHeld, FileRecord, Files, QuotaExceeded
from tokenloom.frontend.state.schema import FILE
from tokenloom.ipc.errors import RequestError
from tokenloom.tests.support.mounts import inside, needs_mounts

T = TypeVar("T")
ME, YOU = b"me", b"you"


class Store:
    """Files in a folder, at a time that the test sets; `held`: files that a batch reads."""

    def __init__(self, folder: Path, quota_bytes: int = 1000) -> None:
        self.folder = folder / "files"
        self.folder.mkdir()
        self.now = 100.0
        self.held: set[str] = set()
        clock = StateClock(lambda: self.now, lambda: self.now, lambda: "a boot")
        self.database = Database(folder / FILE, is_durable=True, clock=clock)
        self.files = Files(self.database, self.folder, quota_bytes, [self._holder])

    def _holder(self, database: sqlite3.Connection, file_id: str) -> str | None:
        return "batch_1" if file_id in self.held else None

    async def put(
        self, name: str, content: bytes = b"text", owner: bytes = ME, expires_s: int | None = None
    ) -> FileRecord:
        purpose = "batch" if expires_s else "user_data"
        writer = await self.files.begin(owner, f"file-{name}", Description(f"{name}.txt", purpose, expires_s))
        await writer.write(content)
        return await writer.finish()

    async def listed(self, owner: bytes = ME, **options: Any) -> str:
        given = {"after": None, "limit": 100, "is_ascending": True, "purpose": None} | options
        page = await self.files.page(owner, **given)
        return "".join(record.id.removeprefix("file-") for record in page.records) + ("+" if page.has_more else "")

    async def content(self, record: FileRecord) -> bytes:
        reader = await self.files.open(record)
        try:
            return reader.read()
        finally:
            reader.close()

    @property
    def on_disk(self) -> list[str]:
        return sorted(path.name for path in self.folder.iterdir())


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path)


def run(store: Store, work: Coroutine[Any, Any, T]) -> T:
    async def closing() -> T:
        try:
            return await work
        finally:
            store.files.close()
            store.database.close()

    return asyncio.run(closing())


def test_a_finished_file_is_whole_and_an_unfinished_one_is_not_there(store: Store) -> None:
    async def work() -> None:
        record = await store.put("a", b"content")
        assert await store.files.get(ME, record.id) == record and await store.content(record) == b"content"
        writer = await store.files.begin(ME, "file-b")
        await writer.write(b"half")
        assert await store.listed() == "a"
        writer.discard()
        writer.discard()

    run(store, work())
    assert store.on_disk == ["file-a"]


def test_pages_follow_one_another_in_both_orders(store: Store) -> None:
    async def work() -> None:
        for name in "abcde":
            await store.put(name, expires_s=50 if name in "bd" else None)
        assert await store.listed(limit=2) == "ab+" and await store.listed(limit=3, after="file-b") == "cde"
        assert await store.listed(is_ascending=False, limit=2, after="file-d") == "cb+"
        assert await store.listed(purpose="batch") == "bd"
        with pytest.raises(RequestError, match="after is 'file-x', which is not a file"):
            await store.listed(after="file-x")

    run(store, work())


def test_files_of_other_keys_do_not_exist(store: Store) -> None:
    async def work() -> None:
        record = await store.put("a", expires_s=50)
        assert await store.listed(YOU) == "" and await store.files.get(YOU, record.id) is None
        assert await store.files.input_path(YOU, record.id) is None
        assert not await store.files.delete(YOU, record.id) and await store.listed() == "a"
        with pytest.raises(RequestError):
            await store.listed(YOU, after=record.id)

    run(store, work())


def test_the_quota_is_each_owners_and_counts_what_batches_write(store: Store) -> None:
    async def work() -> None:
        await store.put("a", bytes(400))
        output = await store.files.create_output(ME, "file-0", "out.jsonl", None)
        await output.write(bytes(700))  # is not refused
        await output.finish()
        with pytest.raises(QuotaExceeded, match="may have 1000 bytes together"):
            await store.files.begin(ME, "file-b")
        await store.put("c", bytes(1000), owner=YOU)
        assert await store.files.delete(ME, "file-0")
        writer = await store.files.begin(ME, "file-d")
        with pytest.raises(QuotaExceeded):
            await writer.write(bytes(601))
        writer.discard()

    run(store, work())
    assert store.on_disk == ["file-a", "file-c"]


def test_of_two_uploads_at_once_that_fit_alone_one_is_refused(store: Store) -> None:
    async def work() -> None:
        writers = [await store.files.begin(ME, f"file-{i}", Description("n", "vision", None)) for i in range(2)]
        for writer in writers:
            await writer.write(bytes(600))
        await writers[0].finish()
        with pytest.raises(QuotaExceeded):
            await writers[1].finish()

    run(store, work())
    assert store.on_disk == ["file-0"]


def test_a_file_with_the_id_of_another_replaces_it(store: Store) -> None:
    """A frontend's successor receives an upload again."""

    async def work() -> None:
        await store.put("a", bytes(900))
        record = await store.put("a", bytes(999))
        assert len(await store.content(record)) == 999 and await store.listed() == "a"

    run(store, work())


def test_a_file_that_a_batch_reads_stays(store: Store) -> None:
    async def work() -> None:
        await store.put("a", expires_s=50)
        store.held = {"file-a"}
        with pytest.raises(FileHeld, match="batch_1"):
            await store.files.delete(ME, "file-a")
        store.now += 51
        await store.files.sweep()
        assert await store.files.input_path(ME, "file-a") == store.folder / "file-a"
        assert store.on_disk == ["file-a"] and await store.listed() == ""
        store.held = set()
        await store.files.sweep()

    run(store, work())
    assert store.on_disk == []


def test_an_expired_file_is_gone_before_it_is_swept(store: Store) -> None:
    async def work() -> None:
        record = await store.put("a", expires_s=50)
        await store.put("b")
        assert record.expires_at == record.created_at + 50
        store.now += 49
        assert await store.listed() == "ab"
        store.now += 2
        assert await store.listed() == "b" and await store.files.get(ME, record.id) is None
        assert store.on_disk == ["file-a", "file-b"]
        await store.files.sweep()

    run(store, work())
    assert store.on_disk == ["file-b"]


def test_a_sweep_leaves_what_is_being_written_and_what_is_not_ours(store: Store) -> None:
    (store.folder / "notes.txt").touch()
    for left in ("file-0", "file-1.part"):
        (store.folder / left).write_bytes(b"of a killed writer")

    async def work() -> None:
        writer = await store.files.begin(ME, "file-a", Description("n", "vision", None))
        await store.files.sweep()
        assert store.on_disk == ["file-a.part", "notes.txt"]
        await writer.write(b"text")
        await writer.finish()
        await store.files.sweep()

    run(store, work())
    assert store.on_disk == ["file-a", "notes.txt"]


def test_a_caller_that_is_cancelled_at_the_end_leaves_a_whole_file(store: Store) -> None:
    async def work() -> None:
        writer = await store.files.begin(ME, "file-a", Description("n", "vision", None))
        await writer.write(b"text")
        finishing = asyncio.ensure_future(writer.finish())
        while not writer._is_over:
            await asyncio.sleep(0)
        finishing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await finishing
        writer.discard()
        while not (found := await store.files.get(ME, "file-a")):
            await asyncio.sleep(0.001)
        assert await store.content(found) == b"text"

    run(store, asyncio.wait_for(work(), 20))


FULL_DISK = """
import os, sys
from pathlib import Path
from tokenloom.frontend.state.batches.store import Batches
from tokenloom.ipc.errors import StorageFull
from tokenloom.tests.frontend.state.batches.test_record import new_record
from tokenloom.tests.frontend.state.test_files import ME, Store, run

async def work(store):
    batches = Batches(store.database)
    await batches.add(ME, new_record())
    names = []
    try:
        while True:
            await store.put(f"{len(names):x}", bytes(300_000))
            names.append(f"{len(names):x}")
    except StorageFull:
        print("no room for files")
    output = await store.files.create_output(ME, "file-ee", "out.jsonl", None)  # it has room left
    await output.write(bytes(300_000))
    await output.finish()
    assert await store.files.delete(ME, "file-ee")
    same = "REPLACE INTO batches (number, record) VALUES (2, zeroblob(50000))"
    for _ in range(40):
        await store.database.do(lambda database: database.execute(same))
    disk = os.statvfs(sys.argv[1])
    filler = Path(sys.argv[1], "filler")
    filler.write_bytes(bytes(disk.f_bavail * disk.f_frsize - 5_000_000))
    try:
        await store.database.do(lambda database: database.execute(same))
    except StorageFull:
        print("no room beside the log")
    await store.database.do(lambda database: database.execute(same))  # in the room that the log has given back
    filler.unlink()
    row = "INSERT INTO batches (record) VALUES (zeroblob(50000))"
    try:
        while True:
            await store.database.do(lambda database: database.execute(row))
    except StorageFull:
        print("no room for rows")
    print((await batches.cancel(ME, "batch_1")).record.batch.status)
    for name in names:
        assert await store.files.delete(ME, f"file-{name}")
    await store.put("ff", bytes(300_000))
    print(await store.listed())

store = Store(Path(sys.argv[1]), quota_bytes=1 << 30)
run(store, work(store))
"""


@needs_mounts
def test_files_can_be_deleted_and_batches_cancelled_on_a_full_disk(tmp_path: Path) -> None:
    command = [*inside(f"mount -t tmpfs -o size=24m tmpfs {tmp_path}"), sys.executable, "-P", "-c", FULL_DISK, tmp_path]
    output = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    assert output.splitlines() == [
        "no room for files",
        "no room beside the log",
        "no room for rows",
        "cancelling",
        "ff",
    ]
