"""AdapterManager: answers the queries about adapters, and finds the adapter of each request.

Loads run in threads. A request keeps the adapter that its name stood for when it came, even if name and source
change later. Without --enable-lora it refuses everything and touches no file.
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
from ..helpers.host import IntakeHost
from ..helpers.task import Reply
from ..helpers.thread_pool import THREAD_BYTES, Then, ThreadPool, error_of
from .names_file import FILE_NAME
from .registry import AdapterRegistry
from .store import AdapterStore

MAX_SHOWN = 20  # names in an error
NEVER = float("inf")  # as a time
OFF = "this engine serves no adapters: start it with --enable-lora"

Loaded: TypeAlias = AdapterInfo | AdapterRef
L = TypeVar("L", bound=Loaded)
Send: TypeAlias = Callable[[Adapters | Done | QueryFailed], None]


@dataclass(eq=False)
class Load:
    """Work in a thread, which may hang on a network file system. `then` is called once, by `end`."""

    then: Then[Any]
    deadline: float  # monotonic seconds
    is_over: bool = False  # if it was given up, the thread must change nothing any more

    def end(self, result: Loaded | TokenloomError) -> None:
        if not self.is_over:
            self.is_over = True
            self.then(result)


class _Name(NamedTuple):
    """A name that an adapter is to get. `may_stay`: whether the adapter that has it already will do."""

    text: str
    may_stay: Callable[[AdapterInfo], bool] = lambda info: False
    is_inplace: bool = False  # otherwise it is taken from no adapter


class AdapterManager:
    """Owner of registry, store and loads. The loop calls its methods, unless they say otherwise."""

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
        """`is_busy`, called by threads: whether requests run, which loads should not slow. `index`: of this
        frontend. `note`: where the threads note the queries that they work for."""
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
        self._pool = ThreadPool(wake, lambda: IntakeHost(spec), monotonic, note, 1 + len(THREAD_BYTES))
        self._placing = threading.Lock()  # a thread that has placed an adapter may name it before another drops it
        self._first_uses: dict[str, list[Reply[AdapterInfo]]] = {}  # by the name that is being looked for

    @property
    def infos(self) -> list[AdapterInfo]:
        """The adapters that requests may name, by name; without those in --adapter-folder that none has named yet."""
        return [] if self.registry is None else self.registry.infos

    def get(self, name: str) -> AdapterInfo | None:
        return None if self.registry is None else self.registry.get(name)

    def names_of(self, digest: bytes) -> list[str]:
        """Return the names of an adapter; none if it has been unloaded, or its name given away."""
        return [] if self.registry is None else self.registry.names_of(digest)

    def load_modules(self) -> None:
        """Load the adapters of --lora-modules, unless a frontend has at the start; wait for one that does. ConfigError
        if one fails."""
        if self.registry is None:
            return
        with self._names.loading_modules() as is_first:
            for module in parse_modules(self._spec.config, self._spec.model_names) if is_first else ():
                try:
                    name, source = _Name(module.name, lambda info: True), Path(module.path).absolute()
                    self._load(name, source, base=module.base_model_name)
                except (RequestError, OSError) as error:
                    raise ConfigError(f"--lora-modules {module.name}: {error}") from None

    # ── queries ──────────────────────────────────────────────────────────────────────────────────────────────────

    async def answer(self, query: AdapterQuery, send: Send) -> None:
        """Call `send` with the answer: of a load, when requests may name the adapter."""
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
        """Load an adapter, only from beneath --adapter-folder if `is_confined`."""
        return await self._run(partial(self._carry_out, query, is_confined))

    def _carry_out(self, query: LoadAdapter, is_confined: bool, load: Load) -> AdapterInfo:
        """Load the adapter of a query, in a thread."""
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
        """Remove a name; NotFound if no adapter has it."""
        if self.registry is not None and self.registry.has_done(order_id):
            return
        if self.registry is None or not self.registry.remove(name, order_id):
            raise NotFound(f"The lora adapter '{name:.200}' cannot be found.")

    def _known(self, name: _Name) -> AdapterInfo | None:
        """Return the adapter that has a name already, if it will do; RequestError if the name cannot be given away."""
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
        """Copy the adapter in `source` to the store and give it a name; blocks."""
        if (info := self._known(name)) is not None:
            return info
        copy = self._store.copy(source, within)
        with self._placing:
            try:
                if load is not None and load.is_over:
                    raise RequestError(f"the load of {name.text!r} was given up")
                if (info := self._known(name)) is not None:
                    return info
                self._names.hold(copy.digest, self._store.ref(copy.digest, copy.rank))  # no other frontend drops it
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
        """Return the adapter of a request, counted as used until `release`; None for the model alone."""
        name = submit.adapter
        if not name or name in self._spec.model_names:
            return None
        if self.registry is None:
            raise self.unknown(name)
        if submit.adapter_digest:
            return await self._resume(submit.adapter_digest)
        info = self._names.get(name)
        if info is None:
            await self._find(name, submit.adapter_path)
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
        """Find the adapter that a resumed request used."""
        ref = self._names.hold(digest)
        if ref is None:
            found: AdapterRef = await self._run(lambda _: self._store.find(digest))
            ref = self._names.hold(digest, found) or found
        return ref

    def release(self, ref: AdapterRef) -> None:
        """Count the end of a request that `resolve` counted."""
        if self._names.release(ref.digest):
            self._store.touch(ref.digest)

    async def find(self, name: str) -> AdapterInfo | None:
        """Return the adapter of a name, after loading it from --adapter-folder if it is there; None for the model
        itself."""
        if not name or name in self._spec.model_names:
            return None
        if self.registry is None:
            raise self.unknown(name)
        return self._names.get(name) or await self._find(name, "")

    async def _find(self, name: str, path: str) -> AdapterInfo:
        """Load an adapter on its first use, from `path` or else --adapter-folder, once for all that ask meanwhile."""
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
        """Load an adapter that a request names, in a thread; another load of the name may just have ended."""
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
        """Run work in a thread and return its result; raise an error when it takes too long."""
        reply: Reply[L] = Reply()
        self._begin(work, reply.bring)
        return await reply

    def _begin(self, work: Callable[[Load], L], then: Then[L]) -> None:
        load = Load(then, self._monotonic() + self._timeout_s)
        self._loads.append(load)
        self._pool.run(lambda: work(load), load.end)

    def on_wakeup(self) -> None:
        """Pass on the results of ended loads."""
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
        """Return the time at which to call `expire` next, in monotonic seconds; inf: not before something happens."""
        return NEVER if self.registry is None else min(self._next_deadline, self.registry.next_expiry)

    def expire(self, now: float) -> None:
        """Give up loads that take too long, and uses of adapters that are over. `now`: monotonic seconds."""
        if self.registry is not None:
            self.registry.expire(now)
        for load in self._loads:
            if now >= load.deadline:
                text = f"the adapter was not loaded within {self._timeout_s:g} s: check where its files lie"
                load.end(RequestError(f"{text}, or raise --start-timeout-s"))
        self._loads = [load for load in self._loads if not load.is_over]

    def close(self) -> None:
        """End the engine's use of the store."""
        if self.registry is not None:
            self._pool.close()
            self._store.close()
            self._names.close()


class NotFound(RequestError):
    """No model or adapter has the name, or no adapter lies there: HTTP 404."""


def _is_folder(path: Path) -> bool:
    """Whether there is a folder at a path that a caller wrote; not for one that no file system knows, such as a name of
    256 bytes or with a zero byte in it."""
    try:
        return stat.S_ISDIR(os.stat(path).st_mode)
    except (OSError, ValueError):
        return False


def _resolved(path: Path) -> Path:
    """Return a path that a caller wrote without its links; as it is if no file system knows it."""
    try:
        return path.resolve()
    except (OSError, RuntimeError, ValueError):
        return path
