"""Run directories are private, locked, and removed after their engine's death; an address in use is detected."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq

from tokenloom.ipc.blobs.store import BlobStore
from tokenloom.ipc.errors import ConfigError
from tokenloom.ipc.sockets import addresses
from tokenloom.ipc.sockets.addresses import (
    MAX_IPC_PATH_BYTES,
    RunDirectory,
    check_ipc_address,
    lock_ipc_address,
    remove_abandoned,
    set_socket_mode,
    sweep,
    unlink_ipc_address,
)
from tokenloom.ipc.sockets.endpoints import Endpoints
from tokenloom.ipc.sockets.zmq_sockets import bind, new_socket


@pytest.fixture
def lock() -> Iterator[Callable[..., None]]:
    """Lock addresses until the end of the test."""
    fds: list[int] = []
    yield lambda address, **options: fds.append(lock_ipc_address(address, **options))
    for fd in fds:
        os.close(fd)


@pytest.fixture(autouse=True)
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path


def test_a_run_directory_is_private_until_it_is_removed_with_its_blobs(runtime: Path) -> None:
    directory = RunDirectory.create()
    assert not directory.blobs.exists(), "only a put creates the folder"
    BlobStore(directory.blobs, 100).put(b"a blob")
    assert directory.blobs.parent == directory.path
    assert directory.path.parent == runtime / "tokenloom"
    assert directory.path.stat().st_mode & 0o777 == 0o700
    assert Endpoints.in_folder(directory.path).core == f"ipc://{directory.path}/core.sock"
    directory.remove()
    directory.remove()
    assert not directory.path.exists()


def test_a_start_removes_only_the_directories_of_dead_engines(runtime: Path) -> None:
    alive = RunDirectory.create()
    code = "from tokenloom.ipc.sockets.addresses import RunDirectory; print(RunDirectory.create().path)"
    dead = Path(subprocess.check_output([sys.executable, "-c", code], text=True, timeout=30, cwd="/").strip())
    assert dead.exists()
    (runtime / "tokenloom" / "not-a-run").mkdir()
    assert sweep(alive.path.parent) == 1
    assert not dead.exists() and alive.path.exists() and (runtime / "tokenloom" / "not-a-run").exists()
    alive.remove()


def test_an_abandoned_directory_goes_although_a_process_still_makes_files(tmp_path: Path) -> None:
    path = tmp_path / "run"
    path.mkdir()
    stop_at = time.monotonic() + 0.2

    def make_files() -> None:
        while time.monotonic() < stop_at:
            with contextlib.suppress(OSError):
                for number in range(50):
                    (path / str(number)).touch()

    threads = [threading.Thread(target=make_files) for _ in range(4)]
    for thread in threads:
        thread.start()
    remove_abandoned(path)
    assert not path.exists()
    for thread in threads:
        thread.join()


def test_a_base_that_others_can_read_or_that_cannot_be_created_is_one_line_with_the_remedy(runtime: Path) -> None:
    base = runtime / "tokenloom"
    base.mkdir(mode=0o755)
    with pytest.raises(ConfigError, match="0700"):
        RunDirectory.create()
    base.rmdir()
    base.write_text("a file")
    with pytest.raises(ConfigError, match=r"cannot make a run directory: .*exists.*: set XDG_RUNTIME_DIR"):
        RunDirectory.create()


@pytest.mark.parametrize("num_replicas", [1, 64])
@pytest.mark.parametrize("num_bytes_over", [0, 1])
def test_a_path_is_refused_if_the_longest_socket_name_does_not_fit(
    runtime: Path, monkeypatch: pytest.MonkeyPatch, num_bytes_over: int, num_replicas: int
) -> None:
    name = "workers-999999.sock" if num_replicas == 1 else "replica-63-workers-999999.sock"
    rest = MAX_IPC_PATH_BYTES - len(f"{runtime}//tokenloom/01234567/{name}") + num_bytes_over
    deep = runtime / ("d" * rest)
    deep.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(deep))
    if num_bytes_over:
        with pytest.raises(ConfigError, match="too long for sockets"):
            RunDirectory.create(num_replicas)
        assert list((deep / "tokenloom").glob("[0-9a-f]*")) == []
        return
    directory = RunDirectory.create(num_replicas)
    with zmq.Context() as context, new_socket(context, zmq.PULL) as socket:
        places = Endpoints.in_folder(directory.path).of_replica(num_replicas - 1)
        for address in (places.control, *(find(999999) for find in (places.steps_of, places.results_of))):
            socket.bind(address)
        socket.bind(places.tier_of(999999))
    directory.remove()


def test_an_address_in_use_is_refused_and_a_free_one_is_reused(runtime: Path, lock: Callable[..., None]) -> None:
    address = f"ipc://{runtime}/mine.sock"
    lock(address)
    with pytest.raises(ConfigError, match="in use"):
        lock(address)
    unlink_ipc_address(address)
    lock(address)
    with pytest.raises(ConfigError, match="cannot listen"):
        lock(f"ipc://{runtime}/missing/mine.sock")


def test_other_files_and_sockets_are_never_replaced(runtime: Path, lock: Callable[..., None]) -> None:
    taken = runtime / "taken"
    taken.write_text("precious")
    with pytest.raises(ConfigError, match="there is a file: remove it or choose another"):
        lock(f"ipc://{taken}")
    assert taken.read_text() == "precious"
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.bind(str(runtime / "socket"))
        stranger.listen()
        with pytest.raises(ConfigError, match="another program listens there"):
            lock(f"ipc://{runtime}/socket", farewell_s=0.1)
    lock(f"ipc://{runtime}/socket")  # its program has ended
    assert sorted(path.name for path in runtime.iterdir()) == ["socket", "socket.lock", "taken"]


def test_without_a_runtime_directory_the_base_is_in_temp(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    monkeypatch.setattr(addresses.tempfile, "tempdir", str(tmp_path))
    assert addresses.base_directory().parent == tmp_path


@pytest.mark.parametrize("umask", [0o000, 0o002, 0o022, 0o077])
@pytest.mark.parametrize("mode", [0o600, 0o660, 0o666])
def test_an_ipc_socket_has_its_mode_whatever_the_umask(runtime: Path, umask: int, mode: int) -> None:
    path, before = runtime / "engine.sock", os.umask(umask)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    listener = new_socket(context, zmq.ROUTER)
    try:
        door = bind(listener, f"ipc://{path}", mode)
        assert door is not None and stat.S_IMODE(path.stat().st_mode) == mode and os.umask(umask) == umask
        door.close()
    finally:
        os.umask(before)
        listener.close()
        context.term()


def test_a_mode_is_not_set_on_anything_but_a_socket(runtime: Path) -> None:
    (runtime / "file").write_text("precious")
    (runtime / "file").chmod(0o640)
    (runtime / "link").symlink_to(runtime / "file")
    for name in ("file", "link"):
        with pytest.raises(OSError):
            set_socket_mode(runtime / name, 0o666)
    assert stat.S_IMODE((runtime / "file").stat().st_mode) == 0o640


@pytest.mark.parametrize("is_link", [False, True])
def test_a_file_with_the_name_of_the_lock_is_refused_and_kept(runtime: Path, is_link: bool) -> None:
    lock, precious = runtime / "thesis.tex.lock", runtime / "precious"
    precious.write_text("precious")
    if is_link:
        lock.symlink_to(precious)
    else:
        lock.write_text("precious")
    with pytest.raises(ConfigError, match=r"thesis\.tex\.lock is not ours"):
        lock_ipc_address(f"ipc://{runtime}/thesis.tex")
    assert lock.read_text() == precious.read_text() == "precious" and lock.is_symlink() == is_link


def test_an_engine_ends_although_its_folder_is_gone_or_files_have_taken_the_place_of_ours(runtime: Path) -> None:
    names = ["engine.sock", "engine.sock.lock"]
    for name in names:
        (runtime / name).write_text("precious")
    for folder in (".", "engine.sock", "gone"):
        unlink_ipc_address(f"ipc://{runtime}/{folder}/engine.sock")
    assert sorted(each.name for each in runtime.iterdir()) == names


def test_a_bind_that_would_replace_a_file_is_refused(runtime: Path) -> None:
    path = runtime / "thesis.tex"
    check_ipc_address(f"ipc://{path}", "--kv-events")
    path.write_text("precious")
    with pytest.raises(ConfigError, match="there is a file: remove it or choose another --kv-events address"):
        check_ipc_address(f"ipc://{path}", "--kv-events")
