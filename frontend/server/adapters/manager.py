"""AdapterManager: answers clients' queries about adapters, and finds the adapter of each request.

Adapters are loaded in threads. A request keeps the adapter that had its name when the request arrived, even if the name
or the source changes later. Without --enable-lora no adapter is loaded, the list is empty and no file is touched.
"""

from __future__ import annotations

import os
import stat
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, TypeVar

from ....ipc.errors import ConfigError, Overloaded, RequestError, TokenloomError, error_info
from ....ipc.messages.adapter import AdapterInfo, AdapterRef
from ....ipc.messages.client import (
    AdapterQuery,
    Adapters,
    Done,
    ListAdapters,
    LoadAdapter,
    QueryFailed,
    Submit,
)
from ....ipc.notes.deadly import ReadingNote
from ....ipc.process.pacer import Pacer
from ....ipc.spec.adapters.modules import check_name, parse_modules
from ....ipc.spec.config.engine_spec import EngineSpec
from ..helpers.pool import THREAD_BYTES, HelperPool, NoHelper
from ..helpers.task import Reply, Then, error_of
from .names_file import FILE_NAME
from .registry import AdapterRegistry
from .store import AdapterStore

MAX_SHOWN = 20  # most names in an error
NEVER = float("inf")  # a time that never comes
OFF = "this engine serves no adapters: start it with --enable-lora"

Loaded: TypeAlias = AdapterInfo | AdapterRef
L = TypeVar("L", bound=Loaded)
Send: TypeAlias = Callable[[Adapters | Done | QueryFailed], None]


@dataclass(eq=False)
class Load:
    """A load that runs in a thread, where it may hang on a network file system. `end` calls `then` with the result,
    once."""

    then: Then[Any]
    deadline: float  # monotonic seconds
    is_over: bool = False  # ended or given up; if given up, the thread must not change anything

    def end(self, result: Loaded | TokenloomError) -> None:
        if not self.is_over:
            self.is_over = True
            self.then(result)


class _Name(NamedTuple):
    """A name to give to an adapter. `may_stay`: whether an adapter that has the name already may be used instead."""

    text: str
    may_stay: Callable[[AdapterInfo], bool] = lambda info: False
    is_inplace: bool = False  # whether the name may be taken from another adapter


