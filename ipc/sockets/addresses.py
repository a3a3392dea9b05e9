"""The run directory of an engine: socket paths, ownership by a lock, removal of dead engines' directories.

Path: <base>/<8 hex>, mode 0700; <base> is $XDG_RUNTIME_DIR/tokenloom or a per-user folder in the temp directory. The
directory holds `lock`, the sockets (Endpoints), the EngineRecord, and the files and folders of the engine's processes,
such as frontend-N.reading and media/; names of replica N > 0 start with replica-N-. The owner holds a flock on `lock`
while it lives; if the lock is free, the engine is dead.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import re
import secrets
import shutil
import socket
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from ..errors import ConfigError
from .endpoints import Endpoints

MAX_IPC_PATH_BYTES = 107  # sizeof(sockaddr_un.sun_path) - 1
LAST_GENERATION = 999_999  # whose sockets have the longest names
FAREWELL_S = 3.0  # the frontend of a killed engine may listen for this long after the kill
LAST_FILES_S = 1.0
_LISTENS = "another program listens there"
_NAME = re.compile(r"[0-9a-f]{8}")


def base_directory() -> Path:
    """Return the per-user folder of run directories; create it with mode 0700. ConfigError if it is open to others."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and os.path.isdir(runtime) and os.access(runtime, os.W_OK):
        base = Path(runtime) / "tokenloom"
    else:
        base = Path(tempfile.gettempdir()) / f"tokenloom-{os.getuid()}"
    base.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = base.lstat()
    if status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise ConfigError(f"{base} must belong to this user with mode 0700: remove it or set XDG_RUNTIME_DIR")
    return base


class RunDirectory:
    """One engine's directory, locked by the process that created it until that process ends."""

    def __init__(self, path: Path, lock_fd: int | None = None) -> None:
        self.path = path
        self._lock_fd = lock_fd

    @classmethod
    def create(cls, num_replicas: int = 1) -> RunDirectory:
        """Create and lock a directory, with room for the names of the sockets of so many replicas; remove those of dead
        engines. ConfigError if no directory can be used."""
        try:
            base = base_directory()
            with _locked(base):  # or another engine's sweep could remove the directory between mkdir and lock
                sweep(base)
                path = base / secrets.token_hex(4)
                path.mkdir(mode=0o700)
                lock_fd = _try_lock(path / "lock")
        except OSError as error:
            raise ConfigError(
                f"cannot make a run directory: {error}: set XDG_RUNTIME_DIR to a folder that can be written"
            ) from None
        directory = cls(path, lock_fd)
        longest = Endpoints.in_folder("").of_replica(num_replicas - 1).steps_of(LAST_GENERATION)
        most = MAX_IPC_PATH_BYTES - len(longest.removeprefix("ipc://"))
        if len(os.fsencode(path)) > most:
            directory.remove()
            raise ConfigError(f"{path} is too long for sockets (at most {most} bytes): set XDG_RUNTIME_DIR")
        return directory

    @property
    def blobs(self) -> Path:
        """Folder for a BlobStore in this directory, created by its first put."""
        return self.path / "blobs"

    def remove(self) -> None:
        """Delete the directory, if it still exists, and release its lock."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None


def map_file(path: Path, num_bytes: int) -> mmap.mmap:
    """Open or create a file of a run directory, and return its mapping. ConfigError if the disk has no room for it.

    Disk space for all bytes is allocated at once: on a full disk, a store to a hole would end the process (SIGBUS)."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(fd, 0, num_bytes)
        return mmap.mmap(fd, num_bytes)
    except OSError as error:
        raise ConfigError(
            f"the run directory cannot hold the {num_bytes} bytes of {path}: {error.strerror}: make room, or set "
            "XDG_RUNTIME_DIR to a folder elsewhere"
        ) from None
    finally:
        os.close(fd)


def remove_abandoned(path: Path) -> None:
    """Delete the directory of an engine that has lost its supervisor. The engine's other processes are ending too and
    may still create files in it, so retry for up to LAST_FILES_S."""
    deadline = time.monotonic() + LAST_FILES_S
    shutil.rmtree(path, ignore_errors=True)
    while path.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
        shutil.rmtree(path, ignore_errors=True)


def sweep(base: Path) -> int:
    """Remove the directories of dead engines; return their number."""
    num_removed = 0
    for path in base.iterdir():
        if not _NAME.fullmatch(path.name):
            continue
        with contextlib.suppress(FileNotFoundError):  # its own processes may remove it at the same time
            lock_fd = _try_lock(path / "lock")
            if lock_fd is not None:
                shutil.rmtree(path, ignore_errors=True)
                os.close(lock_fd)
                num_removed += 1
    return num_removed


