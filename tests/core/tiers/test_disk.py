"""The disk source on a real disk: blocks that it keeps, damage that it finds, limits and failures."""

from __future__ import annotations

import errno
import os
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tokenloom.core.tiers.disk import DiskSource
from tokenloom.core.tiers.disk_folder import MARKER
from tokenloom.core.tiers.disk_scan import ScannedFile, scan
from tokenloom.core.tiers.object_file import ObjectFiles
from tokenloom.core.tiers.pause import Pause
from tokenloom.core.tiers.source import Namespace
from tokenloom.ipc.process.arena import PAGE
from tokenloom.tests.core.tiers.slots import (
    DEADLINE_S,
    NAMESPACE,
    OBJECT_BYTES,
    SLOT_BYTES,
    disk_with,
    empty,
    files_of,
    filled,
    find,
    key_of,
    load,
    open_disk,
    path_of,
    reopen,
    wait_for_start,
)
from tokenloom.tests.support.shortages import few_threads
from tokenloom.tests.support.waiting import wait_until

YEAR_S = 366 * 86400.0
OTHER = Namespace(key_of(999), b"", (SLOT_BYTES,))


@pytest.mark.parametrize("num_bytes", [SLOT_BYTES, PAGE + 1, 3 * PAGE - 5, 17])
@pytest.mark.parametrize("is_direct", [True, False])
def test_blocks_come_back_into_the_slots_that_ask(tmp_path: Path, num_bytes: int, is_direct: bool) -> None:
    source = open_disk(tmp_path, namespace=NAMESPACE._replace(slot_bytes=(num_bytes,)))
    assert source._view is not None
    source._view.files = ObjectFiles(is_direct)
    assert source.store(filled(range(20), num_bytes=num_bytes)) == [True] * 20
    assert find(source, range(30), num_bytes=num_bytes) == 20
    assert load(source, [3, 1, 19, 0], num_bytes=num_bytes) == [True] * 4
    state = source.state()
    assert (state.num_objects, state.num_written, state.num_read) == (20, 20, 4)
    assert state.held_bytes == sum(path.stat().st_size for path in files_of(tmp_path))


def test_files_are_for_this_user_alone(tmp_path: Path) -> None:
    root = tmp_path / "a" / "b"
    source = open_disk(root)
    source.store(filled(range(3), owner=18_000_000_000_000_000_000))
    folders = [root, *(path for path in root.rglob("*") if path.is_dir())]
    assert {path.stat().st_mode & 0o777 for path in folders} == {0o700}
    assert {path.stat().st_mode & 0o777 for path in root.rglob("*") if path.is_file()} == {0o600}
    assert not list((root / "tmp").iterdir())


def test_a_second_write_of_a_block_is_none(tmp_path: Path) -> None:
    source = open_disk(tmp_path)
    assert source.store(filled([1, 1])) == [True, True]
    assert source.store(filled([1])) == [True]
    assert source.state().num_written == 1 and len(files_of(tmp_path)) == 1


def test_a_restart_finds_everything_and_removes_unfinished_files(tmp_path: Path) -> None:
    source = open_disk(tmp_path)
    source.store(filled(range(50)) + filled(range(50, 60), owner=7))
    source.close()
    torn, strange = tmp_path / "tmp" / key_of(99).hex(), [tmp_path / "stranger", tmp_path / "tmp" / "stranger"]
    for path in (torn, *strange):
        path.write_bytes(b"x" * 100)
    source = open_disk(tmp_path)
    assert find(source, range(60)) == 60 and load(source, range(60)) == [True] * 60
    assert source.state().held_bytes == 60 * OBJECT_BYTES
    assert not torn.exists() and all(path.exists() for path in strange)


