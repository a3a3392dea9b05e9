"""MediaDecoder: lets media processes (process.py) decode media, in an order that is fair to their owners.

The processes start with the first media. A process that crashes, or exceeds the time limit for a medium, is killed, and
the medium is tried once more; if that fails too, only its caller gets an error. On a busy machine the limit for a
process that computes counts CPU time. Belongs to one event loop.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from typing import NamedTuple

import msgspec

from ....ipc.codec import encode
from ....ipc.errors import InternalError, Overloaded, RequestError
from ....ipc.helper_process import HelperLost, HelperUnavailable
from ....ipc.messages.media import MEDIUM, MediaKind
from ....ipc.messages.media_process import MediaAnswer, MediaNotRead, MediaOrder, MediaPart, ReadAudio, ReadImage
from ....ipc.process.log import is_worth_a_line
from ....ipc.shortages.failure import RETRY_S
from ....ipc.spec.config.engine_spec import EngineSpec
from ....ipc.spec.processors.image_processor_config import Detail, ImageProcessorConfig
from ....ipc.spec.processors.processor import Processor
from ..helpers.helper import Helper
from ..helpers.pool import ANY_SIZE, HelperPool, PoolJob
from ..helpers.task import Then, in_event_loop, reply_of

logger = logging.getLogger("tokenloom.frontend")

ITEM_S = 10.0  # for one medium
AUDIO_SPEED = 100  # seconds of audio that a process decodes in a second, at least; beside ITEM_S
MAX_PROCESSES = 4
MODULE = "tokenloom.frontend.server.media.process"
START_S = 30.0  # for the start of a process on a busy machine
IDLE_BYTES = 256 << 20  # limit of a process's memory between media
NUM_TRIES = 2
CLOSE_S = 2.0  # longest wait for the ends of killed processes


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


class MediaDecoder:
    """Owner of the media processes and of the media that wait for them. All media are of the kind that `processor`
    handles."""

    def __init__(self, spec: EngineSpec, processor: Processor, item_s: float = ITEM_S) -> None:
        self._spec = spec
        self._processor = processor
        self._item_s = item_s
        self._name = MEDIUM[processor.kind]
        num_processes = spec.config.media_processes or default_processes()
        # Media count alike and do not expire here, so that the queue needs no clock.
        self._pool = HelperPool(self._wake, self._new_helper, [ANY_SIZE] * num_processes, monotonic=lambda: 0.0)

    async def read(self, source: bytes, kind: MediaKind, detail: str = "auto", owner: str = "") -> ReadMedium:
        """Decode the blob `source`, which the caller pins meanwhile, into a media file. Owners take turns.

        RequestError if the blob is not a medium of this kind that the model accepts; Overloaded if the blob store is
        full, the queue is full, or no process can be started. If the caller is cancelled, a medium that waits is
        dropped, and one that is being read is not tried again.
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
        self._loop = asyncio.get_running_loop()
        is_over = threading.Event()

        def start(then: Then[list[MediaPart]]) -> PoolJob[Helper[MediaAnswer]] | None:
            return self._pool.run(lambda helper: self._read(helper, order, is_over), then, num_bytes=1, owner=owner)

        def end(job: PoolJob[Helper[MediaAnswer]] | None) -> None:
            is_over.set()
            self._pool.drop(job)

        return await in_event_loop(reply_of(start, end))

    def close(self) -> None:
        """Kill the processes, and end the media that wait with an error."""
        self._pool.close(self._ended(), CLOSE_S)

    # ── the pool ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _new_helper(self) -> Helper[MediaAnswer]:
        return Helper(MODULE, self._spec, MediaAnswer, start_s=START_S, idle_bytes=IDLE_BYTES)

    def _wake(self) -> None:
        self._loop.call_soon_threadsafe(self._complete)

    def _complete(self) -> None:
        for complete in self._pool.take():
            complete()

    def _read(self, helper: Helper[MediaAnswer], order: MediaOrder, is_over: threading.Event) -> list[MediaPart]:
        """Have a medium decoded and return its parts. Runs in a thread. `is_over`: whether its caller is gone."""
        end = ""
        item_s = self._item_s
        if isinstance(order, ReadAudio):
            item_s += order.max_seconds / AUDIO_SPEED
        for _ in range(NUM_TRIES):
            try:
                answer = helper.ask(encode(order), item_s=item_s)
            except HelperUnavailable as error:
                _log_loss(helper, str(error))
                raise Overloaded(f"a media process {error}", RETRY_S) from None
            except HelperLost as loss:
                if helper.is_interrupted:
                    raise self._ended() from None
                end = str(loss)
                _log_loss(helper, end)
            else:
                if isinstance(answer, MediaNotRead):
                    raise answer.error.to_exception()
                return answer.parts
            if is_over.is_set():
                break
        raise RequestError(
            f"the {self._name} could not be read in {NUM_TRIES} tries: the process that decodes it {end}: send a "
            "smaller one, or save it again"
        )

    def _ended(self) -> InternalError:
        return InternalError(f"the engine ended before the {self._name} was read")


def _log_loss(helper: Helper[MediaAnswer], how: str) -> None:
    helper.num_lost += 1
    if is_worth_a_line(helper.num_lost):
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
