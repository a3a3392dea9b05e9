"""AdapterRegistry: the names of adapters, and the adapters that open requests use, in a file of the run directory.

A change is in the file before anyone hears of it, so that a frontend that replaces this one knows every name, and the
adapters of the requests that it is about to resume. Other engines read the file before they drop adapters from a shared
store. The frontend's loop and the threads that load adapters share this object.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import msgspec

from ...ipc.errors import InternalError, RequestError
from ...ipc.messages.adapter import AdapterInfo, AdapterRef

LEFT_S = 60.0  # for clients to resume their requests with a new frontend
MAX_NAMES = 100_000
MAX_ORDERS = 256  # remembered, oldest forgotten first
FILE_NAME = "adapters.json"


class _Content(msgspec.Struct, omit_defaults=True):
    """The file. `held`: ranks of adapters without a name that open requests use, by digest in hex."""

    adapters: list[AdapterInfo] = []
    found: list[str] = []  # names that --adapter-folder gave: they may be dropped, since they can be found again
    held: dict[str, int] = {}
    orders: list[str] = []  # LoadAdapter.order_id and UnloadAdapter.order_id of orders that were carried out


class AdapterRegistry:
    """Owner of the names and of the number of open requests of each adapter."""

    def __init__(
        self, path: Path, new_ref: Callable[[bytes, int], AdapterRef], unix_time: Callable[[], float] = time.time
    ) -> None:
        """`new_ref(digest, rank)` names an adapter's place in the store."""
        self._path, self._new_ref, self._unix_time = path, new_ref, unix_time
        self._lock = threading.RLock()
        self.is_new = not path.exists()  # no frontend before this one has kept it
        content = _read(path)
        self._infos: dict[str, AdapterInfo] = {}
        self._names_by_digest: dict[bytes, set[str]] = {}
        self._refs: dict[bytes, AdapterRef] = {}  # of all adapters that a name, a request or `_left` uses
        for info in content.adapters:
            self._set(info)
        self._found = set(content.found)
        self._orders = dict.fromkeys(content.orders)
        self._num_users: Counter[bytes] = Counter()  # open requests by digest
        self._left = {bytes.fromhex(digest): rank for digest, rank in content.held.items()}
        self._left_until = unix_time() + LEFT_S
        self._refs |= {digest: new_ref(digest, rank) for digest, rank in self._left.items()}

    @property
    def infos(self) -> list[AdapterInfo]:
        """All adapters with a name, by name."""
        with self._lock:
            return sorted(self._infos.values(), key=lambda info: info.name)

    def get(self, name: str) -> AdapterInfo | None:
        return self._infos.get(name)

    def names_of(self, digest: bytes) -> list[str]:
        with self._lock:
            return sorted(self._names_by_digest.get(digest, ()))

    def has_done(self, order_id: str) -> bool:
        """Whether an order was carried out, perhaps by the frontend before this one."""
        return bool(order_id) and order_id in self._orders

    def put(self, info: AdapterInfo, *, order_id: str = "", is_found: bool = False) -> None:
        """Add a name, or give it to another adapter."""
        with self._lock:
            old = self._infos.get(info.name)
            if old is None and len(self._infos) >= MAX_NAMES:
                raise RequestError(f"{len(self._infos)} adapters have names, at most {MAX_NAMES} may: unload some")
            if old is not None:
                self._unset(old)
            self._set(info)
            if is_found:
                self._found.add(info.name)
            self._save(order_id)

    def remove(self, name: str, order_id: str = "") -> None:
        """Remove a name, which must be there."""
        with self._lock:
            self._unset(self._infos[name])
            self._save(order_id)

    def hold(self, digest: bytes, ref: AdapterRef | None = None) -> AdapterRef | None:
        """Count a request that uses an adapter, and return its place; None if it is neither known nor given as `ref`.
        The adapter stays until `release`."""
        with self._lock:
            is_new = digest not in self._refs
            known = self._refs.get(digest) or ref
            if known is not None:
                self._refs[digest] = known
                self._num_users[digest] += 1
                if is_new:
                    self._try_save()
            return known

    def hold_name(self, name: str) -> AdapterRef | None:
        """Count a request that uses the adapter of a name; None if no adapter has the name."""
        with self._lock:
            info = self._infos.get(name)
            return None if info is None else self.hold(bytes.fromhex(info.digest))

    def release(self, digest: bytes) -> bool:
        """Count the end of a request that `hold` counted; return whether neither a name nor a request is left."""
        with self._lock:
            self._num_users[digest] -= 1
            if self._num_users[digest]:
                return False
            del self._num_users[digest]
            if digest in self._names_by_digest:
                return False
            self._left.pop(digest, None)
            self._forget_unused(digest)
            self._try_save()
            return True

    def may_drop(self, digest: bytes) -> bool:
        """Whether the store may drop an adapter: no open request and no lasting name uses it. Names that
        --adapter-folder gave are removed then."""
        with self._lock:
            names = self._names_by_digest.get(digest, set())
            if digest in self._num_users or self._is_left(digest) or not names <= self._found:
                return False
            for name in list(names):
                self.remove(name)
            self._left.pop(digest, None)
            self._forget_unused(digest)
            return True

    # ── internals ────────────────────────────────────────────────────────────────────────────────────────────────

    def _set(self, info: AdapterInfo) -> None:
        digest = bytes.fromhex(info.digest)
        self._infos[info.name] = info
        self._names_by_digest.setdefault(digest, set()).add(info.name)
        self._refs[digest] = self._new_ref(digest, info.rank)

    def _unset(self, info: AdapterInfo) -> None:
        digest = bytes.fromhex(info.digest)
        del self._infos[info.name]
        self._found.discard(info.name)
        names = self._names_by_digest[digest]
        names.remove(info.name)
        if not names:
            del self._names_by_digest[digest]
            self._forget_unused(digest)

    def _is_left(self, digest: bytes) -> bool:
        return digest in self._left and self._unix_time() < self._left_until

    def _forget_unused(self, digest: bytes) -> None:
        if not (digest in self._num_users or digest in self._names_by_digest or self._is_left(digest)):
            self._refs.pop(digest, None)

    def _try_save(self) -> None:
        """Replace the file if that can be done: it then only has other held adapters than there are."""
        with contextlib.suppress(InternalError):
            self._save()

    def _save(self, order_id: str = "") -> None:
        """Replace the file; InternalError if it cannot be written."""
        if order_id:
            self._orders[order_id] = None
            if len(self._orders) > MAX_ORDERS:
                del self._orders[next(iter(self._orders))]
        used = {digest: self._refs[digest].rank for digest in self._num_users}
        left = {digest: rank for digest, rank in self._left.items() if self._is_left(digest)}
        held = {digest.hex(): rank for digest, rank in (used | left).items() if digest not in self._names_by_digest}
        content = _Content(list(self._infos.values()), sorted(self._found), held, list(self._orders))
        aside = self._path.with_suffix(".new")
        try:
            aside.write_bytes(msgspec.json.encode(content))
            os.replace(aside, self._path)
        except OSError as error:
            raise InternalError(f"{self._path} cannot be written ({error.strerror}): free space there") from None


def digests_of(path: Path) -> set[bytes]:
    """Return the adapters that an engine uses, by its registry's file."""
    content = _read(path)
    return {bytes.fromhex(digest) for digest in (*content.held, *(info.digest for info in content.adapters))}


def _read(path: Path) -> _Content:
    with contextlib.suppress(FileNotFoundError):
        return msgspec.json.decode(path.read_bytes(), type=_Content)
    return _Content()