def test_a_lookup_during_the_scan_waits_for_it(tmp_path: Path) -> None:
    source = disk_with(tmp_path, range(40))
    source.close()
    go_on = threading.Event()

    def slow_scan(folder: str) -> Iterator[list[ScannedFile]]:
        for number, each in enumerate(scan(folder)):
            assert number != 5 or go_on.wait(DEADLINE_S)
            yield each

    has_started = threading.Event()
    source = DiskSource(tmp_path, 1 << 30, 1.0, has_started.set, slow_scan)
    source.open(NAMESPACE)
    wait_until(lambda: source._view)
    begun = time.monotonic()
    keys = [key_of(number) for number in range(40)]
    assert source.find(keys, SLOT_BYTES, begun + 0.05) < 40 and time.monotonic() >= begun + 0.04
    threading.Timer(0.05, go_on.set).start()
    assert find(source, range(40)) == 40
    assert has_started.wait(DEADLINE_S)


# ── damage ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("size", [0, 1, PAGE, OBJECT_BYTES - 1, OBJECT_BYTES - PAGE])
def test_a_truncated_file_is_missing(tmp_path: Path, size: int) -> None:
    source = disk_with(tmp_path, [1, 2])
    os.truncate(path_of(source, 1), size)
    assert load(source, [1, 2]) == [False, True]
    assert source.state().rejected == {"length": 1}
    source.store(filled([1]))
    os.truncate(path_of(source, 1), size)
    source.close()
    source = open_disk(tmp_path)
    assert find(source, [1]) == 0 and find(source, [2]) == 1, "the scan found it"


def test_a_file_that_someone_removed_is_missing(tmp_path: Path) -> None:
    source = disk_with(tmp_path, [1, 2])
    files_of(tmp_path)[0].unlink()
    assert sorted(load(source, [1, 2])) == [False, True]
    assert source.state().held_bytes == OBJECT_BYTES and source.state().num_failed == 0


# ── limits ───────────────────────────────────────────────────────────────────────────────────────────────────────


def bytes_at_one_instant(root: Path) -> int:
    """Return the bytes of blocks' files that were all there at one instant: in two listings, one after the other."""

    def listing() -> dict[int, int]:
        found = {}
        for folder, _, names in os.walk(root):
            for name in names:
                if name == MARKER:
                    continue
                try:
                    status = os.stat(os.path.join(folder, name))
                except FileNotFoundError:
                    continue
                found[status.st_ino] = status.st_size
        return found

    first, second = listing(), listing()
    return sum(min(first[inode], second[inode]) for inode in first.keys() & second.keys())


def test_the_limit_holds_at_every_instant_of_a_storm(tmp_path: Path) -> None:
    limit = 20 * OBJECT_BYTES + 100
    old = open_disk(tmp_path, namespace=OTHER)
    old.store(filled(range(500, 510)))
    old.close()
    source = open_disk(tmp_path, limit)
    most, has_ended = [0], threading.Event()

    def sample() -> None:
        while not has_ended.is_set():
            most[0] = max(most[0], bytes_at_one_instant(tmp_path), source.state().held_bytes)

    def store(start: int) -> None:
        for number in range(start, start + 100):
            source.store(filled([number], owner=number % 3))
            load(source, [number - 5])

    threads = [threading.Thread(target=store, args=(start,)) for start in (0, 100, 200)]
    sampler = threading.Thread(target=sample)
    for thread in (sampler, *threads):
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    has_ended.set()
    sampler.join(DEADLINE_S)
    assert 15 * OBJECT_BYTES < most[0] <= limit
    assert source.state().num_written == 300 and source.state().num_objects == 20
    assert source.state().held_bytes == sum(path.stat().st_size for path in files_of(tmp_path)) == 20 * OBJECT_BYTES
    assert not list(tmp_path.glob(f"{OTHER.digest.hex()[:16]}*")), "another namespace's objects go first"


def test_the_order_of_use_survives_a_restart(tmp_path: Path) -> None:
    source = disk_with(tmp_path, [1, 2, 3])
    for number, age in ((1, 300), (2, 500), (3, 100)):
        path = path_of(source, number)
        os.utime(path, (time.time() - age,) * 2)
    source.close()
    source = open_disk(tmp_path)
    assert load(source, [2]) == [True], "which writes the time into the file"
    source.close()
    source = open_disk(tmp_path, 2 * OBJECT_BYTES)
    assert [find(source, [number]) for number in (1, 2, 3)] == [0, 1, 1]


