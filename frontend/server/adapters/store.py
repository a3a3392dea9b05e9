"""AdapterStore: the engine's own copies of adapters, in folders named by the digests of their content.

    <root>/<digest in hex>/{adapter_config.json, adapter_model.safetensors}
    <root>/.new-*       unfinished copies, each locked by its process
    <root>/.engines/*   for each engine that uses the store, a link to its file of adapter names

Engines and users' programs may share a store. A copy is written to a temporary folder and renamed when it is complete;
later changes of the source have no effect. `read`, `find`, `copy` and `place` block, and are called from threads.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from ....ipc.errors import RequestError
from ....ipc.messages.adapter import AdapterRef
from ....ipc.process.awake_clock import order_of_use
from ....ipc.process.faults import maybe_fail
from ....ipc.process.pacer import Pacer, Pause
from ....ipc.process.page_file import WINDOW_BYTES, new_pages
from ....ipc.shortages.failure import shortage_of
from ....ipc.spec.adapters.adapter_config import CONFIG_NAME
from ....ipc.spec.adapters.adapter_file import AdapterFile, AdapterReader
from ....ipc.spec.adapters.digest import adapter_digest, begin_digest
from ....ipc.spec.adapters.places import adapters_folder
from ....ipc.spec.adapters.tensor_header import TENSORS_NAME
from ....ipc.spec.config.engine_spec import EngineSpec
from .file_copy import copy_file
from .finite_check import FiniteCheck
from .registry import digests_of

FRESH_NS = 10 * 10**9  # an entry that is newer is kept: another engine may be about to write its use of it
ENTRY_NAME = re.compile("[0-9a-f]{64}")  # files with other names are not touched
_FILES = (CONFIG_NAME, TENSORS_NAME)


class Copy(msgspec.Struct, frozen=True):
    """A complete and checked copy in a temporary folder."""

    folder: Path
    lock_fd: int  # descriptor that holds the lock of `folder`
    digest: bytes
    rank: int
    num_bytes: int


class AdapterStore:
    """One process's access to the store, and owner of the engine's link in it."""

    def __init__(
        self,
        spec: EngineSpec,
        registry_path: Path,
        may_drop: Callable[[bytes], bool],
        is_named: Callable[[bytes], bool] = lambda digest: False,
        pacer: Pacer | None = None,
        unix_time_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        """Open the store and link this engine to it. `registry_path`: the file with this engine's names.
        `may_drop(digest)` returns whether this engine no longer needs an adapter; if True, it must not use that adapter
        again. `is_named(digest)` returns whether an adapter has a name, or is in use, in this engine. `pacer` limits
        the CPU time of threads that copy; None: there is no limit."""
        config = spec.config
        self._may_drop, self._is_named, self._pacer = may_drop, is_named, pacer or Pacer(lambda: False)
        self._unix_time_ns = unix_time_ns
        self._reader = AdapterReader(
            spec.model, max_rank=config.max_lora_rank, target_modules=config.lora_target_modules
        )
        self._max_bytes: int = config.adapter_store_bytes
        self._own_digests: set[bytes] = set()  # of the adapters that this object has placed
        self._free_pages: list[memoryview] = []  # memory of finished copies, for the next ones
        self.root = adapters_folder(spec.run_directory)
        engines = self.root / ".engines"
        engines.mkdir(mode=0o700, exist_ok=True)
        self._own = engines / spec.run_id
        with contextlib.suppress(FileExistsError):  # made by another frontend of this engine
            self._own.symlink_to(registry_path)

    def ref(self, digest: bytes, rank: int) -> AdapterRef:
        return AdapterRef(digest=digest, folder=str(self.root / digest.hex()), rank=rank)

    def read(self, folder: Path) -> AdapterFile:
        """Read the config and the tensor header of the adapter in `folder`. RequestError if it does not fit the model
        and the options."""
        return self._reader.read(folder)

    def find(self, digest: bytes) -> AdapterRef:
        """Return the reference to the adapter with a digest. RequestError if it is not in the store any more."""
        folder = self.root / digest.hex()
        if len(digest) != 32 or not folder.is_dir():
            raise RequestError(
                f"the adapter of content {digest.hex()[:16]} is not in {self.root} any more: submit the request again"
            )
        return self.ref(digest, self.read(folder).rank)

    def copy(self, source: Path, within: Path | None = None) -> Copy:
        """Copy and check the adapter in `source`. `within`: resolved folder in which its files must lie, None:
        anywhere. The caller must pass the copy to `discard` in the end. RequestError if the adapter does not fit the
        model, contains NaN or infinity, is larger than the store, or changes or cannot be read; Overloaded if the disk
        is full or another resource is short."""
        pause = self._pacer.start()
        config, tensors = (_checked(source / name, within) for name in _FILES)
        file = self._reader.read(source, pause)
        if file.num_bytes > self._max_bytes:
            raise self._full(file.num_bytes)
        folder, lock_fd = self._scratch()
        pages = self._free_pages.pop() if self._free_pages else new_pages(WINDOW_BYTES)
        try:
            copy_file(config, folder / CONFIG_NAME, pages=pages)
            places = (place for module in file.modules for place in module.places)
            content, check = begin_digest(folder), FiniteCheck(places, str(source))
            copy_file(tensors, folder / TENSORS_NAME, check, content, pause, pages)
            if self._reader.read(folder, pause).modules != file.modules:
                raise RequestError(f"{source} was changed while it was copied: load the adapter again")
            copied = Copy(folder, lock_fd, content.digest(), file.rank, _size(folder))
            maybe_fail("adapter.store")
            return copied
        except OSError as error:
            self._remove(folder, lock_fd)
            what = f"{source} cannot be copied to {self.root}"
            raise shortage_of(error, what) or RequestError(f"{what}: {error.strerror}: check both") from None
        except BaseException:
            self._remove(folder, lock_fd)
            raise
        finally:
            self._free_pages.append(pages)

    def place(self, copy: Copy) -> AdapterRef:
        """Move a copy to its place, unless the store has the same content; return the reference to it. If the store is
        full, drop the adapters that were used least recently; RequestError if too many are in use. The caller still has
        to `discard` the copy."""
        entry = self.root / copy.digest.hex()
        is_damaged = entry.is_dir() and not _is_whole(entry, copy.digest, self._pacer.start())
        with self._locked():
            if entry.is_dir() and not is_damaged:
                os.utime(entry)
            else:
                self._make_room(copy)
                shutil.rmtree(entry, ignore_errors=True)
                copy.folder.rename(entry)
            self._own_digests.add(copy.digest)
        return self.ref(copy.digest, copy.rank)

    def discard(self, copy: Copy) -> None:
        """Remove the temporary folder of a copy, if it is still there, and its lock."""
        self._remove(copy.folder, copy.lock_fd)

    def touch(self, digest: bytes) -> None:
        """Record that an adapter is used now, for the order in which adapters are dropped."""
        with contextlib.suppress(OSError):
            os.utime(self.root / digest.hex())

    def close(self) -> None:
        """Remove this engine's link. Its adapters stay in the store, and other engines may drop them."""
        with contextlib.suppress(OSError):  # a read-only disk: the link leads nowhere once the run directory is gone
            self._own.unlink(missing_ok=True)

    # ── room ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _make_room(self, copy: Copy) -> None:
        now = self._unix_time_ns()
        entries = {
            path: (order_of_use(path.stat().st_mtime_ns, now), _size(path))
            for path in self.root.iterdir()
            if _is_entry(path)
        }
        entries.pop(self.root / copy.digest.hex(), None)
        excess = sum(size for _, size in entries.values()) + copy.num_bytes - self._max_bytes
        if excess <= 0:
            return
        foreign, fresh_ns = self._foreign_digests(), now - FRESH_NS
        for path, (used_ns, size) in sorted(entries.items(), key=lambda each: each[1][0]):
            digest = bytes.fromhex(path.name)
            is_ours = digest in self._own_digests or self._is_named(digest)
            is_foreign = digest in foreign or (used_ns > fresh_ns and not is_ours)
            if not is_foreign and self._may_drop(digest):
                shutil.rmtree(path)
                excess -= size
            if excess <= 0:
                return
        raise self._full(copy.num_bytes)

    def _full(self, num_bytes: int) -> RequestError:
        return RequestError(
            f"the adapter has {num_bytes} bytes, and {self.root} holds at most {self._max_bytes}, of which names and "
            "open requests use the rest: unload an adapter, or raise --adapter-store-bytes"
        )

    def _foreign_digests(self) -> set[bytes]:
        """Return the digests of the adapters that other engines use or have names for."""
        found: set[bytes] = set()
        for link in self._own.parent.iterdir():
            if link == self._own:
                continue
            with contextlib.suppress(OSError):  # its engine is just ending, or it is not a link of an engine
                registry = link.readlink()
                if registry.parent.exists():
                    found |= digests_of(registry)
                else:
                    link.unlink()
        return found

    # ── copies under way ─────────────────────────────────────────────────────────────────────────────────────────

    def _scratch(self) -> tuple[Path, int]:
        """Make a folder for a copy and lock it; return it and the descriptor of the lock. Remove such folders of
        processes that have ended."""
        with self._locked():
            for left in self.root.glob(".new-????????"):  # the names that mkdtemp makes
                if _is_folder(left) and (fd := _try_lock(left)) is not None:
                    self._remove(left, fd)
            folder = Path(tempfile.mkdtemp(prefix=".new-", dir=self.root))
            fd = _try_lock(folder)
        assert fd is not None, "nobody else knows the new folder"
        return folder, fd

    @staticmethod
    def _remove(folder: Path, lock_fd: int) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock_fd)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the lock of the store, under which entries are added and removed, as a context."""
        fd = os.open(self.root / ".lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)


def _checked(path: Path, within: Path | None) -> Path:
    """Return `path` with all links resolved. RequestError if it is not in the folder `within`, or exists and is not a
    regular file."""
    try:
        found = path.resolve()
        is_other = found.exists() and not found.is_file()  # reading a pipe would wait for a writer
    except (OSError, RuntimeError, ValueError) as error:
        raise RequestError(f"{path} cannot be read ({error}): give the folder of a PEFT adapter") from None
    if within is not None and not found.is_relative_to(within):
        raise RequestError(f"{path} leads to {found}, which is not beneath --adapter-folder {within}: put it there")
    if is_other:
        raise RequestError(f"{path} is not a file: give the folder of a PEFT adapter")
    return found


def _is_whole(entry: Path, digest: bytes, pause: Pause) -> bool:
    with contextlib.suppress(RequestError):
        return adapter_digest(entry, pause) == digest
    return False


def _is_entry(path: Path) -> bool:
    return ENTRY_NAME.fullmatch(path.name) is not None and _is_folder(path)


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _size(folder: Path) -> int:
    return sum((folder / name).stat().st_size for name in _FILES if (folder / name).exists())


def _try_lock(folder: Path) -> int | None:
    """Lock a folder and return the descriptor of the lock; None if another process has locked it."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    return fd
