"""BlobFetcher: finds blobs in this host's stores, or fetches them from gateways into these stores, in a thread.

    want → thread: look, else fetch → eventfd → `take`: requests for gateways, and news of blobs
    chunks of gateways → thread: hash, write

Chunks are small and few at a time, so that neither the core's loop nor other messages on a gateway's connection wait
for them. If a store is full, the fetch is tried again for WAIT_S.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import time
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import NamedTuple, TypeAlias

from ....ipc.blobs.fetch import BlobFetch, FetchState
from ....ipc.blobs.store import BlobStore
from ....ipc.errors import InternalError, Overloaded, RequestError, TokenloomError
from ....ipc.messages.blobs import BlobReply, GetBlob
from ....ipc.shortages.failure import failure_of
from ....ipc.shortages.threads import start_thread
from .needed_blobs import Failed, Found, Missing, News, Wanted

MAX_FETCHES = 4  # at once
WAIT_S = 60.0  # longest wait for room in a full store
RETRY_S = 0.5
USER = "requests of gateways"  # name of the user of the pins


class Ask(NamedTuple):
    """A message to send to a frontend of a gateway."""

    frontend_id: int
    message: GetBlob


class _Want(NamedTuple):
    wanted: Wanted
    frontend_id: int


class _Drop(NamedTuple):
    wanted: Wanted


class _Reply(NamedTuple):
    frontend_id: int
    reply: BlobReply


_Task: TypeAlias = _Want | _Drop | _Reply


class _GatewayFetch(BlobFetch):
    chunk_bytes = 1 << 17


@dataclass(eq=False)
class _Job:
    """A blob that must be fetched. `fetch`: None until it has started, and while it waits to be tried again."""

    want: _Want
    store: BlobStore
    give_up_at: float  # monotonic seconds
    begin_at: float = 0.0  # monotonic seconds
    fetch: BlobFetch | None = None


class BlobFetcher:
    """Owner of the thread, which starts with the first blob. `fd` is readable when `take` may return something."""

    def __init__(
        self, media: BlobStore, adapters: BlobStore | None, wait_s: float = WAIT_S, retry_s: float = RETRY_S
    ) -> None:
        """media, adapters: the stores of this host for media and for whole adapters. adapters: None if the engine
        serves none. wait_s: longest wait for room in a full store; retry_s: time between tries."""
        self._wait_s, self._retry_s = wait_s, retry_s
        self.fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._media, self._adapters = media, adapters
        self._tasks: SimpleQueue[_Task] = SimpleQueue()
        self._done: SimpleQueue[Ask | News] = SimpleQueue()
        self._has_thread = False
        self._jobs: dict[bytes, _Job] = {}  # by digest, those that wait for room last; used only by the thread

    # ── the core's loop ──────────────────────────────────────────────────────────────────────────────────────────

    def want(self, wanted: Wanted, frontend_id: int) -> None:
        if not self._has_thread:
            try:
                start_thread("blobs", self._run)
            except Overloaded as error:
                self._post(Failed(wanted, error))
                return
            self._has_thread = True
        self._tasks.put(_Want(wanted, frontend_id))

    def drop(self, wanted: Wanted) -> None:
        self._tasks.put(_Drop(wanted))

    def receive(self, frontend_id: int, reply: BlobReply) -> None:
        """Pass on a reply of a gateway's frontend."""
        self._tasks.put(_Reply(frontend_id, reply))

    def take(self) -> list[Ask | News]:
        """Return the messages to send to gateways, and the news of blobs."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.fd)
        return [self._done.get() for _ in range(self._done.qsize())]

    # ── the thread ───────────────────────────────────────────────────────────────────────────────────────────────

    def _run(self) -> None:
        while True:
            with contextlib.suppress(Empty):
                self._handle(self._tasks.get(timeout=self._patience_s()))
            now = time.monotonic()
            for job in self._due(now):
                self._advance(job, now)

    def _due(self, now: float) -> list[_Job]:
        """Return the jobs to work on now: the first MAX_FETCHES of those that do not wait for room."""
        return [*itertools.islice((job for job in self._jobs.values() if job.begin_at <= now), MAX_FETCHES)]

    def _patience_s(self) -> float | None:
        """Return the seconds until a job is due; None if none is due before a task comes."""
        now = time.monotonic()
        times = [now if job.fetch is None else job.fetch.deadline for job in self._due(now)]
        times += [job.begin_at for job in self._jobs.values() if job.begin_at > now]
        end = min(times, default=math.inf)
        return None if end == math.inf else max(end - now, 0.0)

    def _post(self, news: Ask | News) -> None:
        self._done.put(news)
        os.eventfd_write(self.fd, 1)

    def _handle(self, task: _Task) -> None:
        if isinstance(task, _Want):
            try:
                self._want(task)
            except (OSError, TokenloomError) as error:
                self._post(Failed(task.wanted, failure_of(error, "a store cannot be read")))
        elif isinstance(task, _Drop):
            self._drop(task.wanted)
        else:
            job = self._jobs.get(task.reply.digest)
            if job is not None and job.fetch is not None and job.want.frontend_id == task.frontend_id:
                job.fetch.receive(task.reply, time.monotonic())
                if job.fetch.state is FetchState.MISSING:
                    self._post(Missing(job.want.wanted, task.frontend_id))

    def _store(self, wanted: Wanted) -> BlobStore | None:
        return self._adapters if wanted.kind == "adapter" else self._media

    def _want(self, want: _Want) -> None:
        """Find a blob in its store, or start a job to fetch it; a job that exists continues with the given frontend."""
        digest = want.wanted.digest
        if (job := self._jobs.get(digest)) is not None:
            job.want = want
            if job.fetch is not None:
                job.fetch.resume()
        elif (store := self._store(want.wanted)) is None:
            self._post(Failed(want.wanted, RequestError("this engine takes no adapters: start it with --enable-lora")))
        elif store.open(digest) is not None and store.pin(digest, USER):  # `open` hashes a blob at its first use
            self._post(Found(want.wanted))
        else:
            self._jobs[digest] = _Job(want, store, time.monotonic() + self._wait_s)

    def _drop(self, wanted: Wanted) -> None:
        if (store := self._store(wanted)) is not None:
            store.unpin(wanted.digest, USER)
        if (job := self._jobs.pop(wanted.digest, None)) is not None and job.fetch is not None:
            job.fetch.cancel()

    def _advance(self, job: _Job, now: float) -> None:
        """Request a blob's next chunks, or report its end; if the store is full, try again later."""
        wanted, fetch = job.want.wanted, job.fetch
        if fetch is None:
            fetch = job.fetch = _GatewayFetch(job.store, wanted.digest, USER)
        for request in fetch.requests(now):
            self._post(Ask(job.want.frontend_id, request))
        if fetch.state is FetchState.DONE:
            del self._jobs[wanted.digest]
            self._post(Found(wanted))
        elif fetch.state is FetchState.FAILED and fetch.is_full and now < job.give_up_at:
            job.begin_at, job.fetch = now + self._retry_s, None
            self._jobs[wanted.digest] = self._jobs.pop(wanted.digest)
        elif fetch.state is FetchState.FAILED:
            del self._jobs[wanted.digest]
            reason = f"a blob of a gateway cannot be kept here: {fetch.error}"
            self._post(Failed(wanted, Overloaded(reason) if fetch.is_full else InternalError(reason)))