def test_a_tenant_takes_its_share_and_no_more(tmp_path: Path) -> None:
    source = open_disk(tmp_path, 10 * OBJECT_BYTES, quota=0.3)
    source.store(filled([1, 2]))
    source.store(filled(range(100, 110), owner=4) + filled([200, 201], owner=5))
    held = [number for number in (1, 2, *range(100, 110), 200, 201) if find(source, [number])]
    assert held == [1, 2, 107, 108, 109, 200, 201]
    source.close()
    source = open_disk(tmp_path, 10 * OBJECT_BYTES, quota=0.1)
    held = [number for number in (1, 2, *range(100, 110), 200, 201) if find(source, [number])]
    assert [each for each in held if each < 100] == [1, 2] and len(held) == 4, "tenants are known after a restart"


def test_another_namespace_sees_nothing_of_the_first_and_clears_its_own_alone(tmp_path: Path) -> None:
    has_started = threading.Event()
    source = DiskSource(tmp_path, 1 << 30, 1.0, has_started.set)
    reopen(source, NAMESPACE, has_started)
    source.store(filled([1, 2]))
    reopen(source, OTHER, has_started)
    assert find(source, [1]) == 0 and source.state().held_bytes == 2 * OBJECT_BYTES
    source.store(filled(range(5), owner=3))
    source.clear()
    assert find(source, [0]) == 0 and source.store(filled([0])) == [True]
    assert source.state().held_bytes == 3 * OBJECT_BYTES and len(files_of(tmp_path)) == 3
    reopen(source, NAMESPACE, has_started)
    assert find(source, [1, 2]) == 2 and load(source, [1, 2]) == [True, True]


