"""ResponseStore stays within its limits, and the next store of the same file has its responses."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

import pytest

from tokenloom.frontend.state.clock import StateClock
from tokenloom.frontend.state.database import Database
from tokenloom.frontend.state.responses import Record, ResponseStore
from tokenloom.frontend.state.schema import FILE
from tokenloom.ipc.errors import InternalError, Overloaded
from tokenloom.ipc.spec.config.engine_config import EngineConfig
from tokenloom.tests.support.shortages import few_descriptors, few_threads, num_descriptors

T = TypeVar("T")


class Store(ResponseStore):
    """Store with a database of its own in a folder."""

    def __init__(self, folder: Path, owner: int = 0, clock: StateClock | None = None, **options: Any) -> None:
        self.database = Database(folder / FILE, is_durable=False, clock=clock)
        super().__init__(self.database, EngineConfig(**options), owner)


def new_store(folder: Path, **options: Any) -> Store:
    return Store(folder, **options)


def done(name: str, num_bytes: int = 9) -> Record:
    return Record(name, False, False, b"[]", b"", b"x" * (num_bytes - 2))


def waiting(name: str) -> Record:
    return Record(name, True, True, b"[]", b"{}", b"queued")


def run(store: Store, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work` and close the store."""
    try:
        return asyncio.run(work)
    finally:
        store.database.close()


async def kept(store: ResponseStore, names: str) -> str:
    return "".join([name for name in names if await store.get(name)])


@pytest.mark.parametrize("bounds", [{"response_store_count": 3}, {"response_store_bytes": 30}])
def test_the_oldest_ended_response_is_deleted_first(tmp_path: Path, bounds: dict[str, int]) -> None:
    store = new_store(tmp_path, **bounds)

    async def work() -> str:
        await store.add(waiting("w"))
        for name in "abc":
            await store.add(done(name))
        return await kept(store, "wabc")

    assert run(store, work()) == "wbc"


def test_open_responses_are_never_deleted_for_new_ones(tmp_path: Path) -> None:
    store = new_store(tmp_path, response_store_count=2, response_store_bytes=100)

    async def work() -> None:
        with pytest.raises(Overloaded):
            await store.add(done("large", 101))
        await store.add(waiting("a"))
        await store.add(waiting("b"))
        with pytest.raises(Overloaded):
            await store.add(waiting("c"))

    run(store, work())


def test_no_response_replaces_another(tmp_path: Path) -> None:
    store = new_store(tmp_path)

    async def work() -> list[Record | None]:
        for first in (done("a", 10), waiting("w")):
            await store.add(first)
            with pytest.raises(InternalError, match="UNIQUE"):
                await store.add(done(first.id, 20))
        return [await store.get("a"), await store.get("w")]

    assert run(store, work()) == [done("a", 10), waiting("w")]


def test_the_clock_of_ages_does_not_jump_and_is_that_of_all_processes(tmp_path: Path) -> None:
    """Else a clock that is set by a year would end all responses, or keep them for a year longer."""
    booted, wall = [100.0], [1e9]
    first, second = (
        Store(
            tmp_path,
            clock=StateClock(lambda: booted[0], lambda: wall[0], lambda: "a boot"),
            response_store_age_s=10.0,
        )
        for _ in range(2)
    )

    async def work() -> list[str]:
        await first.add(done("a"))
        found = []
        for booted[0], wall[0] in ((109.0, 2e9), (111.0, 5e8)):
            found.append(await kept(second, "a"))
        return found

    assert run(first, work()) == ["a", ""]
    second.database.close()


def test_the_next_store_finds_open_responses_and_their_events(tmp_path: Path) -> None:
    first, second = new_store(tmp_path), new_store(tmp_path)

    async def before() -> None:
        await first.add(waiting("w"))
        await first.add(waiting("v"))
        await first.update("w", b"begun", is_open=True, first=0, events=[b"0", b"1"])
        await first.update("w", b"", is_open=True, first=2, events=[b"2"])
        await first.update("v", b"ended", is_open=False)
        await first.update("v", b"again", is_open=False)

    async def after() -> tuple[list[Record], list[bytes], Record | None]:
        return await second.take_open(), await second.events("w"), await second.get("v")

    asyncio.run(before())  # and nothing closes it
    records, events, ended = run(second, after())
    first.database.close()
    assert records == [waiting("w")._replace(response=b"begun")] and events == [b"0", b"1", b"2"]
    assert ended == Record("v", False, True, b"[]", b"", b"ended")


