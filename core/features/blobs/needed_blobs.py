"""NeededBlobs: the adapters and media that requests of gateways need; gateways keep them until they are fetched.

A request waits (WaitReason.BLOB) until all of its blobs are in stores of this host, where they stay until it ends.
Requests start in the order of their arrival, each with all of its blobs, so that no two wait for each other's pins.
Knows no sockets and no files.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol, TypeAlias

from ....ipc.errors import RequestError, TokenloomError, error_info
from ....ipc.messages.base import FinishReason
from ....ipc.messages.media import A_MEDIUM, MediaKind
from ...request import Request, WaitReason
from ...scheduling.step_feature import Engine, StepFeature
from ...scheduling.waiting_queue import WaitingQueue

BlobKind: TypeAlias = Literal["adapter"] | MediaKind


class Wanted(NamedTuple):
    """A blob that requests need from now on. `number`: tells this need from later needs of the same blob."""

    number: int
    digest: bytes
    kind: BlobKind


class Found(NamedTuple):
    """A wanted blob is in a store of this host, pinned."""

    wanted: Wanted


class Missing(NamedTuple):
    """A gateway's frontend has no such blob."""

    wanted: Wanted
    frontend_id: int


class Failed(NamedTuple):
    """A wanted blob cannot be stored on this host."""

    wanted: Wanted
    error: TokenloomError


News: TypeAlias = Found | Missing | Failed


class Fetcher(Protocol):
    """Interface of the object that finds and fetches blobs; it reports the results later, as News."""

    def want(self, wanted: Wanted, frontend_id: int) -> None:
        """Find a blob in this host's stores, or else fetch it from this frontend of a gateway and no other; pin it."""

    def drop(self, wanted: Wanted) -> None:
        """Unpin a blob, or stop fetching it."""


@dataclass(eq=False)
class _Blob:
    """A blob that open requests need."""

    wanted: Wanted
    source: int  # id of the frontend from which it is fetched
    users: dict[Request, None] = field(default_factory=dict)  # in the order of their arrival
    is_here: bool = False
    tried: set[int] = field(default_factory=set)  # frontends that do not have it


