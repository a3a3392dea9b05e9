"""MediaHost: lets media processes decode media, in the order of their arrival, and owners of media take turns.

The processes start with the first media. A process that crashes, or exceeds the time limit for a medium, is killed, and
the medium is tried once more; if that fails too, only its caller gets an error. On a busy machine the limit for a
process that computes counts CPU time. Belongs to one event loop.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections import OrderedDict, deque
from typing import Any, NamedTuple

import msgspec

from ....ipc.codec import encode
from ....ipc.errors import InternalError, Overloaded, RequestError, TokenloomError
from ....ipc.helper_process import HelperLost, HelperUnavailable
from ....ipc.messages.media import MEDIUM, MediaKind
from ....ipc.messages.media_process import MediaAnswer, MediaNotRead, MediaOrder, MediaPart, ReadAudio, ReadImage
from ....ipc.process.log import is_worth_a_line
from ....ipc.shortages.failure import RETRY_S, failure_of
from ....ipc.spec.config.engine_spec import EngineSpec
from ....ipc.spec.processors.image_processor_config import Detail, ImageProcessorConfig
from ....ipc.spec.processors.processor import Processor
from ..helpers.helper import Helper

logger = logging.getLogger("tokenloom.frontend")

ITEM_S = 10.0  # for one medium
AUDIO_SPEED = 100  # seconds of audio that a process decodes in a second, at least; beside ITEM_S
MAX_PROCESSES = 4
MODULE = "tokenloom.frontend.server.media.process"
START_S = 30.0  # for the start of a process on a busy machine
IDLE_BYTES = 256 << 20  # limit of a process's memory between media
NUM_TRIES = 2


class ReadMedium(NamedTuple):
    """A medium that is ready for the workers."""

    digest: bytes  # of its media file, which is in the blob store; to be pinned at once
    num_bytes: int
    grid: tuple[int, int, int]


class ReadPiece(NamedTuple):
    """A piece of an audio clip that is ready for the workers."""

    digest: bytes  # as in ReadMedium
    num_bytes: int
    grid: tuple[int, int, int]
    start_s: float  # in the clip
    end_s: float


class _Job(NamedTuple):
    order: MediaOrder
    result: asyncio.Future[list[MediaPart]]

    @property
    def kind(self) -> MediaKind:
        return "image" if isinstance(self.order, ReadImage) else "audio"


class MediaHost:
    """Owner of the media processes and of the media that wait for them. All media are of the kind that `processor`
    handles."""

    def __init__(self, spec: EngineSpec, processor: Processor, item_s: float = ITEM_S) -> None:
        self._spec, self._processor, self._item_s = spec, processor, item_s
        self._num_processes = spec.config.media_processes or default_processes()
        self._waiting: OrderedDict[str, deque[_Job]] = OrderedDict()  # by owner, the next one first
        self._idle: list[Helper[MediaAnswer]] = []
        self._tasks: set[asyncio.Task[Any]] = set()
        self.num_lost = 0  # processes that failed

    async def read(self, source: bytes, kind: MediaKind, detail: str = "auto", owner: str = "") -> ReadMedium:
        """Decode the blob `source`, which the caller pins meanwhile, into a media file. Owners take turns.

        RequestError if the blob is not a medium of this kind that the model accepts, Overloaded if the blob store is
        full. If the caller is cancelled, a medium that waits is dropped, and one that is being read is not tried again.
        """
        assert kind == self._processor.kind, "limits are checked before"
        if isinstance(self._processor, ImageProcessorConfig):
            settings = msgspec.json.encode(self._processor.with_detail(_detail(detail)))
            order: MediaOrder = ReadImage(
                source=source, settings=settings, max_pixels=self._spec.config.max_image_pixels
            )
        else:
            order = self._audio_order(source)
        (part,) = await self._ask(order, owner)
        return ReadMedium(part.digest, part.num_bytes, part.grid)

    async def read_pieces(self, source: bytes, piece_s: float, owner: str = "") -> list[ReadPiece]:
        """Decode an audio clip into media files of pieces of at most `piece_s` seconds, cut at quiet places; errors as
        in `read`."""
        parts = await self._ask(self._audio_order(source, piece_s), owner)
        return [ReadPiece(each.digest, each.num_bytes, each.grid, each.start_s, each.end_s) for each in parts]

    def _audio_order(self, source: bytes, piece_s: float = 0.0) -> ReadAudio:
        settings = msgspec.json.encode(self._processor)
        return ReadAudio(source=source, settings=settings, max_seconds=self._spec.config.max_audio_s, piece_s=piece_s)

    async def _ask(self, order: MediaOrder, owner: str) -> list[MediaPart]:
        job = _Job(order, asyncio.get_running_loop().create_future())
        self._waiting.setdefault(owner, deque()).append(job)
        if len(self._tasks) < self._num_processes:
            task = asyncio.get_running_loop().create_task(self._work())
            self._tasks.add(task)
        return await job.result

    def close(self) -> None:
        """Kill the processes, and end the media that wait with an error."""
        for task in list(self._tasks):
            task.cancel()  # it stops its process
        for helper in self._idle:
            helper.stop()
        while (job := self._next()) is not None:
            job.result.set_exception(_ended(job))

    def _next(self) -> _Job | None:
        """Remove and return the next job with a caller that still waits."""
        while self._waiting:
            owner, jobs = self._waiting.popitem(last=False)
            job = jobs.popleft()
            if jobs:
                self._waiting[owner] = jobs  # behind the others
            if not job.result.done():
                return job
        return None

    async def _work(self) -> None:
        """Read media in one process until none waits."""
        helper = self._idle.pop() if self._idle else self._new_helper()
        task = asyncio.current_task()
        assert task is not None
        try:
            while (job := self._next()) is not None:
                try:
                    parts = await self._read(helper, job)
                except TokenloomError as error:
                    _end(job, error)
                except asyncio.CancelledError:
                    _end(job, _ended(job))
                    raise
                except Exception as error:  # it costs one medium
                    failure = failure_of(error, "reading a medium failed")
                    if isinstance(failure, InternalError):
                        logger.exception("reading a medium failed")
                    _end(job, failure)
                else:
                    if not job.result.done():
                        job.result.set_result(parts)
        finally:
            self._idle.append(helper)
            self._tasks.discard(task)  # at once: the next medium needs a task of its own

    def _new_helper(self) -> Helper[MediaAnswer]:
        return Helper(MODULE, self._spec, MediaAnswer, start_s=START_S, idle_bytes=IDLE_BYTES)

    async def _read(self, helper: Helper[MediaAnswer], job: _Job) -> list[MediaPart]:
        end, item_s = "", self._item_s
        if isinstance(job.order, ReadAudio):
            item_s += job.order.max_seconds / AUDIO_SPEED
        for _ in range(NUM_TRIES):
            try:
                answer = await helper.wait_in_loop(helper.ask(encode(job.order), item_s=item_s))
            except HelperUnavailable as error:
                self._count_loss(str(error))
                raise Overloaded(f"a media process {error}", RETRY_S) from None
            except HelperLost as loss:
                end = str(loss)
                self._count_loss(end)
            else:
                if isinstance(answer, MediaNotRead):
                    raise answer.error.to_exception()
                return answer.parts
            if job.result.done():  # the caller is gone
                break
        raise RequestError(
            f"the {MEDIUM[job.kind]} could not be read in {NUM_TRIES} tries: the process that decodes it {end}: send a "
            "smaller one, or save it again"
        )

    def _count_loss(self, how: str) -> None:
        self.num_lost += 1
        if is_worth_a_line(self.num_lost):
            logger.warning("a media process %s and is replaced", how)


def default_processes() -> int:
    """Return the number of media processes if --media-processes is not given: a quarter of the cores, 1 to 4."""
    return max(1, min(MAX_PROCESSES, len(os.sched_getaffinity(0)) // 4))


def _detail(detail: str) -> Detail:
    match detail:
        case "" | "auto":
            return "auto"
        case "low" | "high":
            return detail
    raise RequestError(f"detail is {detail!r:.40}: give low, high or auto")


def _ended(job: _Job) -> InternalError:
    return InternalError(f"the engine ended before the {MEDIUM[job.kind]} was read")


def _end(job: _Job, error: TokenloomError) -> None:
    if not job.result.done():
        job.result.set_exception(error)
