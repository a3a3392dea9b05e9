"""A store returns exactly the bytes that were put, keeps its limit, and keeps blobs in use."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import itertools
import os
import random
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tokenloom.ipc.blobs.folder import BlobFile
from tokenloom.ipc.blobs.store import BlobStore
from tokenloom.ipc.blobs.writer import BlobWriter
from tokenloom.ipc.errors import ConfigError, Overloaded, RequestError
from tokenloom.tests.ipc.blobs import child
from tokenloom.tests.support.waiting import wait_until

MISSING = bytes(32)
YEAR_NS = 366 * 86400 * 10**9


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "blobs"


def content(store: BlobStore, digest: bytes) -> bytes | None:
    blob = store.open(digest)
    return None if blob is None else bytes(blob)


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} - {"lock"}


def as_file(data: bytes, tmp_path: Path) -> Path:
    path = tmp_path / "source"
    path.write_bytes(data)
    return path


SOURCES: dict[str, Callable[[bytes, Path], bytes | Path | Iterator[bytes]]] = {
    "bytes": lambda data, tmp_path: data,
    "file": as_file,
    "chunks": lambda data, tmp_path: iter([data[:7], b"", data[7:]]),
}


@pytest.mark.parametrize("source", SOURCES.values(), ids=list(SOURCES))
@pytest.mark.parametrize("data", [b"", b"a few bytes of a blob", bytes(range(256)) * 9000], ids=len)
def test_every_source_gives_the_same_private_file_once(
    folder: Path, tmp_path: Path, data: bytes, source: Callable[[bytes, Path], bytes | Path | Iterator[bytes]]
) -> None:
    store = BlobStore(folder, 1 << 23)
    digest = store.put(source(data, tmp_path))
    assert digest == hashlib.sha256(data).digest()
    inode = (folder / digest.hex()).stat().st_ino
    assert store.put(source(data, tmp_path)) == digest
    assert content(store, digest) == data and store.num_bytes() == len(data)
    assert names(folder) == {digest.hex()}
    assert (folder / digest.hex()).stat().st_ino == inode, "a pin of another process holds the first file"
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}


def test_a_blob_is_read_only_and_a_missing_one_is_none(folder: Path) -> None:
    store = BlobStore(folder, 100)
    assert store.open(MISSING) is None and not store.pin(MISSING, "a")
    assert not folder.exists(), "only a put creates the folder"
    blob = store.open(store.put(b"abc"))
    assert blob is not None and blob.readonly
    for digest in (b"", b"lock", b"\x00" * 31, b"../" * 10):
        assert store.open(digest) is None and not store.pin(digest, "a")


@pytest.mark.parametrize("damage", ["flipped bit", "shorter", "longer", "empty"])
def test_a_damaged_blob_is_removed_counted_and_missing_until_it_is_put_again(folder: Path, damage: str) -> None:
    data = random.Random(1).randbytes(5000)
    digest = BlobStore(folder, 1 << 20).put(data)
    path = folder / digest.hex()
    flipped = bytearray(data)
    flipped[4321] ^= 4
    path.write_bytes(
        {"flipped bit": bytes(flipped), "shorter": data[:-1], "longer": data + b"\0", "empty": b""}[damage]
    )
    store = BlobStore(folder, 1 << 20)
    assert store.open(digest) is None and store.num_corrupt == 1
    assert names(folder) == set()
    path.write_bytes(flipped)
    assert store.put(data, "user") == digest and store.num_corrupt == 2
    assert content(store, digest) == data
    store.unpin(digest, "user")


def test_a_pin_of_a_damaged_blob_holds_the_one_that_replaces_it_after_the_next_pin(folder: Path) -> None:
    store = BlobStore(folder, 10)
    digest = store.put(b"12345", "a")
    (folder / digest.hex()).write_bytes(b"1234x")
    assert BlobStore(folder, 10).open(digest) is None
    assert not store.pin(digest, "b")
    store.put(b"12345")
    assert store.pin(digest, "b")
    store.unpin(digest, "b")
    with pytest.raises(Overloaded):
        store.put(b"6789ab")  # "a" still holds it
    store.unpin(digest, "a")


def test_content_is_hashed_once_for_each_identity(folder: Path) -> None:
    store = BlobStore(folder, 100)
    digest = store.put(b"right")
    path = folder / digest.hex()
    mtime_ns = path.stat().st_mtime_ns
    path.write_bytes(b"wrong")
    os.utime(path, ns=(mtime_ns, mtime_ns))
    assert content(store, digest) == b"wrong", "inode, size and mtime are equal, so it is not read again"
    assert BlobStore(folder, 100).open(digest) is None
    assert content(store, digest) is None


def test_the_least_recently_used_blob_goes_first_even_if_another_process_used_it(folder: Path) -> None:
    clock = itertools.count(time.time_ns(), 10**9)
    store, other = (BlobStore(folder, 30, clock.__next__) for _ in range(2))
    a, b, c = (store.put(letter * 10) for letter in (b"a", b"b", b"c"))
    assert content(other, a) is not None
    assert other.pin(b, "x")
    other.unpin(b, "x")
    d = store.put(b"d" * 10)
    assert [content(store, digest) is not None for digest in (a, b, c, d)] == [True, True, False, True]
    assert store.folder.num_evicted == 1


def test_links_are_never_followed_and_their_targets_stay(folder: Path, tmp_path: Path) -> None:
    precious, store = tmp_path / "precious", BlobStore(folder, 30)
    precious.write_bytes(b"12345")
    (folder / store.put(b"12345").hex()).unlink()
    (folder / hashlib.sha256(b"12345").hexdigest()).symlink_to(precious)
    for use in (store.put, lambda data: store.open(hashlib.sha256(data).digest())):
        with pytest.raises(ConfigError, match="is a link, which is never followed: remove it"):
            use(b"12345")
    (folder / "lock").unlink()
    (folder / "lock").symlink_to(precious)
    with pytest.raises(OSError):
        store.put(b"6")
    assert precious.read_bytes() == b"12345"


@pytest.mark.parametrize("jump_ns", [YEAR_NS, -YEAR_NS])
def test_a_clock_that_jumps_keeps_the_order_of_use(folder: Path, jump_ns: int) -> None:
    clock = itertools.count(time.time_ns(), 10**9)
    store = BlobStore(folder, 30, clock.__next__)
    a, b = (store.put(letter * 10) for letter in (b"a", b"b"))
    clock = itertools.count(next(clock) + jump_ns, 10**9)
    store = BlobStore(folder, 30, clock.__next__)
    c, d = (store.put(letter * 10) for letter in (b"c", b"d"))
    assert [content(store, digest) is not None for digest in (a, b, c, d)] == [False, True, True, True]
    e = store.put(b"e" * 10)
    assert [content(store, digest) is not None for digest in (b, c, d, e)] == [False, True, True, True]


def test_an_unfinished_blob_counts_with_its_reserved_size(folder: Path) -> None:
    store = BlobStore(folder, 30)
    with contextlib.closing(BlobWriter(store.folder, 25)), pytest.raises(Overloaded):
        store.put(b"n" * 6)
    store.put(b"n" * 6)
    with contextlib.closing(BlobWriter(store.folder)) as writer:
        writer.write(b"k" * 20)
        writer.write(b"k" * 10)
        assert store.num_bytes() == 30, "the other blob made room"
        with pytest.raises(RequestError):
            writer.write(b"k")
        store.add(writer)
    assert len(names(folder)) == 1


def test_the_limit_holds_if_a_blob_is_pinned_between_its_choice_and_its_eviction(folder: Path) -> None:
    store, other = BlobStore(folder, 30), BlobStore(folder, 30)
    oldest = store.put(b"a" * 10)
    store.put(b"b" * 10)
    store.put(b"c" * 10)
    evict = store.folder._evict

    def pin_and_evict(file: BlobFile, is_trial: bool = False) -> bool:
        if not is_trial and file.name == oldest.hex():
            assert other.pin(oldest, "other")
        return evict(file, is_trial)

    store.folder._evict = pin_and_evict
    store.put(b"d" * 20)
    assert store.num_bytes() == 30 and content(store, oldest) == b"a" * 10
    other.unpin(oldest, "other")


def test_a_blob_that_is_evicted_while_it_is_opened_is_missing(folder: Path) -> None:
    store = BlobStore(folder, 30)
    digest = store.put(b"abc")
    with (folder / digest.hex()).open("rb") as evictor, ThreadPoolExecutor(1) as pool:
        fcntl.flock(evictor, fcntl.LOCK_EX)
        opened = pool.submit(store.open, digest)
        inode = f":{os.fstat(evictor.fileno()).st_ino} "
        locks = Path("/proc/locks")
        wait_until(lambda: any("->" in line and inode in line for line in locks.read_text().splitlines()))
        assert not opened.done()
        (folder / digest.hex()).unlink()
        fcntl.flock(evictor, fcntl.LOCK_UN)
        assert opened.result(timeout=30) is None


def test_neither_a_late_writer_nor_a_late_check_touches_the_file_of_another_process(folder: Path) -> None:
    store, other = BlobStore(folder, 30), BlobStore(folder, 30)
    with contextlib.closing(BlobWriter(store.folder)) as writer:
        writer.write(b"abc")
        digest = other.put(b"abc", "user")
        inode = (folder / digest.hex()).stat().st_ino
        assert not writer.publish(), "the other one is pinned"
        assert not store.folder.remove(digest.hex(), writer.fd), "it replaced the damaged one"
        store.add(writer)
    assert (folder / digest.hex()).stat().st_ino == inode and names(folder) == {digest.hex()}
    other.unpin(digest, "user")


def test_a_source_that_fails_leaves_no_file(folder: Path) -> None:
    def chunks() -> Iterator[bytes]:
        yield b"abc"
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        BlobStore(folder, 30).put(chunks())
    assert names(folder) == set()


def test_a_folder_that_others_can_read_is_refused_with_the_remedy(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    with pytest.raises(ConfigError, match="chmod 700"):
        BlobStore(tmp_path, 30).put(b"a")


def test_files_of_others_in_the_folder_are_left_alone(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    (folder / "notes").write_bytes(bytes(100))
    store = BlobStore(folder, 30)
    store.put(b"a" * 30)
    store.put(b"b" * 30)
    assert (folder / "notes").stat().st_size == 100 and store.num_bytes() == 30


@pytest.mark.parametrize("holds", ["store.pin(digest, 'request 1')", "blob = store.open(digest)"])
def test_a_pin_and_a_mapping_end_with_their_process(folder: Path, holds: str) -> None:
    code = (
        f"store = BlobStore(Path(sys.argv[1]), 10); digest = store.put(b'0123456789'); {holds}\n"
        "print('ready', flush=True); sys.stdin.read()"
    )
    store = BlobStore(folder, 10)
    with child.started(code, folder) as process:
        with pytest.raises(Overloaded):
            store.put(b"x" * 10)
        process.kill()
        process.wait(timeout=30)
        store.put(b"x" * 10)
    assert names(folder) == {hashlib.sha256(b"x" * 10).hexdigest()}


def test_a_process_killed_during_a_put_leaves_nothing_that_counts(folder: Path) -> None:
    code = (
        "import itertools; store = BlobStore(Path(sys.argv[1]), 1 << 30); print('ready', flush=True)\n"
        "for i in itertools.count(): store.put(i.to_bytes(4, 'big') * 200_000, 'user')"
    )
    random_times = random.Random(18)
    for _ in range(4):
        with child.started(code, folder) as process:
            stop = time.monotonic() + random_times.uniform(0, 0.02)
            while time.monotonic() < stop or not folder.exists():
                assert process.poll() is None
            process.kill()
            process.wait(timeout=30)
        for name in [name for name in names(folder) if not name.endswith(".part")]:
            assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == name
    store = BlobStore(folder, 1000)
    store.put(b"a" * 1000)
    assert names(folder) == {hashlib.sha256(b"a" * 1000).hexdigest()}


def test_processes_that_put_and_read_the_same_blobs_at_once_agree(folder: Path) -> None:
    code = (
        "import random; store = BlobStore(Path(sys.argv[1]), 100_000); rng = random.Random(int(sys.argv[2]))\n"
        "from tokenloom.ipc.errors import Overloaded\n"
        "for turn in range(300):\n"
        "    data = bytes([rng.randrange(9)]) * 15_000\n"
        "    digest = store.put(data if turn % 2 else iter([data]), 'pin')\n"
        "    assert store.open(digest) == data\n"
        "    with store.folder.locked(): assert store.num_bytes() <= 100_000\n"
        "    store.unpin(digest, 'pin')\n"
        "print(store.num_corrupt)"
    )
    command = [sys.executable, "-P", "-c", child.IMPORTS + code, str(folder)]
    pipe = subprocess.PIPE
    processes = [subprocess.Popen([*command, str(i)], cwd="/", stdout=pipe, text=True) for i in range(3)]
    assert [process.communicate(timeout=60)[0] for process in processes] == ["0\n"] * 3
    assert {(folder / name).stat().st_size for name in names(folder)} == {15_000} and len(names(folder)) <= 6


def test_a_file_that_cannot_be_written_leaves_nothing(folder: Path) -> None:
    code = (
        "import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, resource.RLIM_INFINITY))\n"
        "store = BlobStore(Path(sys.argv[1]), 1 << 20)\n"
        "try: store.put(bytes(20_000))\n"
        "except OSError as error: print(error.errno)"
    )
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[1] == resource.RLIM_INFINITY
    assert child.run(code, folder) == "27\n"  # EFBIG
    assert names(folder) == set()


CAN_MOUNT = subprocess.run(
    ["unshare", "-rm", "mount", "-t", "tmpfs", "tmpfs", "/mnt"], capture_output=True, check=False, timeout=30
)


@pytest.mark.skipif(CAN_MOUNT.returncode != 0, reason="this machine allows no mount in a user namespace")
@pytest.mark.parametrize("source", ["bytes(500_000)", "iter([bytes(100_000)] * 5)"])
def test_a_full_disk_is_an_overload_and_leaves_no_half_file(tmp_path: Path, source: str) -> None:
    code = (
        "from tokenloom.ipc.errors import Overloaded; folder = Path(sys.argv[1]) / 'b'\n"
        "store = BlobStore(folder, 1 << 20); kept = store.put(bytes(100), 'x')\n"
        f"try: store.put({source})\n"
        "except Overloaded as error: print(error)\n"
        "print(len(list(folder.iterdir())), store.open(kept) == bytes(100))"
    )
    mount = ("unshare", "-rm", "sh", "-c", f'mount -t tmpfs -o size=256k tmpfs {tmp_path} && exec "$@"', "sh")
    refusal, state = child.run(code, tmp_path, prefix=mount).splitlines()
    assert "No space left on device: free space or choose another folder" in refusal
    assert state == "2 True"


def test_a_full_store_of_many_blobs_is_seldom_listed(folder: Path) -> None:
    store, listings = BlobStore(folder, 1000 * 100), list[int]()
    list_files = store.folder.files

    def count_and_list() -> list[BlobFile]:
        listings.append(len(found := list_files()))
        return found

    store.folder.files = count_and_list
    for number in range(2000):
        store.put(number.to_bytes(100, "little"))
        if number % 100 == 0:
            BlobWriter(store.folder, size=50).close()
    assert 10 < len(listings) <= 25 and max(listings) > 900
    assert 900 * 100 < store.num_bytes() <= 1000 * 100
    newest = [hashlib.sha256(number.to_bytes(100, "little")).digest() for number in range(1100, 2000)]
    assert all(store.open(digest) is not None for digest in newest)


def test_a_lost_count_of_bytes_is_made_anew(folder: Path) -> None:
    store = BlobStore(folder, 100)
    store.put(b"a" * 60)
    (folder / "lock").unlink()
    store.put(b"b" * 60)
    assert store.num_bytes() == 60