def test_a_frontend_takes_over_its_predecessors_responses_and_a_share_of_those_without_one(tmp_path: Path) -> None:
    before = [Store(tmp_path, owner) for owner in range(5)]
    now = [Store(tmp_path, owner, api_server_count=2) for owner in range(2)]

    async def work() -> list[list[tuple[str, int]]]:
        for store in before:
            await store.add(waiting(f"of {store._owner}"))
        return [[(record.id, record.owner) for record in await store.take_open()] for store in now]

    taken = asyncio.run(work())
    assert taken == [[("of 0", 0), ("of 2", 0), ("of 4", 0)], [("of 1", 1), ("of 3", 1)]]
    for store in (*before, *now):
        store.database.close()


def test_an_error_names_the_file_that_cannot_be_written(tmp_path: Path) -> None:
    store = new_store(tmp_path / "missing")
    with pytest.raises(InternalError, match=r"missing/state\.sqlite: No such file .*: put it back"):
        run(store, store.add(done("a")))


FULL_DISK = """
import asyncio, sys
from pathlib import Path
from tokenloom.ipc.errors import StorageFull
from tokenloom.tests.frontend.state.test_responses import done, kept, new_store

async def work(folder, has_begun):
    folder.mkdir()
    store = new_store(folder)
    if has_begun:
        await store.add(done("a"))
    with open(folder / "filler", "wb", buffering=0) as filler:
        try:
            while True:
                filler.write(bytes(4096))
        except OSError:
            pass
        for _ in range(2):
            try:
                await store.add(done("b", 100_000))
            except StorageFull as error:
                print(error)
    (folder / "filler").unlink()
    await store.add(done("c", 100_000))
    print(await kept(store, "abc"))
    store.database.close()

for has_begun in (False, True):
    asyncio.run(work(Path(sys.argv[1], str(has_begun)), has_begun))
"""
CAN_MOUNT = subprocess.run(
    ["unshare", "-rm", "mount", "-t", "tmpfs", "tmpfs", "/mnt"], capture_output=True, check=False, timeout=30
)


@pytest.mark.skipif(CAN_MOUNT.returncode != 0, reason="this machine allows no mount in a user namespace")
def test_a_full_disk_is_an_overload_and_afterwards_responses_are_kept_again(tmp_path: Path) -> None:
    """Also if the disk is full when the tables are to be made."""
    mount = f'mount -t tmpfs -o size=9m tmpfs {tmp_path} && exec "$@"'
    command = ["unshare", "-rm", "sh", "-c", mount, "sh", sys.executable, "-P", "-c", FULL_DISK]
    output = subprocess.run([*command, tmp_path], capture_output=True, text=True, timeout=60, check=True)
    *refusals, names = output.stdout.splitlines()
    assert refusals.pop(2) == "c" and names == "ac"
    for refusal in refusals:
        assert "state.sqlite: " in refusal and refusal.endswith("free space or choose another folder")


def test_without_descriptors_or_threads_a_response_is_refused_and_the_next_one_is_kept(tmp_path: Path) -> None:
    store, before = new_store(tmp_path), num_descriptors()

    async def work() -> str:
        with few_threads(), pytest.raises(Overloaded, match="can't start new thread"):
            await store.add(done("a"))
        assert await kept(store, "") == ""
        for num_left in range(3):
            with few_descriptors(num_left), pytest.raises(Overloaded, match=r"Too many open files: raise .*ulimit -n"):
                await store.add(done("b"))
        await store.add(done("c"))
        return await kept(store, "abc")

    assert run(store, work()) == "c" and num_descriptors() <= before