class AdapterManager:
    """Owner of the registry, the store and the loads. Public methods are called in the frontend's loop, except
    `load_modules`, which blocks and is called before the loop starts. Loads run in threads: `_carry_out`, `_first_use`
    and the methods that these call, such as `_load`, `_known` and `unknown`."""

    def __init__(
        self,
        spec: EngineSpec,
        wake: Callable[[], None],
        monotonic: Callable[[], float] = time.monotonic,
        unix_time: Callable[[], float] = time.time,
        is_busy: Callable[[], bool] = lambda: False,
        index: int = 0,
        note: ReadingNote | None = None,
    ) -> None:
        """`wake` is called from other threads and must cause a call of `on_wakeup`. `is_busy`, called in threads:
        whether requests run, which loads should not slow down. `index`: number of this frontend. `note`: where the
        threads record the queries that they work on."""
        self._spec, self._unix_time = spec, unix_time
        self.registry: AdapterRegistry | None = None
        self._loads: list[Load] = []
        if not spec.config.enable_lora:
            return
        path = Path(spec.run_directory, FILE_NAME)
        pacer = Pacer(is_busy, lambda: len(self._loads))
        self._store = AdapterStore(
            spec, path, lambda digest: self._names.may_drop(digest), lambda digest: self._names.names(digest), pacer
        )
        self.registry = self._names = AdapterRegistry(path, self._store.ref, monotonic, index)
        folder = spec.config.adapter_folder
        self._folder = None if folder is None else Path(folder).resolve()
        self._monotonic, self._timeout_s = monotonic, spec.config.start_timeout_s
        self._pool = HelperPool(wake, NoHelper, monotonic=monotonic, note=note, first_slot=1 + len(THREAD_BYTES))
        self._placing = threading.Lock()  # no adapter is dropped between its placing and its naming
        self._first_uses: dict[str, list[Reply[AdapterInfo]]] = {}  # by f"{name}\n{path}"

    @property
    def infos(self) -> list[AdapterInfo]:
        """The adapters that have names, sorted by name; without those in --adapter-folder that no request has used
        yet."""
        return [] if self.registry is None else self.registry.infos

    def get(self, name: str) -> AdapterInfo | None:
        return None if self.registry is None else self.registry.get(name)

    def names_of(self, digest: bytes) -> list[str]:
        """Return the names of the adapter with a digest; empty if it is unloaded, or others have its names now."""
        return [] if self.registry is None else self.registry.names_of(digest)

    def load_modules(self) -> None:
        """Load the adapters of --lora-modules, unless another frontend has loaded them; wait while another one loads
        them. ConfigError if an adapter cannot be loaded."""
        if self.registry is None:
            return
        with self._names.loading_modules() as is_first:
            for module in parse_modules(self._spec.config, self._spec.model_names) if is_first else ():
                try:
                    name, source = _Name(module.name, lambda info: True), Path(module.path).absolute()
                    self._load(name, source, base=module.base_model_name)
                except (RequestError, Overloaded, OSError) as error:  # Overloaded: the disk is full
                    raise ConfigError(f"--lora-modules {module.name}: {error}") from None

    # ── queries ──────────────────────────────────────────────────────────────────────────────────────────────────

    async def answer(self, query: AdapterQuery, send: Send) -> None:
        """Carry out a query and call `send` with the reply. The reply to a load is sent once requests may use the
        adapter."""
        reply: Adapters | Done | QueryFailed = Done(query_id=query.query_id)
        try:
            if isinstance(query, ListAdapters):
                reply = Adapters(query_id=query.query_id, adapters=self.infos)
            elif self.registry is None:
                raise RequestError(OFF)
            elif isinstance(query, LoadAdapter):
                await self.load(query)
            else:
                self.unload(query.name, query.order_id)
        except Exception as error:
            reply = QueryFailed(query_id=query.query_id, error=error_info(error_of(error)))
        send(reply)

    async def load(self, query: LoadAdapter, *, is_confined: bool = False) -> AdapterInfo:
        """Load an adapter and return it. With `is_confined`, only adapters in --adapter-folder are accepted. NotFound
        if there is no such folder; RequestError if the adapter or its name is not accepted, or the load takes too long;
        Overloaded if the disk is full or another resource is short."""
        return await self._run(partial(self._carry_out, query, is_confined))

    def _carry_out(self, query: LoadAdapter, is_confined: bool, load: Load) -> AdapterInfo:
        """Load the adapter of a query and return it. Runs in a thread."""
        check_name(query.name, self._spec.model_names)
        name = _Name(query.name, lambda info: self._names.has_done(query.order_id), query.is_inplace)
        self._known(name)
        source, within = Path(query.path), None
        if is_confined:
            assert self._folder is not None, "HTTP requests load adapters only with --adapter-folder"
            source, within = _resolved(self._folder / query.path), self._folder
            if not source.is_relative_to(within):
                raise RequestError(
                    f"lora_path {query.path!r:.200} is not beneath --adapter-folder, the only folder that HTTP "
                    "requests load from: put the adapter there"
                )
        if not _is_folder(source):
            raise NotFound(f"No adapter found for {query.path:.200}: there is no such folder on the engine's machine")
        return self._load(name, source, within=within, load=load, order_id=query.order_id)

    def unload(self, name: str, order_id: str = "") -> None:
        """Remove the name of an adapter. NotFound if no adapter has it; Overloaded or InternalError if the file of
        names cannot be written. An order that was carried out already is ignored."""
        if self.registry is not None and self.registry.has_done(order_id):
            return
        if self.registry is None or not self.registry.remove(name, order_id):
            raise NotFound(f"The lora adapter '{name:.200}' cannot be found.")

    def _known(self, name: _Name) -> AdapterInfo | None:
        """Return the adapter that has the name already, if it may be used instead of loading another; None if one is to
        be loaded. RequestError if an adapter has the name and must keep it."""
        info = self._names.get(name.text)
        if info is None or name.may_stay(info):
            return info
        if not name.is_inplace:
            raise RequestError(
                f"The lora adapter '{name.text}' has already been loaded. If you want to load the adapter in place, "
                "set 'load_inplace' to True."
            )
        return None

    def _load(
        self,
        name: _Name,
        source: Path,
        *,
        base: str = "",
        within: Path | None = None,
        is_found: bool = False,
        order_id: str = "",
        load: Load | None = None,
    ) -> AdapterInfo:
        """Copy the adapter in `source` to the store, give it `name` and return it. If the adapter that has the name may
        stay, return that instead. Blocks: runs in a thread, except at the start. `within`: folder in which all files
        must lie. `is_found`: whether the adapter was found in --adapter-folder, so that its name may be dropped."""
        if (info := self._known(name)) is not None:
            return info
        copy = self._store.copy(source, within)
        with self._placing:
            try:
                if load is not None and load.is_over:
                    raise RequestError(f"the load of {name.text!r} was given up")
                if (info := self._known(name)) is not None:
                    return info
                self._names.hold(copy.digest, self._store.ref(copy.digest, copy.rank))  # others must not drop it
                try:
                    ref = self._store.place(copy)
                    info = AdapterInfo(
                        name=name.text,
                        path=str(source),
                        digest=ref.digest.hex(),
                        rank=ref.rank,
                        base=base or self._spec.served_model_name,
                        loaded_at=self._unix_time(),
                    )
                    known = partial(self._known, name)
                    return self._names.put(info, order_id=order_id, is_found=is_found, known=known)
                finally:
                    self._names.release(copy.digest)
            finally:
                self._store.discard(copy)

    # ── requests ─────────────────────────────────────────────────────────────────────────────────────────────────

    async def resolve(self, submit: Submit) -> AdapterRef | None:
        """Return the adapter of a request, which is in use until `release`; None if the base model serves it. The
        adapter is loaded if it is in --adapter-folder or at the request's path. NotFound if the name is unknown, unless
        the model takes any name; RequestError if it cannot be loaded, or was loaded from another path; Overloaded if it
        was dropped just now."""
        name = submit.adapter
        if not name or name in self._spec.model_names:
            return None
        if self.registry is None:
            self._check_any_name(name)
            return None
        if submit.adapter_digest:
            return await self._resume(submit.adapter_digest)
        info = self._names.get(name)
        if info is None:
            if await self._found(name, submit.adapter_path) is None:
                return None
        elif submit.adapter_path and submit.adapter_path != info.path:
            raise RequestError(
                f"lora_path {submit.adapter_path:.200}: the adapter {name!r} was loaded from {info.path}: "
                "choose another name, or load it again in place"
            )
        ref = self._names.hold_name(name)
        if ref is None:
            raise Overloaded(f"the adapter {name!r} was dropped for want of room, or unloaded: ask again")
        return ref

    async def _resume(self, digest: bytes) -> AdapterRef:
        """Return the adapter with a digest, which a resumed request used, and count the use. RequestError if it is no
        longer in the store."""
        ref = self._names.hold(digest)
        if ref is None:
            found: AdapterRef = await self._run(lambda _: self._store.find(digest))
            ref = self._names.hold(digest, found) or found
        return ref

    def release(self, ref: AdapterRef) -> None:
        """End a use of an adapter that `resolve` has counted."""
        if self._names.release(ref.digest):
            self._store.touch(ref.digest)

    async def find(self, name: str) -> AdapterInfo | None:
        """Return the adapter with a name, loaded from --adapter-folder if necessary; None for the base model, also if
        it takes any name. NotFound if there is none."""
        if not name or name in self._spec.model_names:
            return None
        if self.registry is None:
            self._check_any_name(name)
            return None
        return self._names.get(name) or await self._found(name, "")

    async def _found(self, name: str, path: str) -> AdapterInfo | None:
        """Return the adapter of a name that is not loaded, from `path` or else --adapter-folder; None for the model
        itself if there is none and the model takes any name."""
        try:
            return await self._find(name, path)
        except NotFound:
            self._check_any_name(name)
            return None

    def _check_any_name(self, name: str) -> None:
        """Raise NotFound for an unknown name, unless the model itself takes any name."""
        if not self._spec.takes_any_name:
            raise self.unknown(name)

    async def _find(self, name: str, path: str) -> AdapterInfo:
        """Load an adapter on its first use, from `path` or, if that is "", from --adapter-folder; return it. Calls
        during the load share it. NotFound if there is no such adapter."""
        if not path and (self._folder is None or "/" in name):
            raise self.unknown(name)
        key = f"{name}\n{path}"
        reply: Reply[AdapterInfo] = Reply()
        waiting = self._first_uses.setdefault(key, [])
        waiting.append(reply)

        def end(result: AdapterInfo | TokenloomError) -> None:
            for each in self._first_uses.pop(key):
                each.bring(result)

        if len(waiting) == 1:
            self._begin(partial(self._first_use, name, path), end)
        return await reply

    def _first_use(self, name: str, path: str, load: Load) -> AdapterInfo:
        """Load an adapter that a request names, unless another load has just given the name to it; return the adapter.
        Runs in a thread."""
        wanted = _Name(name, lambda info: path in ("", info.path))
        if path:
            check_name(name, self._spec.model_names)
            return self._load(wanted, Path(path), load=load)
        source = None if self._folder is None or name in ("", ".", "..") else self._folder / name
        if source is None or not _is_folder(source):
            raise self.unknown(name)
        return self._load(wanted, source, within=self._folder, is_found=True, load=load)

    def unknown(self, name: str) -> NotFound:
        """Return the error for a name that neither the model nor an adapter has."""
        served = [*self._spec.model_names, *(info.name for info in self.infos)]
        more = f" and {len(served) - MAX_SHOWN} more" if len(served) > MAX_SHOWN else ""
        shown = ", ".join(served[:MAX_SHOWN])
        return NotFound(f"the model {name!r:.200} is not served here: this engine serves {shown}{more}")

    # ── threads and time ─────────────────────────────────────────────────────────────────────────────────────────

    async def _run(self, work: Callable[[Load], L]) -> L:
        """Run `work` in a thread and return its result. Raises its error, or RequestError after --start-timeout-s."""
        reply: Reply[L] = Reply()
        self._begin(work, reply.bring)
        return await reply

    def _begin(self, work: Callable[[Load], L], then: Then[L]) -> None:
        load = Load(then, self._monotonic() + self._timeout_s)
        self._loads.append(load)
        self._pool.run(lambda _: work(load), load.end)

    def on_wakeup(self) -> None:
        """Call the callbacks of loads that threads have finished since the last call."""
        if self.registry is not None:
            for end in self._pool.take():
                end()

    @property
    def is_loading(self) -> bool:
        return self._next_deadline < NEVER

    @property
    def _next_deadline(self) -> float:
        return min((load.deadline for load in self._loads if not load.is_over), default=NEVER)

    @property
    def next_expiry(self) -> float:
        """The time of the next call of `expire`, in monotonic seconds; inf if nothing can expire."""
        return NEVER if self.registry is None else min(self._next_deadline, self.registry.next_expiry)

    def expire(self, now: float) -> None:
        """Give up loads that take too long, and let adapters be dropped that have been unused for a while. `now`:
        monotonic seconds."""
        if self.registry is not None:
            self.registry.expire(now)
        for load in self._loads:
            if now >= load.deadline:
                text = f"the adapter was not loaded within {self._timeout_s:g} s: check where its files lie"
                load.end(RequestError(f"{text}, or raise --start-timeout-s"))
        self._loads = [load for load in self._loads if not load.is_over]

    def close(self) -> None:
        """End the threads and this engine's use of the store."""
        if self.registry is not None:
            self._pool.close()
            self._store.close()
            self._names.close()


class NotFound(RequestError):
    """Error: no model or adapter has the name, or there is no adapter folder at the path. HTTP status 404."""


def _is_folder(path: Path) -> bool:
    """Return whether there is a folder at a path from a caller. False, too, for a path that no file system accepts,
    such as a name of 256 bytes or with a zero byte."""
    try:
        return stat.S_ISDIR(os.stat(path).st_mode)
    except (OSError, ValueError):
        return False


def _resolved(path: Path) -> Path:
    """Return a path from a caller with all links resolved; unchanged if no file system accepts it."""
    try:
        return path.resolve()
    except (OSError, RuntimeError, ValueError):
        return path
