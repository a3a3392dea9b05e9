"""MediaManager: puts the media of requests into the blob store, has them decoded, and keeps them until requests end.

Everything runs in an event loop of its own thread: writing and hashing bytes, fetching URLs, waiting for the processes
that decode. The frontend's loop only starts and releases jobs, and gets their results at a wake-up. A medium is pinned
as long as a request needs it; while the store is full, requests wait. Knows no prompts and no tokens.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from .....ipc.blobs.store import BlobStore
from .....ipc.errors import InternalError, Overloaded, RequestError, TokenloomError
from .....ipc.messages.client import Medium, PutMedium
from .....ipc.messages.media import MediaKind
from .....ipc.process.descriptors import check_free, descriptor_limit
from .....ipc.shortages.failure import failure_of
from .....ipc.shortages.threads import Threads, start_thread
from .....ipc.spec.config.engine_spec import EngineSpec
from ....forms.media_limits import MediaLimits
from ...sources.media_sources import MediaSources
from .media_input import MediaInput, MediaReader, ReadMedium, ReadPiece
from .media_job import MediaJob, NeedBytes
from .media_puts import WAIT_S, MediaPuts, new_task
from .source_bytes import MAX_ASKS, SourceBytes

T = TypeVar("T")

logger = logging.getLogger("tokenloom.frontend")

MAX_KNOWN = 1 << 12  # size of the table of media that have been read
MAX_CLIPS = 1 << 10  # size of the table of clips that have been cut
LOOP_DESCRIPTORS = 3  # of an event loop; asyncio does not clean up if it cannot open all of them
PINS_SHARE = 4  # pinned media use at most 1 / PINS_SHARE of the descriptors that this process may open

_Key: TypeAlias = tuple[bytes, MediaKind, str]  # digest of the source, kind, detail


class MediaManager:
    """Owner of the media of all requests. The public methods are called in the frontend's loop; `hold` in any
    thread."""

    def __init__(
        self,
        spec: EngineSpec,
        wake: Callable[[], None],
        media: MediaInput | None = None,
    ) -> None:
        """`wake` is called from another thread and must cause a call of `on_wakeup`. `media`: how media are read; None
        if the model takes only text."""
        self._wake, self._input, self._config = wake, media, spec.config
        self._limits = MediaLimits.of(spec)
        self.store = BlobStore(Path(spec.run_directory, "media"), spec.config.media_store_bytes)
        self._done: deque[Callable[[], None]] = deque()
        self._numbers = itertools.count()
        self._lock = threading.Lock()  # guards the start of the thread
        self._loop: asyncio.AbstractEventLoop | None = None
        self._max_known = MAX_KNOWN
        self._max_pinned = max(descriptor_limit() // PINS_SHARE, 16)
        # used only in the thread
        self._puts = MediaPuts(self.store, self._limits)
        self._pinned = Counter[bytes]()  # number of jobs that use each media file
        self._known: OrderedDict[_Key, ReadMedium] = OrderedDict()
        self._reading: dict[_Key, asyncio.Task[ReadMedium]] = {}
        self._pieces: OrderedDict[tuple[bytes, float], Sequence[ReadPiece]] = OrderedDict()  # by (clip, piece_s)
        self._cutting: dict[tuple[bytes, float], asyncio.Task[Sequence[ReadPiece]]] = {}

    # ── the frontend's loop ──────────────────────────────────────────────────────────────────────────────────────

    def put(self, message: PutMedium) -> None:
        """Start to write the bytes of a medium to the store, for a request that arrives within HOLD_S. The request gets
        the error if this fails. If the thread cannot start, the bytes are dropped and the request asks for them
        again."""
        if self._limits.kind is not None:
            with contextlib.suppress(TokenloomError):
                self._call(partial(self._puts.begin, message))

    def read(
        self,
        media: list[Medium],
        *,
        need: NeedBytes | None = None,
        owner: str = "",
        scope: str = "",
        wait_s: float = WAIT_S,
    ) -> MediaJob[list[ReadMedium]]:
        """Start to read the media of a request and return the job. Its reply is the list of media in their order, or an
        error after at most `wait_s` seconds, or WAIT_S if that is less. The media are pinned until the job is released.
        `need` is called with the digests of bytes that the store lacks. `owner`: key of the caller, for fair queueing.
        `scope`: cache salt of the request; uuids of media are shared only within it."""
        job: MediaJob[list[ReadMedium]] = MediaJob(f"job-{next(self._numbers)}", media, owner, scope, need)
        self._submit(job, self._read_all, wait_s)
        return job

    def read_pieces(
        self,
        clip: Medium,
        piece_s: float,
        *,
        owner: str = "",
        scope: str = "",
        wait_s: float = WAIT_S,
    ) -> MediaJob[Sequence[ReadPiece]]:
        """Start to read an audio clip as pieces of at most `piece_s` seconds, cut at quiet places; return the job, as
        `read` does. Until its release, other requests may refer to a piece by its digest, as an audio clip of its
        own."""
        job: MediaJob[Sequence[ReadPiece]] = MediaJob(f"job-{next(self._numbers)}", [clip], owner, scope, None, piece_s)
        self._submit(job, self._read_all_pieces, wait_s)
        return job

    def release(self, job: MediaJob[Any]) -> None:
        """Unpin the media of a job. If the job is not done, cancel it; its reply then never comes."""
        job.is_over = True
        with contextlib.suppress(TokenloomError):  # there is no thread, so the job was never started
            self._call(partial(self._release, job))

    def on_wakeup(self) -> None:
        """Call the callbacks of the jobs that are done."""
        for _ in range(len(self._done)):
            self._done.popleft()()

    def hold(self, digests: Iterable[bytes]) -> None:
        """Pin blobs for HOLD_S, for a request that is about to arrive. Blobs that the store lacks are ignored. Any
        thread may call it. Overloaded or InternalError if the media thread cannot be started."""
        for digest in digests:
            user = self._puts.new_user()
            if self.store.pin(digest, user):
                try:
                    self._call(partial(self._puts.hold, digest, user))
                except TokenloomError:
                    self.store.unpin(digest, user)
                    raise

    def close(self) -> None:
        """End the thread and the processes that it has started; wait at most 5 s."""
        with self._lock:
            loop, self._loop = self._loop, None
        if loop is not None:
            loop.call_soon_threadsafe(loop.stop)
            self._thread.join(5.0)

    # ── the thread ───────────────────────────────────────────────────────────────────────────────────────────────

    def _call(self, function: Callable[[], None]) -> None:
        """Call a function in the thread's loop, which the first call starts. Overloaded or InternalError if it cannot
        be started."""
        with self._lock:
            if self._loop is None:
                self._loop = self._start()
            self._loop.call_soon_threadsafe(function)

    def _start(self) -> asyncio.AbstractEventLoop:
        try:
            check_free(LOOP_DESCRIPTORS)
            loop = asyncio.new_event_loop()
        except OSError as error:
            raise failure_of(error, "media cannot be read") from None
        try:
            self._thread = start_thread("media", self._run, loop)
        except Overloaded:
            loop.close()
            raise
        return loop

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        asyncio.set_event_loop(loop)
        loop.set_default_executor(Threads(thread_name_prefix="media"))
        self._reader = None if self._input is None else self._input.new_reader(self.store)
        sources = MediaSources.of(self.store, self._config)
        self._bytes = SourceBytes(self.store, self._puts, sources, self._is_read, self._post)
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

    def _end(self, job: MediaJob[T], result: T | TokenloomError) -> None:
        self._post(lambda: None if job.is_over else job.reply.bring(result))

    # ── jobs ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _submit(self, job: MediaJob[T], work: Callable[[MediaJob[T]], Awaitable[T]], wait_s: float) -> None:
        try:
            self._call(partial(self._begin, job, work, min(wait_s, WAIT_S)))
        except TokenloomError as error:
            self._end(job, error.with_traceback(None))

    def _begin(self, job: MediaJob[T], work: Callable[[MediaJob[T]], Awaitable[T]], wait_s: float) -> None:
        if not job.is_over:
            job.task = new_task(self._finish(job, work, wait_s))

    def _release(self, job: MediaJob[Any]) -> None:
        if job.task is not None:
            job.task.cancel()
        for digest in job.pinned:
            self.store.unpin(digest, job.user)
        self._pinned -= Counter(job.pinned)
        job.pinned.clear()
        self._puts.released.set()

    async def _finish(self, job: MediaJob[T], work: Callable[[MediaJob[T]], Awaitable[T]], wait_s: float) -> None:
        result: T | TokenloomError
        try:
            async with asyncio.timeout(wait_s):
                result = await work(job)
        except TimeoutError:
            result = Overloaded(f"the {len(job.media)} media of the request were not read within {wait_s:g} s")
        except TokenloomError as error:
            result = error.with_traceback(None)  # a traceback would form a cycle with this frame
        except Exception as error:  # otherwise the request would stay open
            result = failure_of(error, "reading media failed")
            if isinstance(result, InternalError):
                logger.exception("reading media failed")
        self._end(job, result)

    async def _read_all(self, job: MediaJob[Any]) -> list[ReadMedium]:
        return await self._with_sources(job, self._read_each)

    async def _read_all_pieces(self, job: MediaJob[Any]) -> Sequence[ReadPiece]:
        return await self._with_sources(job, self._read_pieces)

    async def _with_sources(self, job: MediaJob[Any], work: Callable[[MediaJob[Any], list[bytes]], Awaitable[T]]) -> T:
        """Run `work` with the digests of a job's source bytes, which are pinned until it returns, except those whose
        media file is in the store already. First wait while more than `_max_pinned` media files would be pinned."""
        num_new = sum(medium.digest not in self._pinned for medium in job.media)  # a piece of a clip is pinned already
        while num_new and self._pinned and len(self._pinned) + num_new > self._max_pinned:
            self._puts.released.clear()
            await self._puts.released.wait()
        sources: set[bytes] = set()
        try:
            return await work(job, await self._bytes.take(job, sources))
        finally:
            for source in sources:
                self.store.unpin(source, job.source_user)
            self._puts.released.set()

    async def _read_each(self, job: MediaJob[Any], sources: list[bytes]) -> list[ReadMedium]:
        read: list[ReadMedium] = []
        for medium, source in zip(job.media, sources, strict=True):
            with job.naming(len(read)):
                read.append(await self._read(job, (source, medium.kind, medium.detail)))
        return read

    # ── media files ──────────────────────────────────────────────────────────────────────────────────────────────

    def _is_read(self, job: MediaJob[Any], medium: Medium) -> bool:
        """Return whether the file of a medium with a digest is known and in the store; if so, pin it for the job. False
        for a clip that is to be cut into pieces."""
        if job.piece_s:
            return False
        known = self._known.get((medium.digest, medium.kind, medium.detail))
        return known is not None and self._pin(job, known)

    def _pin(self, job: MediaJob[Any], medium: ReadMedium) -> bool:
        if medium.digest in job.pinned:
            return True
        if not self.store.pin(medium.digest, job.user):
            return False
        job.pinned.add(medium.digest)
        self._pinned[medium.digest] += 1
        return True

    async def _read(self, job: MediaJob[Any], key: _Key) -> ReadMedium:
        """Return a medium, with its file pinned for the job. If it is not known, decode it, once for all requests that
        wait for it. Overloaded if the file is evicted before it can be pinned."""
        for _ in range(MAX_ASKS):
            known = self._known.get(key)
            if known is not None and self._pin(job, known):
                self._known.move_to_end(key)
                return known
            task = self._reading.get(key)
            if task is None:
                task = self._reading[key] = new_task(self._read_file(key, job.owner))
                task.add_done_callback(lambda _: self._reading.pop(key))
            medium = await asyncio.shield(task)
            self._note(key, medium)
        raise Overloaded("a medium was dropped from a full store as soon as it was read: ask again later")

    async def _read_file(self, key: _Key, owner: str) -> ReadMedium:
        return await self._puts.patiently(lambda: self._a_reader().read(*key, owner))

    async def _read_pieces(self, job: MediaJob[Any], sources: list[bytes]) -> Sequence[ReadPiece]:
        """Return the pieces of a job's clip, pinned for the job. If they are not known, cut the clip, once for all jobs
        that wait for it. Overloaded if a piece is evicted before it can be pinned."""
        key = (sources[0], job.piece_s)
        with job.naming(0):
            for _ in range(MAX_ASKS):
                pieces = self._pieces.get(key)
                if pieces is not None and all(self._pin(job, piece) for piece in pieces):
                    self._pieces.move_to_end(key)
                    for piece in pieces:
                        self._note((piece.digest, "audio", ""), piece)
                    return pieces
                task = self._cutting.get(key)
                if task is None:
                    task = self._cutting[key] = new_task(self._cut(key, job.owner))
                    task.add_done_callback(lambda _: self._cutting.pop(key))
                self._pieces[key] = await asyncio.shield(task)
                if len(self._pieces) > MAX_CLIPS:
                    self._pieces.popitem(last=False)
        raise Overloaded("an audio clip was dropped from a full store as soon as it was read: ask again later")

    async def _cut(self, key: tuple[bytes, float], owner: str) -> Sequence[ReadPiece]:
        pieces = await self._puts.patiently(lambda: self._a_reader().read_pieces(*key, owner))
        if len(pieces) > self._max_pinned:
            raise RequestError(
                f"the clip has {len(pieces)} pieces of {key[1]:g} s, of which {self._max_pinned} can be open: send a "
                "shorter one, or raise the limit of open files (ulimit -n)"
            )
        return pieces

    def _a_reader(self) -> MediaReader:
        assert self._reader is not None, "only a model that takes media reads them"
        return self._reader

    def _note(self, key: _Key, medium: ReadMedium) -> None:
        self._known[key] = medium
        for _ in range(len(self._known) - self._max_known):
            old, forgotten = self._known.popitem(last=False)
            if forgotten.digest in self._pinned:  # a piece of a clip: requests may still refer to it
                self._known[old] = forgotten
