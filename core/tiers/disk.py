"""DiskSource: blocks in files below a folder, `<root>/<namespace, 16 hex>/<2 hex>/<key hex>[-<owner hex>]`.

A file is written under `<root>/tmp` and renamed, without fsync: a torn file fails its checks and counts as missing. A
scan of the names fills the index at the start. Files of other namespaces count toward the limit, and are removed first.
Only one replica at a time uses a folder, and nothing else may be kept in it (`disk_folder.py`).
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from ...ipc.errors import ConfigError, Overloaded
from ...ipc.messages.tier import SourceName, SourceState
from ...ipc.process.log import is_worth_a_line
from ...ipc.shortages.failure import REMEDIES
from ...ipc.shortages.threads import start_thread
from .disk_folder import UNFINISHED, DiskFolder
from .disk_index import DiskIndex, NoRoom, Reserved, Victim
from .disk_scan import ScannedFile, namespace_folders, scan
from .object_file import ObjectFiles, can_write_directly
from .pause import Pause
from .source import Item, Namespace

logger = logging.getLogger("tokenloom.tiers")
ScanFolder = Callable[[str], Iterator[list[ScannedFile]]]

RETRY_S = 30.0  # first pause after a failed write or start
READ_RETRY_S = 5.0  # first pause after MAX_READ_FAILURES consecutive failures
MAX_READ_FAILURES = 3


class _View:
    """Files and index of the open namespace."""

    def __init__(self, root: str, namespace: Namespace, index: DiskIndex, is_direct: bool) -> None:
        self.namespace, self.index = namespace, index
        self.root = root
        self.folder = f"{root}/{namespace.digest.hex()[:16]}"
        self.files = ObjectFiles(is_direct)
        self.is_scanned = threading.Event()

    def path(self, key: bytes, owner: int) -> str:
        name = key.hex()
        return f"{self.folder}/{name[:2]}/{name}" + (f"-{owner:x}" if owner else "")

    def unfinished_path(self, key: bytes) -> str:
        return f"{self.root}/{UNFINISHED}/{key.hex()}"


class DiskSource:
    """Source for --kv-disk. Owns the folder `root` while it is open. Lookups do not read the disk, but may wait for the
    scan."""

    name: SourceName = "disk"
    num_loaders = 4
    load_batch = 4
    store_batch = 1

    def __init__(
        self, root: Path, max_bytes: int, quota: float, on_change: Callable[[], None], scan: ScanFolder = scan
    ) -> None:
        self._scan_folder = scan
        self._root, self._max_bytes, self._quota, self._on_change = root.absolute(), max_bytes, quota, on_change
        self._wanted: Namespace | None = None  # the last argument of `open`
        self._view: _View | None = None
        self._opening = threading.Lock()
        self._storing = threading.Lock()  # one object is written at a time
        self._folder: DiskFolder | None = None
        self._starts, self._writes = Pause(1, RETRY_S), Pause(1, RETRY_S)
        self._reads = Pause(MAX_READ_FAILURES, READ_RETRY_S)
        self._error = ""
        self._totals_lock = threading.Lock()
        self._totals: Counter[str] = Counter()
        self._seconds = {"read": 0.0, "write": 0.0}
        self._rejected: Counter[str] = Counter()

    # ── start ────────────────────────────────────────────────────────────────────────────────────────────────────

    def open(self, namespace: Namespace) -> None:
        self._wanted = namespace
        self._view = None
        try:
            start_thread("scan", self._start, namespace)
        except Overloaded:
            self._starts.failed()
            self._complain(OSError(errno.EAGAIN, "no thread can be started"))

    def _start(self, namespace: Namespace) -> None:
        with self._opening:
            if self._wanted is not namespace or self._view is not None:
                return
            try:
                with self._storing:  # so that the scan counts a write for the previous namespace
                    if self._folder is None:
                        self._folder = DiskFolder(self._root)
                    sizes = [ObjectFiles.size(each) for each in namespace.slot_bytes]
                    index = DiskIndex(sizes, self._max_bytes, self._quota)
                    is_direct = self._prepare(self._folder)
                    self._view = view = _View(self._folder.path, namespace, index, is_direct)
                    if max(sizes) > self._max_bytes:
                        self._complain(OSError(errno.EFBIG, f"a block takes {max(sizes)} bytes"))
                try:
                    self._scan(view)
                finally:
                    view.is_scanned.set()
            except (OSError, ConfigError) as error:
                self._view = None
                self._starts.failed()
                self._complain(error)
            else:
                if self._starts.succeeded():
                    self._error = ""
            self._on_change()

    def _prepare(self, folder: DiskFolder) -> bool:
        """Remove unfinished files of dead writers, and return whether the disk accepts O_DIRECT. If it accepts no
        writes, log that, pause the writes and return False; blocks are loaded all the same."""
        try:
            folder.remove_unfinished()
            return can_write_directly(folder.unfinished)
        except OSError as error:
            self._writes.failed()
            self._complain(error)
            return False

    def _scan(self, view: _View) -> None:
        """Fill the index, then remove objects until all limits hold or the disk refuses. Stop if `open` was called for
        another namespace meanwhile."""
        begun = time.monotonic()
        folders = [view.folder, *(path for path in namespace_folders(view.root) if path != view.folder)]
        for folder in folders:
            for files in self._scan_folder(folder):
                view.index.add(files, folder != view.folder, int(time.time()))
                if self._wanted is not view.namespace:
                    return
        view.index.sort()
        with contextlib.suppress(NoRoom):
            while (victim := view.index.excess()) is not None and self._remove(view, victim):
                pass
        logger.info(
            "%s: %d blocks of this model, %.3g of %.3g GB used (%.2f s)",
            self._root,
            len(view.index),
            view.index.held_bytes / 1e9,
            self._max_bytes / 1e9,
            time.monotonic() - begun,
        )

    def _start_again(self) -> None:
        """Try again to open the folder, if it could not be opened and the pause after the last failure is over."""
        namespace = self._wanted
        if namespace is not None and self._error and not self._starts.is_on and not self._opening.locked():
            self.open(namespace)

    # ── reading ──────────────────────────────────────────────────────────────────────────────────────────────────

    def find(self, keys: Sequence[bytes], num_bytes: int, deadline: float) -> int:
        view = self._view
        if view is None:
            self._start_again()
            return 0
        if self._reads.is_on:
            return 0
        size = ObjectFiles.size(num_bytes)
        count = view.index.find(keys, size)
        if count < len(keys) and not view.is_scanned.is_set():
            view.is_scanned.wait(max(deadline - time.monotonic(), 0.0))
            count = view.index.find(keys, size)
        return count

    def may_have(self, keys: Sequence[bytes], num_bytes: int, deadline: float) -> list[bool]:
        view = self._view
        if view is None or not view.is_scanned.is_set():
            return [view is not None] * len(keys)
        return view.index.contains(keys, ObjectFiles.size(num_bytes))

    def load(self, items: Sequence[Item], deadline: float, on_loaded: Callable[[int, bool], None]) -> None:
        for index, item in enumerate(items):
            view, is_good = self._view, False
            try:
                if view is not None and time.monotonic() < deadline and not self._reads.is_on:
                    is_good = self._load(view, item)
            finally:
                on_loaded(index, is_good)

    def _load(self, view: _View, item: Item) -> bool:
        owner = view.index.owner_of(item.key)
        if owner is None:
            return False
        begun = time.monotonic()
        sets_time = view.index.wants_stamp(item.key, int(time.time()))
        try:
            path = view.path(item.key, owner)
            defect = view.files.read(path, view.namespace.digest, item.key, item.slot, sets_time)
        except FileNotFoundError:
            self._drop(view, item.key)
            return False
        except OSError as error:
            self._count("failed")
            if self._reads.failed():
                self._complain(error)
            return False
        if self._reads.succeeded():
            self._error = ""
        if defect is None:
            self._count("read", len(item.slot), time.monotonic() - begun)
            return True
        with self._totals_lock:
            self._rejected[defect] += 1
            num_rejected = self._rejected.total()
        if is_worth_a_line(num_rejected):
            logger.warning("%d damaged blocks in %s were removed; the last: %s", num_rejected, self._root, defect)
        self._drop(view, item.key)
        return False

    def _drop(self, view: _View, key: bytes) -> bool:
        """Remove an object if it is there; return False if the disk refuses."""
        victim = view.index.discard(key)
        return victim is None or self._remove(view, victim)

    # ── writing ──────────────────────────────────────────────────────────────────────────────────────────────────

    def store(self, items: Sequence[Item]) -> list[bool]:
        stored = []
        for item in items:
            with self._storing:
                stored.append(self._store(item))
        return stored

    def _store(self, item: Item) -> bool:
        view = self._view
        if view is None:
            self._start_again()
            return False
        view.is_scanned.wait()
        size = ObjectFiles.size(len(item.slot))
        if view.index.find([item.key], size):
            return True
        if self._writes.is_on or not self._drop(view, item.key):  # an object of another size
            self._count("dropped")
            return False
        begun, reserved = time.monotonic(), self._reserve(view, item.owner, size)
        if reserved is None:
            self._count("dropped")
            return False
        path = view.path(item.key, item.owner)
        try:
            unfinished = view.unfinished_path(item.key)
            view.files.write(path, unfinished, view.namespace.digest, item.key, item.slot, item.owner)
        except OSError as error:
            view.index.cancel(reserved)
            self._count("dropped")
            self._writes.failed()
            self._complain(error)
            return False
        if self._writes.succeeded():
            logger.info("%s takes blocks again", self._root)
            self._error = ""
        if not view.index.commit(item.key, reserved, int(time.time())):  # cleared during the write
            with contextlib.suppress(OSError):
                os.unlink(path)
            view.index.cancel(reserved)
            return False
        self._count("written", len(item.slot), time.monotonic() - begun)
        return True

    def _reserve(self, view: _View, owner: int, num_bytes: int) -> Reserved | None:
        """Remove objects until there is room for one of `num_bytes`, and return its reservation; None if that fails."""
        with contextlib.suppress(NoRoom):
            while isinstance(given := view.index.reserve(owner, num_bytes), Victim):
                if not self._remove(view, given):
                    return None
            return given
        return None

    def _remove(self, view: _View, victim: Victim) -> bool:
        """Remove a file and release its bytes; return False if the disk refuses."""
        path = victim.path or view.path(victim.key, victim.owner)
        try:
            os.unlink(path)
        except FileNotFoundError:
            pass
        except OSError as error:
            view.index.put_back(victim, int(time.time()))
            self._writes.failed()
            self._complain(error)
            return False
        view.index.release(victim.num_bytes)
        if victim.path:  # also remove folders of an unused namespace, if empty
            with contextlib.suppress(OSError):
                os.rmdir(Path(path).parent)
                os.rmdir(Path(path).parent.parent)
        return True

    def clear(self) -> None:
        view = self._view
        if view is not None:
            view.is_scanned.wait()
            for victim in view.index.clear():
                self._remove(view, victim)

    # ── state ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _count(self, what: str, num_bytes: int = 0, seconds: float = 0.0) -> None:
        with self._totals_lock:
            self._totals[what] += 1
            self._totals[f"{what} bytes"] += num_bytes
            if seconds:
                self._seconds[{"read": "read", "written": "write"}[what]] += seconds

    def _complain(self, error: OSError | ConfigError) -> None:
        """Log an error with its remedy, unless it is the same as the last one."""
        why = str(error) if isinstance(error, ConfigError) else f"{self._root}: {error.strerror}: {_remedy(error)}"
        reason = f"--kv-disk {why}"
        if reason != self._error:
            self._error = reason
            logger.error("%s; requests go on, and the disk is tried again", reason)
        self._on_change()

    def state(self) -> SourceState:
        view = self._view
        with self._totals_lock:
            totals, rejected = Counter(self._totals), dict(self._rejected)
        return SourceState(
            name=self.name,
            is_open=view is not None,
            is_broken=self._reads.is_on,
            error=self._error,
            num_objects=0 if view is None else len(view.index),
            held_bytes=0 if view is None else view.index.held_bytes,
            max_bytes=self._max_bytes,
            num_read=totals["read"],
            read_bytes=totals["read bytes"],
            read_s=self._seconds["read"],
            num_written=totals["written"],
            written_bytes=totals["written bytes"],
            write_s=self._seconds["write"],
            num_dropped=totals["dropped"],
            num_failed=totals["failed"],
            rejected=rejected,
        )

    def close(self) -> None:
        self._wanted = self._view = None
        if self._folder is not None:
            self._folder.close()
            self._folder = None


def _remedy(error: OSError) -> str:
    if error.errno == errno.EBUSY:
        return "another engine uses this folder: give another one, or load from that engine by --kv-peers"
    if error.errno == errno.EFBIG:
        return "raise --kv-disk-bytes"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "make room on the disk, or lower --kv-disk-bytes"
    if error.errno == errno.EROFS:
        return "mount the disk for writing, or give another folder"
    if error.errno in (errno.EACCES, errno.EPERM, errno.ELOOP):
        return "let this user write there, or give another folder"
    return REMEDIES.get(error.errno or 0, "check the disk, or give another folder")