class NeededBlobs(StepFeature):
    """Owner of the table of needed blobs. Invariant: a blob is in it exactly as long as a request that has started and
    not ended names it."""

    def __init__(self, fetcher: Fetcher, max_blobs: int) -> None:
        """max_blobs: largest number of blobs that may be pinned at once, unless one request needs more."""
        self._fetcher, self._max_blobs = fetcher, max_blobs
        self._remote: set[int] = set()  # frontends of gateways
        self._blobs: dict[bytes, _Blob] = {}  # by digest
        self._numbers = itertools.count()
        self._queue: dict[Request, None] = {}  # requests that have not started
        self._num_missing: dict[Request, int] = {}  # missing blobs of each request that has started and waits

    def connect(self, waiting: WaitingQueue, engine: Engine) -> None:
        """Set the queue that releases requests, and the engine that ends them."""
        self._waiting, self._engine = waiting, engine

    def add_frontend(self, frontend_id: int) -> None:
        """Record that a frontend belongs to a gateway."""
        self._remote.add(frontend_id)

    # ── requests ─────────────────────────────────────────────────────────────────────────────────────────────────

    def arrive(self, request: Request) -> None:
        """Let a new request of a gateway wait for its blobs, if it needs any."""
        if request.frontend_id in self._remote and (request.adapter is not None or request.media):
            request.waits_for.add(WaitReason.BLOB)
            self._queue[request] = None
            self._begin()

    def holds(self, request: Request) -> bool:
        return WaitReason.BLOB in request.waits_for

    def end(self, request: Request, reason: FinishReason | None) -> None:
        if self._queue.pop(request, request) is None:
            return
        self._num_missing.pop(request, None)
        for digest in _blobs_of(request):
            blob = self._blobs.get(digest)
            if blob is None or blob.users.pop(request, request) is not None:
                continue
            if not blob.users:
                del self._blobs[digest]
                self._fetcher.drop(blob.wanted)
            elif not blob.is_here and blob.source == request.frontend_id:  # which may keep it no longer
                self._ask(blob)
        self._begin()

    def _begin(self) -> None:
        """Start waiting requests, in order, as long as their blobs may be pinned."""
        while (request := next(iter(self._queue), None)) is not None:
            kinds = _blobs_of(request)
            num_new = sum(digest not in self._blobs for digest in kinds)
            if num_new and self._blobs and len(self._blobs) + num_new > self._max_blobs:
                return
            del self._queue[request]
            for digest, kind in kinds.items():
                blob = self._blobs.get(digest)
                if blob is None:
                    wanted = Wanted(next(self._numbers), digest, kind)
                    blob = self._blobs[digest] = _Blob(wanted, request.frontend_id)
                    self._fetcher.want(wanted, request.frontend_id)
                blob.users[request] = None
            self._num_missing[request] = sum(not self._blobs[digest].is_here for digest in kinds)
            self._release(request)

    def _release(self, request: Request) -> None:
        if self._num_missing.get(request) == 0:
            del self._num_missing[request]
            self._waiting.release(request, WaitReason.BLOB)

    # ── blobs ────────────────────────────────────────────────────────────────────────────────────────────────────

    def on_news(self, news: News) -> None:
        """Apply a report of the fetcher."""
        blob = self._blobs.get(news.wanted.digest)
        if blob is None or blob.wanted != news.wanted:
            return  # of requests that have ended
        if isinstance(news, Found):
            blob.is_here = True
            for request in blob.users:
                self._num_missing[request] -= 1
                self._release(request)
        elif isinstance(news, Failed):
            self._fail(blob, news.error)
        elif news.frontend_id == blob.source:
            blob.tried.add(news.frontend_id)
            self._ask(blob)

    def _ask(self, blob: _Blob) -> None:
        """Fetch a blob from another frontend whose requests need it; end these requests if no frontend has it."""
        sources = dict.fromkeys(request.frontend_id for request in blob.users)
        source = next((each for each in sources if each not in blob.tried), None)
        if source is not None:
            blob.source = source
            self._fetcher.want(blob.wanted, source)
            return
        kind = blob.wanted.kind
        what = f"the adapter {blob.wanted.digest.hex():.16}" if kind == "adapter" else A_MEDIUM[kind]
        self._fail(blob, RequestError(f"{what} is no longer in the gateway's store, or damaged there: send it again"))

    def _fail(self, blob: _Blob, error: TokenloomError) -> None:
        """Forget a blob that cannot be fetched, and end the requests that need it with `error`."""
        del self._blobs[blob.wanted.digest]
        self._fetcher.drop(blob.wanted)
        for request in blob.users:
            self._engine.end(request, "error", error_info(error))

    # ── for tests ────────────────────────────────────────────────────────────────────────────────────────────────

    def check_invariants(self, requests: Sequence[Request]) -> None:
        open_requests = set(requests)
        users = {request for blob in self._blobs.values() for request in blob.users}
        assert all(blob.users for blob in self._blobs.values()), "a blob is kept for nobody"
        assert users | set(self._queue) <= open_requests and not users & set(self._queue)
        for request in open_requests:
            waits = request in self._queue or request in self._num_missing
            assert waits == (WaitReason.BLOB in request.waits_for)
        for request, count in self._num_missing.items():
            assert count == sum(not self._blobs[digest].is_here for digest in _blobs_of(request)) > 0


def _blobs_of(request: Request) -> dict[bytes, BlobKind]:
    """Return the blobs that a request needs: kind by digest."""
    blobs: dict[bytes, BlobKind] = {} if request.adapter is None else {request.adapter.digest: "adapter"}
    return blobs | {span.digest: span.kind for span in request.media}