def live_directories() -> list[Path]:
    """Return the run directories of this user whose engines live; a start at this moment is waited for."""
    base = base_directory()
    found: list[Path] = []
    with _locked(base):  # a test of the lock must not meet an engine that takes it
        for path in sorted(base.iterdir()):
            if not _NAME.fullmatch(path.name) or not (path / "lock").exists():
                continue
            with contextlib.suppress(FileNotFoundError):  # the engine may remove its directory at this moment
                lock_fd = _try_lock(path / "lock")
                if lock_fd is None:
                    found.append(path)
                else:
                    os.close(lock_fd)
    return found


def lock_ipc_address(address: str, option: str = "--listen", farewell_s: float = FAREWELL_S) -> int:
    """Lock the ipc path that the operator chose with `option`; return the lock's descriptor, to be kept open.
    If another program listens at the path, wait up to `farewell_s` until it stops. ConfigError if it does not, if
    another engine holds the lock, or if the path cannot be used.

    The lock shows whether an address is in use: a second bind in ZeroMQ takes over an ipc path without an error.
    """
    path = Path(address.removeprefix("ipc://"))
    lock = _lock_of(path)
    if len(os.fsencode(path)) > MAX_IPC_PATH_BYTES:
        raise ConfigError(f"{path} has {len(os.fsencode(path))} bytes, a socket path holds {MAX_IPC_PATH_BYTES}")
    if lock.is_symlink() or (lock.exists() and not _is_empty_file(lock)):
        raise ConfigError(f"cannot listen on {address}: {lock} is not ours: choose another {option} address")
    try:
        lock_fd = _try_lock(lock)
    except OSError as error:
        raise ConfigError(f"cannot listen on {address}: {error.strerror} ({path.parent})") from None
    if lock_fd is None:
        raise ConfigError(f"{address} is in use by another engine: stop it or choose another {option} address")
    deadline = time.monotonic() + farewell_s
    while (found := _foreign(path)) == _LISTENS and time.monotonic() < deadline:
        time.sleep(0.05)
    if found:
        lock.unlink()
        os.close(lock_fd)
        raise ConfigError(f"cannot listen on {address}: {found}: remove it or choose another {option} address")
    return lock_fd


def check_ipc_address(address: str, option: str) -> None:
    """Raise ConfigError if a bind would replace a file, or take the address of a program that listens there; ZeroMQ
    does both without an error."""
    if found := _foreign(Path(address.removeprefix("ipc://"))):
        raise ConfigError(f"cannot listen on {address}: {found}: remove it or choose another {option} address")


def _lock_of(path: Path) -> Path:
    return path.with_name(path.name + ".lock")


def _is_empty_file(path: Path) -> bool:
    status = path.lstat()
    return stat.S_ISREG(status.st_mode) and status.st_size == 0


def _foreign(path: Path) -> str:
    """Return why our socket must not replace `path`; "" if there is nothing or a socket without a listener."""
    if not path.is_symlink() and not path.exists():
        return ""
    if path.is_symlink() or not path.is_socket():
        return "there is a file"
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        is_dead = probe.connect_ex(str(path)) == errno.ECONNREFUSED
    return "" if is_dead else _LISTENS


def unlink_ipc_address(address: str) -> None:
    """Remove the sockets and the lock file of an ipc address that this process owned. Files that are no sockets, and a
    lock file with content, stay; errors of the file system are ignored."""
    path = Path(address.removeprefix("ipc://"))
    with contextlib.suppress(OSError):
        unlink_socket(path)
        unlink_socket(closed_name(path))
    with contextlib.suppress(OSError):
        if _is_empty_file(_lock_of(path)):
            _lock_of(path).unlink()


def closed_name(path: Path) -> Path:
    """Return the path that a socket has while it accepts no connections."""
    return path.with_name(path.name + ".closed")


def admits_nobody(address: str) -> bool:
    """Return whether the listener at an ipc address accepts no connections because few descriptors are left (see
    Door)."""
    return closed_name(Path(address.removeprefix("ipc://"))).is_socket()


def unlink_socket(path: Path) -> None:
    """Remove a socket file; leave any other file, and do nothing if there is none."""
    with contextlib.suppress(FileNotFoundError):
        if stat.S_ISSOCK(path.lstat().st_mode):
            path.unlink()


def set_socket_mode(path: str | Path, mode: int) -> None:
    """Set the permissions of a socket file; OSError if `path` is not a socket, or is a link to one."""
    fd = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if not stat.S_ISSOCK(os.fstat(fd).st_mode):
            raise OSError(errno.ENOTSOCK, os.strerror(errno.ENOTSOCK), str(path))
        os.chmod(f"/proc/self/fd/{fd}", mode)
    finally:
        os.close(fd)


@contextlib.contextmanager
def _locked(base: Path) -> Iterator[None]:
    """Hold the lock of the base directory, which engines take only for microseconds."""
    fd = os.open(base / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _try_lock(path: Path) -> int | None:
    """Take an exclusive flock on `path`, created if missing; return its fd, None if another process holds it."""
    lock_fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock_fd)
        return None
    return lock_fd