# ── errors ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_second_engine_gets_a_closed_source_and_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = disk_with(tmp_path, [1])
    second = open_disk(tmp_path)
    assert not second.state().is_open and "--kv-peers" in second.state().error and str(tmp_path) in second.state().error
    assert find(second, [1]) == 0 and second.store(filled([2])) == [False] and load(second, [1]) == [False]
    assert load(first, [1]) == [True]
    for is_free in (False, True):
        if is_free:
            first.close()
        second._starts._until = 0.0
        second._on_change = (has_started := threading.Event()).set
        assert find(second, [1]) == 0
        wait_for_start(second, has_started)
        assert second.state().is_open == is_free
    assert len([record for record in caplog.records if record.levelname == "ERROR"]) == 1
    assert find(second, [1]) == 1 and second.state().error == "", "after a while it opens"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system with room for five objects."""
    folder = tmp_path / "small"
    folder.mkdir()
    options = ["-t", "tmpfs", "-o", f"mode=700,size={5 * OBJECT_BYTES + 3 * PAGE}", "tmpfs", str(folder)]
    if subprocess.run(["mount", *options], capture_output=True, check=False).returncode:
        pytest.skip("mounting a file system takes root")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk_is_read_only_until_there_is_room(small_disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = open_disk(small_disk)
    (small_disk / "ballast").write_bytes(bytes(2 * OBJECT_BYTES))
    results = source.store(filled(range(8)))
    assert results == [True] * 3 + [False] * 5
    assert load(source, range(3)) == [True] * 3
    state = source.state()
    assert state.is_open and "make room on the disk" in state.error and state.num_dropped == 5
    assert state.held_bytes == 3 * OBJECT_BYTES and not list((small_disk / "tmp").iterdir())
    assert len([record for record in caplog.records if record.levelname == "ERROR"]) == 1
    (small_disk / "ballast").unlink()
    assert source.store(filled([8])) == [False], "it is not tried again at once"
    source._writes._until = 0.0
    assert source.store(filled([8])) == [True] and source.state().error == ""


def test_a_read_only_disk_still_loads(small_disk: Path) -> None:
    source = disk_with(small_disk, [1, 2])
    source.close()
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    source = open_disk(small_disk)
    assert find(source, [1, 2]) == 2 and load(source, [1, 2]) == [True, True]
    assert source.store(filled([3])) == [False] and "mount the disk for writing" in source.state().error
    subprocess.run(["mount", "-o", "remount,rw", str(small_disk)], check=True)


def test_a_failing_disk_is_left_alone_for_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = disk_with(tmp_path, range(5))
    calls = []

    def fail(*arguments: object) -> int:
        calls.append(arguments)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", fail)
        assert load(source, range(5)) == [False] * 5
    assert len(calls) == 3 and find(source, [0]) == 0, "after three failures it is not asked"
    state = source.state()
    assert state.is_broken and state.num_failed == 3 and "Input/output error" in state.error
    source._reads._until = 0.0
    assert find(source, range(5)) == 5 and load(source, range(5)) == [True] * 5
    assert not source.state().is_broken and source.state().error == ""


def test_no_read_begins_after_the_deadline(tmp_path: Path) -> None:
    source = disk_with(tmp_path, [1])
    item, results = empty([1])[0], []
    source.load([item], time.monotonic() - 1, lambda index, is_good: results.append((index, is_good)))
    assert results == [(0, False)] and item.slot == b"\xee" * SLOT_BYTES


def test_a_folder_that_cannot_be_made_closes_the_source(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    source = open_disk(tmp_path / "file" / "root")
    assert not source.state().is_open and source.store(filled([1])) == [False]
    assert "Not a directory" in source.state().error


def test_a_limit_below_one_block_is_an_error_with_its_remedy(tmp_path: Path) -> None:
    source = open_disk(tmp_path, OBJECT_BYTES - 1)
    assert source.store(filled([1])) == [False] and files_of(tmp_path) == []
    assert source.state().error.endswith(f"a block takes {OBJECT_BYTES} bytes: raise --kv-disk-bytes")


@pytest.mark.nightly
def test_a_scan_of_100000_files_costs_three_times_their_listing(tmp_path: Path) -> None:
    """Of the mean of a listing before it and one after: CPU time, too, depends on the load of the machine."""

    def listing_s() -> float:
        begun = time.process_time()
        for entry in os.scandir(folder):
            for file in os.scandir(entry.path):
                file.stat()
        return time.process_time() - begun

    open_disk(tmp_path).close()  # which makes the folder ours
    folder = tmp_path / NAMESPACE.digest.hex()[:16]
    for number in range(100_000):
        name = key_of(number).hex()
        path = folder / name[:2] / name
        if number < 5000:
            path.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
        os.ftruncate(fd, PAGE)
        os.close(fd)
    before_s, begun = listing_s(), time.process_time()
    source = open_disk(tmp_path, namespace=NAMESPACE._replace(slot_bytes=(0,)))
    scan_s = time.process_time() - begun
    mean_s = (before_s + listing_s()) / 2
    assert source.state().num_objects == 100_000
    assert scan_s < 3 * mean_s, f"{scan_s:.2f} s against {mean_s:.2f} s of CPU"


def test_a_folder_that_no_thread_can_open_is_opened_by_a_later_lookup(tmp_path: Path) -> None:
    before = disk_with(tmp_path, range(3))
    before.close()
    has_started = threading.Event()
    source = DiskSource(tmp_path, 1 << 30, 1.0, has_started.set)
    with few_threads():
        source.open(NAMESPACE)
        assert find(source, range(3)) == 0 and "no thread can be started" in source.state().error
    source._starts = Pause(1, 0.0)  # the pause is over
    source._starts.failed()
    has_started.clear()
    assert find(source, range(3)) == 0
    wait_for_start(source, has_started)
    assert find(source, range(3)) == 3 and not source.state().error


@pytest.mark.parametrize("jump_s", [YEAR_S, -YEAR_S])
def test_a_clock_that_jumps_neither_removes_blocks_nor_keeps_them_for_ever(tmp_path: Path, jump_s: float) -> None:
    source = disk_with(tmp_path, [1, 2, 3])
    for number, age in ((1, 300), (2, 200), (3, 100)):
        path = path_of(source, number)
        os.utime(path, (time.time() - age - jump_s,) * 2)
    source.close()
    source = open_disk(tmp_path)
    assert find(source, [1, 2, 3]) == 3
    source.store(filled([4]))
    source.close()
    source = open_disk(tmp_path, 3 * OBJECT_BYTES)
    assert [find(source, [number]) for number in (1, 2, 3, 4)] == [0, 1, 1, 1], "the oldest goes, not the newest"
