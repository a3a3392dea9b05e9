"""AdapterRegistry: the names of adapters, which all frontends of an engine share, and the adapters in use by requests.

Each change is written to a file before a client gets a reply to it. So every frontend knows it at once, and a frontend
that replaces this one knows every name, and the adapters of the requests that it is about to resume. Before a process
drops an adapter from a store, it reads these files of all engines. The frontend's loop and the threads that load
adapters share this object.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from ....ipc.errors import InternalError, Overloaded, RequestError
from ....ipc.messages.adapter import AdapterInfo, AdapterRef
from .names_file import Names, NamesFile, read_names
from .uses_file import LINGER_S, UsesFile, used_beside

LEFT_S = 60.0  # time for clients to resume their requests with a new frontend
MAX_NAMES = 100_000
MAX_ORDERS = 256  # most order ids in the file; the oldest are dropped first


class AdapterRegistry:
    """View of the shared names, and owner of the number of open requests of each adapter. An adapter stays in the store
    while it has a name that did not come from --adapter-folder, or is in a UsesFile."""

    def __init__(
        self,
        path: Path,
        new_ref: Callable[[bytes, int], AdapterRef],
        monotonic: Callable[[], float] = time.monotonic,
        index: int = 0,
    ) -> None:
        """`path`: the file with the names. `new_ref(digest, rank)` returns the reference to an adapter in the store.
        `index`: number of this frontend."""
        self._new_ref, self._monotonic = new_ref, monotonic
        self.max_names = MAX_NAMES
        self._lock = threading.RLock()
        self._file, self._uses = NamesFile(path), UsesFile(path, str(index))
        self._infos: dict[str, AdapterInfo] = {}
        self._names_by_digest: dict[bytes, set[str]] = {}
        self._found: set[str] = set()
        self._orders: dict[str, None] = {}
        self._has_modules = False
        self._num_users: Counter[bytes] = Counter()  # open requests by digest
        self._idle: dict[bytes, float] = {}  # by digest: end of its last request, monotonic seconds; oldest first
        self._left = set(self._uses.held)  # digests in use by requests of this frontend's predecessor
        self._left_until = monotonic() + LEFT_S if self._left else math.inf
        self._refs: dict[bytes, AdapterRef] = {}  # by digest: the adapters that open requests use
        self._refresh()

    # ── names ────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def infos(self) -> list[AdapterInfo]:
        """All adapters that have names, sorted by name."""
        with self._lock:
            self._refresh()
            return sorted(self._infos.values(), key=lambda info: info.name)

    def get(self, name: str) -> AdapterInfo | None:
        with self._lock:
            self._refresh()
            return self._infos.get(name)

    def names_of(self, digest: bytes) -> list[str]:
        with self._lock:
            self._refresh()
            return sorted(self._names_by_digest.get(digest, ()))

    def has_done(self, order_id: str) -> bool:
        """Return whether the order with this id was carried out, by this or another frontend. False for the id ""."""
        with self._lock:
            self._refresh()
            return bool(order_id) and order_id in self._orders

    def put(
        self,
        info: AdapterInfo,
        *,
        order_id: str = "",
        is_found: bool = False,
        known: Callable[[], AdapterInfo | None] = lambda: None,
    ) -> AdapterInfo:
        """Give the name `info.name` to the adapter `info`, even if another adapter has it, and return `info`. `known`
        is called first, under the lock: if it returns an adapter, return that and change nothing. `is_found`: the
        adapter is in --adapter-folder, so that its name may be dropped. RequestError if there are too many names;
        Overloaded or InternalError if the file cannot be written."""
        with self._changing():
            if (other := known()) is not None:
                return other
            old = self._infos.get(info.name)
            if old is None and len(self._infos) >= self.max_names:
                raise RequestError(f"{len(self._infos)} adapters have names, at most {self.max_names} may: unload some")
            if old is not None:
                self._unset(old)
            self._set(info)
            if is_found:
                self._found.add(info.name)
            self._save(order_id)
        return info

    def remove(self, name: str, order_id: str = "") -> bool:
        """Remove a name; return whether an adapter had it. Overloaded or InternalError if the file cannot be
        written."""
        with self._changing():
            if (info := self._infos.get(name)) is None:
                return False
            self._unset(info)
            self._save(order_id)
            return True

    @contextlib.contextmanager
    def loading_modules(self) -> Iterator[bool]:
        """Let one frontend load the adapters of --lora-modules, as a context that the others wait to enter. Yields
        whether the caller must load the adapters; once it leaves the context without an error they count as loaded."""
        with self._file.starting():
            with self._lock:
                self._refresh()
                is_first = not self._has_modules
            yield is_first
            if is_first:
                with self._changing():
                    self._has_modules = True
                    self._save()

    # ── uses ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def hold(self, digest: bytes, ref: AdapterRef | None = None) -> AdapterRef | None:
        """Count a request that uses an adapter and return the reference to it. The adapter stays in the store until
        `release`. None if the adapter is unknown and no `ref` is given."""
        with self._lock:
            if digest not in self._num_users:
                self._refresh()
                known = self._place_of(digest) or ref
                if known is not None and digest not in self._uses.held:
                    with self._changing():  # so that no process drops it at the same time
                        known = self._place_of(digest) or ref
                        if known is not None:
                            self._uses.add(digest, known.rank)
                if known is None:
                    return None
                self._refs[digest] = known
                self._idle.pop(digest, None)
            self._num_users[digest] += 1
            return self._refs[digest]

    def hold_name(self, name: str) -> AdapterRef | None:
        """Count a request that uses the adapter with a name, and return the reference to the adapter; None if no
        adapter has the name."""
        info = self.get(name)
        return None if info is None else self.hold(bytes.fromhex(info.digest))

    def release(self, digest: bytes) -> bool:
        """Count the end of a request that `hold` has counted. Return whether the adapter now has neither a name nor an
        open request in this frontend."""
        with self._lock:
            self._num_users[digest] -= 1
            if self._num_users[digest]:
                return False
            del self._num_users[digest], self._refs[digest]
            self._left.discard(digest)
            self._idle[digest] = self._monotonic()
            return digest not in self._names_by_digest

    def names(self, digest: bytes) -> bool:
        """Return whether an adapter has a name in this engine, or requests of this frontend use it."""
        return digest in self._uses.held or bool(self.names_of(digest))

    def may_drop(self, digest: bytes) -> bool:
        """Return whether the store may drop an adapter: no open request of any frontend uses it, and all its names came
        from --adapter-folder. If the store may, remove these names."""
        with self._changing():
            names = self._names_by_digest.get(digest, set())
            is_used = digest in self._num_users or self._is_left(digest) or digest in self._uses.others
            if is_used or not names <= self._found:
                return False
            for name in list(names):
                self.remove(name)
            self._idle.pop(digest, None)
            self._left.discard(digest)
            self._uses.keep(set(self._uses.held) - {digest})
            return True

    @property
    def next_expiry(self) -> float:
        """The time of the next call of `expire`, in monotonic seconds; inf if nothing can expire before another request
        ends."""
        return min(next(iter(self._idle.values()), math.inf) + LINGER_S, self._left_until)

    def expire(self, now: float) -> None:
        """Remove adapters from the UsesFile, so that they may be dropped: those whose last request ended at least
        LINGER_S ago, and, LEFT_S after the start, those of the predecessor that no request has resumed. `now`:
        monotonic seconds."""
        if now < self.next_expiry:
            return
        with self._lock:
            for digest in [digest for digest, since in self._idle.items() if since <= now - LINGER_S]:
                del self._idle[digest]
            if now >= self._left_until:
                self._left.clear()
                self._left_until = math.inf
            self._uses.keep(self._idle.keys() | self._num_users.keys() | self._left)

    def close(self) -> None:
        with self._lock:
            self._file.close()

    # ── internals ────────────────────────────────────────────────────────────────────────────────────────────────

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        """Keep other processes and threads from changing a file, as a context. The names are up to date at its
        start."""
        # Two locks, always taken in this order. flock excludes other processes but not threads, which share the open
        # file and its nesting depth; `_lock` excludes threads. Reads take only `_lock`: a change replaces the file, so
        # that they find the old file or the new one. `hold` writes a use under both locks, and `may_drop` reads all
        # uses under both: an adapter cannot be dropped after its name was looked up and before its use is written.
        with self._lock, self._file.locked():
            self._refresh()
            yield

    def _refresh(self) -> None:
        """Read the names again if they have changed."""
        if (names := self._file.read_new()) is not None:
            self._apply(names)

    def _apply(self, names: Names) -> None:
        self._infos, self._names_by_digest = {}, {}
        for info in names.adapters:
            self._set(info)
        self._found, self._orders = set(names.found), dict.fromkeys(names.orders)
        self._has_modules = names.has_modules

    def _set(self, info: AdapterInfo) -> None:
        self._infos[info.name] = info
        self._names_by_digest.setdefault(bytes.fromhex(info.digest), set()).add(info.name)

    def _unset(self, info: AdapterInfo) -> None:
        digest = bytes.fromhex(info.digest)
        del self._infos[info.name]
        self._found.discard(info.name)
        names = self._names_by_digest[digest]
        names.remove(info.name)
        if not names:
            del self._names_by_digest[digest]

    def _place_of(self, digest: bytes) -> AdapterRef | None:
        """Return the reference to an adapter that has a name, or that a request of the predecessor used; None for
        others."""
        if (names := self._names_by_digest.get(digest)) is not None:
            return self._new_ref(digest, self._infos[next(iter(names))].rank)
        return self._new_ref(digest, self._uses.held[digest]) if self._is_left(digest) else None

    def _is_left(self, digest: bytes) -> bool:
        return digest in self._left and self._monotonic() < self._left_until

    def _save(self, order_id: str = "") -> None:
        """Replace the file with the current names, and record an order as carried out. Overloaded or InternalError if
        the file cannot be written; the names are then as before."""
        if order_id:
            self._orders[order_id] = None
            if len(self._orders) > MAX_ORDERS:
                del self._orders[next(iter(self._orders))]
        names = Names(list(self._infos.values()), sorted(self._found), list(self._orders), self._has_modules)
        try:
            self._file.write(names)
        except (InternalError, Overloaded):
            self._apply(read_names(self._file.path))
            raise


def digests_of(path: Path) -> set[bytes]:
    """Return the digests of the adapters that an engine uses or has names for. `path`: its file with the names."""
    return {bytes.fromhex(info.digest) for info in read_names(path).adapters} | used_beside(path)
