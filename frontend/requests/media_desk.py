"""MediaDesk: gets the media of requests into the blob store, has them decoded, and keeps them until a request ends.

Everything runs in an event loop of its own thread: writing and hashing bytes, fetching URLs, waiting for the processes
that decode. The frontend's loop only starts and releases jobs, and gets their results at a wake-up. A medium is pinned
as long as a request needs it; a full store makes requests wait. Knows no prompts and no tokens.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeAlias, TypeVar

from ...ipc.blobs.store import BlobStore
from ...ipc.config.engine_spec import EngineSpec
from ...ipc.errors import InternalError, Overloaded, RequestError, TokenloomError
from ...ipc.messages.client import Medium, PutMedium
from ...ipc.messages.media import MediaKind
from ...ipc.process.descriptors import descriptor_limit
from ..client.media.data_url import decode_data_url
from ..intake.thread_pool import Then
from ..media.loop_task import new_task
from ..sources.media_sources import MediaSources
from ..text.media_limits import MediaLimits
from .vision import ReadMedium, Vision

T = TypeVar("T")

logger = logging.getLogger("tokenloom.frontend")

WAIT_S = 60.0  # for the bytes of a medium, for room in the store, and for all of a request's media to be read
HOLD_S = 30.0  # how long bytes that came before their request are kept for it
RETRY_S = 2.0  # longest time between attempts to get room in a full store
MAX_PUT_BYTES = 256 << 20  # of media that wait to be written
MAX_KNOWN = 1 << 14  # entries of the table of media that have been read
MAX_ASKS = 3  # for the same bytes
PINS_SHARE = 4  # of the descriptors that this process may have, pinned media take at most 1 / PINS_SHARE

NeedBytes: TypeAlias = Callable[[list[bytes]], None]  # requests the bytes with these digests from the client
_Key: TypeAlias = tuple[bytes, MediaKind, str, float]  # digest of the source, kind, detail, seconds of a piece or 0


@dataclass(eq=False)
class MediaJob:
    """Media of one request, pinned for `user` until the job is released."""

    user: str
    media: list[Medium]
    owner: str
    scope: str  # whose uuids its media may use
    need: NeedBytes | None  # None: nobody can send the bytes again
    piece_s: float = 0.0  # longest pieces into which clips are cut; 0: none is cut
    pinned: set[bytes] = field(default_factory=set)
    task: asyncio.Task[None] | None = None
    is_over: bool = False


class MediaDesk:
    """Owner of the media of all requests. The frontend's loop calls the public methods, except `hold`."""

    def __init__(
        self,
        spec: EngineSpec,
        wake: Callable[[], None],
        vision: Vision | None = None,
    ) -> None:
        """`wake` is called from another thread and must cause a call of `on_wakeup`."""
        self._wake, self._vision, self._config = wake, vision, spec.config
        self._limits = MediaLimits.of(spec)
        self.store = BlobStore(Path(spec.run_directory, "media"), spec.config.media_store_bytes)
        self._done: deque[Callable[[], None]] = deque()
        self._numbers = itertools.count()
        self._lock = threading.Lock()  # guards the start of the thread
        self._loop: asyncio.AbstractEventLoop | None = None
        self._max_pinned = max(descriptor_limit() // PINS_SHARE, 16)
        # used by the thread alone
        self._released = asyncio.Event()  # something was unpinned since it was cleared
        self._pinned = Counter[bytes]()  # the jobs of each media file
        self._num_put_bytes = 0
        self._holders: dict[bytes, list[str]] = {}  # users of pins that wait for a request, by digest
        self._puts: dict[bytes, asyncio.Task[None]] = {}  # bytes that are being written
        self._failed_puts: OrderedDict[bytes, TokenloomError] = OrderedDict()  # until a request or other bytes come
        self._arrivals: dict[bytes, asyncio.Event] = {}  # bytes that requests wait for
        self._known: OrderedDict[_Key, Sequence[ReadMedium]] = OrderedDict()  # one each, or the pieces of a clip
        self._reading: dict[_Key, asyncio.Task[Sequence[ReadMedium]]] = {}

    # ── the frontend's loop ──────────────────────────────────────────────────────────────────────────────────────

    def put(self, message: PutMedium) -> None:
        """Write the bytes of a medium to the store, for a request that comes within HOLD_S. Errors are kept for it."""
        if self._limits.sees_images:
            self._call(partial(self._begin_put, message))

    def read(
        self,
        media: list[Medium],
        then: Then[list[ReadMedium]],
        *,
        need: NeedBytes | None = None,
        owner: str = "",
        scope: str = "",
        wait_s: float = WAIT_S,
        piece_s: float = 0.0,
    ) -> MediaJob:
        """Read the media of a request and pin them until the job is released; the loop later calls `then` with them in
        order, or with an error. `need` is called for bytes that the store lacks. `owner`: the caller, for fair
        queueing; `scope`: of uuids.

        With `piece_s` clips are cut into pieces of at most so many seconds, which are ReadPieces. As long as they are
        pinned, the digest of a piece's media file names a medium that is read already."""
        job = MediaJob(f"job-{next(self._numbers)}", media, owner, scope, need, piece_s)
        self._call(partial(self._begin, job, then, min(wait_s, WAIT_S)))
        return job

    def release(self, job: MediaJob) -> None:
        """Unpin the media of a job; if it is not done, drop it without a call of its `then`."""
        self._call(partial(self._release, job))

    def on_wakeup(self) -> None:
        """Call the callbacks of the jobs that are done."""
        for _ in range(len(self._done)):
            self._done.popleft()()

    def hold(self, digests: Iterable[bytes]) -> None:
        """Keep blobs for HOLD_S, for a request that is about to come. Any thread may call it."""
        for digest in digests:
            user = f"hold-{next(self._numbers)}"
            if self.store.pin(digest, user):
                self._call(partial(self._unpin_later, digest, user))

    def close(self) -> None:
        """End the thread and the processes that it has started."""
        with self._lock:
            loop, self._loop = self._loop, None
        if loop is not None:
            loop.call_soon_threadsafe(loop.stop)
            self._thread.join(5.0)

    # ── the thread ───────────────────────────────────────────────────────────────────────────────────────────────

    def _call(self, function: Callable[[], None]) -> None:
        """Call a function in the thread's loop, which starts with the first call."""
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=self._run, args=(self._loop,), name="media", daemon=True)
                self._thread.start()
            self._loop.call_soon_threadsafe(function)

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        asyncio.set_event_loop(loop)
        self._reader = None if self._vision is None else self._vision.new_reader(self.store)
        self._sources = MediaSources.of(self.store, self._config)
        try:
            loop.run_forever()
            for task in (tasks := asyncio.all_tasks(loop)):
                task.cancel()
            loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        finally:
            if self._reader is not None:
                self._reader.close()
            loop.close()

    def _post(self, callback: Callable[[], None]) -> None:
        self._done.append(callback)
        self._wake()

    def _unpin_later(self, digest: bytes, user: str) -> None:
        """Unpin a blob that waits for its request, after HOLD_S or when the request has come."""
        self._holders.setdefault(digest, []).append(user)
        asyncio.get_running_loop().call_later(HOLD_S, self._unhold, digest, user)

    def _unhold(self, digest: bytes, *users: str) -> None:
        holders = self._holders.get(digest, [])
        for user in users:
            if user in holders:
                holders.remove(user)
                self.store.unpin(digest, user)
        if not holders:
            self._holders.pop(digest, None)
        self._released.set()

    # ── bytes ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _begin_put(self, message: PutMedium) -> None:
        digest = message.digest
        if digest in self._puts:
            return
        self._failed_puts.pop(digest, None)
        self._num_put_bytes += len(message.data)
        self._puts[digest] = new_task(self._put(digest, message.data))

    async def _put(self, digest: bytes, data: memoryview) -> None:
        try:
            if self._num_put_bytes > MAX_PUT_BYTES:
                raise Overloaded(f"{self._num_put_bytes} bytes of images wait to be written: ask again later")
            await self._keep(digest, data)
        except TokenloomError as error:
            self._failed_puts[digest] = error
            if len(self._failed_puts) > MAX_KNOWN:
                self._failed_puts.popitem(last=False)
        finally:
            self._num_put_bytes -= len(data)
            del self._puts[digest]
            if (arrival := self._arrivals.pop(digest, None)) is not None:
                arrival.set()

    async def _keep(self, digest: bytes, data: memoryview) -> None:
        """Write bytes to the store, and keep them for HOLD_S."""
        self._limits.check_bytes(len(data))
        user = f"hold-{next(self._numbers)}"
        found = await self._patiently(lambda: asyncio.to_thread(self.store.put, data, user))
        self._unpin_later(found, user)
        if found != digest:
            raise RequestError(f"the digest of an image is {found.hex()}, the client says {digest.hex()}")

    async def _patiently(self, work: Callable[[], Awaitable[T]]) -> T:
        """Repeat `work` while the store is full, for at most WAIT_S; then raise Overloaded."""
        end = time.monotonic() + WAIT_S
        while True:
            self._released.clear()
            try:
                return await work()
            except Overloaded:
                if time.monotonic() >= end:
                    raise
            with contextlib.suppress(TimeoutError):  # an intake process may release something, too
                async with asyncio.timeout(RETRY_S):
                    await self._released.wait()

    # ── jobs ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _begin(self, job: MediaJob, then: Then[list[ReadMedium]], wait_s: float) -> None:
        if not job.is_over:
            job.task = new_task(self._finish(job, then, wait_s))

    def _release(self, job: MediaJob) -> None:
        job.is_over = True
        if job.task is not None:
            job.task.cancel()
        for digest in job.pinned:
            self.store.unpin(digest, job.user)
            self._pinned[digest] -= 1
            if not self._pinned[digest]:
                del self._pinned[digest]
        job.pinned.clear()
        self._released.set()

    async def _finish(self, job: MediaJob, then: Then[list[ReadMedium]], wait_s: float) -> None:
        result: list[ReadMedium] | TokenloomError
        try:
            async with asyncio.timeout(wait_s):
                result = await self._read_all(job)
        except TimeoutError:
            result = Overloaded(f"the {len(job.media)} images of the request were not read within {wait_s:g} s")
        except TokenloomError as error:
            result = error
        except Exception as error:  # a bug must not leave the request open
            logger.exception("reading media failed")
            result = InternalError(f"reading media failed: {type(error).__name__}: {error}")
        self._post(lambda: None if job.is_over else then(result))

    async def _read_all(self, job: MediaJob) -> list[ReadMedium]:
        num_new = sum(medium.digest not in self._pinned for medium in job.media)  # a piece of a clip is pinned
        while num_new and self._pinned and len(self._pinned) + num_new > self._max_pinned:
            self._released.clear()
            await self._released.wait()
        sources: set[bytes] = set()
        try:
            read: list[ReadMedium] = []
            for medium, source in zip(job.media, await self._sources_of(job, sources), strict=True):
                with _named(job, len(read)):
                    read += await self._read(job, (source, medium.kind, medium.detail, job.piece_s))
            return read
        finally:
            for source in sources:
                self.store.unpin(source, f"{job.user}-source")
            self._released.set()

    async def _sources_of(self, job: MediaJob, sources: set[bytes]) -> list[bytes]:
        """Return the digests of the bytes of a job's media; pin them, and add them to `sources`, unless their media
        files are there already."""
        user = f"{job.user}-source"
        await self._arrive(job, sources)
        found: list[bytes] = []
        for medium in job.media:
            digest = medium.digest
            if not digest:
                with _named(job, len(found)):
                    digest = await self._fetch(job, medium, user)
                sources.add(digest)
            if medium.uuid:
                self._sources.note(job.scope, medium.uuid, digest)
            found.append(digest)
        return found

    async def _arrive(self, job: MediaJob, sources: set[bytes]) -> None:
        """Wait until the bytes that a job names by digest are in the store, and pin them; request those that are
        missing from the client."""
        wanted = {each.digest: each for each in job.media if each.digest}
        for _ in range(1 + MAX_ASKS):
            missing = []
            for digest, medium in wanted.items():
                if digest in self._puts:
                    await asyncio.wait([self._puts[digest]])
                if (error := self._failed_puts.pop(digest, None)) is not None:
                    raise error
                is_there = digest in sources or self._is_read(job, (digest, medium.kind, medium.detail, job.piece_s))
                if not is_there and self.store.pin(digest, f"{job.user}-source"):
                    sources.add(digest)
                elif not is_there:
                    missing.append(digest)
                self._unhold(digest, *self._holders.get(digest, ()))
            if not missing:
                return
            if job.need is None:
                break
            arrivals = [self._arrivals.setdefault(digest, asyncio.Event()) for digest in missing]
            self._post(partial(job.need, missing))
            await asyncio.gather(*(each.wait() for each in arrivals))
        raise Overloaded("images of the request were dropped from a full store before they were read: send them again")

    async def _fetch(self, job: MediaJob, medium: Medium, user: str) -> bytes:
        if medium.url.startswith("data:"):
            data = decode_data_url(medium.url)
            self._limits.check_bytes(len(data))
            return await self._patiently(lambda: asyncio.to_thread(self.store.put, data, user))
        if not medium.url:
            return self._sources.find(job.scope, medium.uuid, user)
        return await self._patiently(lambda: self._sources.fetch(medium.url, user))

    # ── media files ──────────────────────────────────────────────────────────────────────────────────────────────

    def _is_read(self, job: MediaJob, key: _Key) -> bool:
        """Whether the media files of a source are in the store; pin them for the job."""
        known = self._known.get(key)
        return known is not None and all(self._pin(job, each) for each in known)

    def _pin(self, job: MediaJob, medium: ReadMedium) -> bool:
        if medium.digest in job.pinned:
            return True
        if not self.store.pin(medium.digest, job.user):
            return False
        job.pinned.add(medium.digest)
        self._pinned[medium.digest] += 1
        return True

    async def _read(self, job: MediaJob, key: _Key) -> Sequence[ReadMedium]:
        """Return a source's media files, pinned for the job; read it unless it is known. Requests share one reading."""
        for _ in range(MAX_ASKS):
            if self._is_read(job, key):
                self._known.move_to_end(key)
                return self._known[key]
            task = self._reading.get(key)
            if task is None:
                task = self._reading[key] = new_task(self._read_file(key, job.owner))
                task.add_done_callback(lambda _: self._reading.pop(key))
            self._note(key, await asyncio.shield(task))
        raise Overloaded("an image was dropped from a full store as soon as it was read: ask again later")

    def _note(self, key: _Key, media: Sequence[ReadMedium]) -> None:
        """Remember a source's media files, and the pieces of a clip as sources of themselves."""
        self._known[key] = media
        if key[3]:
            self._known |= {(piece.digest, key[1], "", 0.0): [piece] for piece in media}
        for _ in range(len(self._known) - MAX_KNOWN):
            old, forgotten = self._known.popitem(last=False)
            if any(each.digest in self._pinned for each in forgotten):  # requests may come for these pieces
                self._known[old] = forgotten

    async def _read_file(self, key: _Key, owner: str) -> Sequence[ReadMedium]:
        reader, (source, kind, detail, piece_s) = self._reader, key
        assert reader is not None, "only a model that takes media reads them"
        if not piece_s:
            return [await self._patiently(lambda: reader.read(source, kind, detail, owner))]
        pieces = await self._patiently(lambda: reader.read_pieces(source, piece_s, owner))
        if len(pieces) > self._max_pinned:
            raise RequestError(
                f"the clip has {len(pieces)} pieces of {piece_s:g} s, of which {self._max_pinned} can be open: send a "
                "shorter one, or raise the limit of open files (ulimit -n)"
            )
        return pieces


@contextlib.contextmanager
def _named(job: MediaJob, index: int) -> Iterator[None]:
    """Name the place of a medium in its errors."""
    try:
        yield
    except RequestError as error:
        raise RequestError(f"the image {index + 1} of {len(job.media)} cannot be taken: {error}") from None
