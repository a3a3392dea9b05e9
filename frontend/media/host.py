"""MediaHost: has images decoded and resized by media processes, in the order of their coming, fair to their owners.

The processes start with the first images. One that crashes, or takes longer than ITEM_S for an image, is killed and the
image tried once more; then its caller alone gets an error. On a busy machine a process that computes has ITEM_S of
processor time. Belongs to one event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import subprocess
from collections import OrderedDict, deque
from typing import Any, NamedTuple

import msgspec

from ...ipc.child import spawn_child
from ...ipc.codec import Decoder, encode
from ...ipc.config.engine_spec import EngineSpec
from ...ipc.errors import InternalError, RequestError, TokenloomError
from ...ipc.messages.media import MediaKind
from ...ipc.messages.media_process import ImageNotRead, ImageRead, MediaAnswer, MediaReady, ReadImage
from ...ipc.process.frames import LENGTH_BYTES
from ...ipc.process.log import is_worth_a_line
from .image_processor_config import Detail, Grid, ImageProcessorConfig

logger = logging.getLogger("tokenloom.frontend")

ITEM_S = 10.0  # for one image
MAX_WAITS = 6  # for an image, each of ITEM_S, as long as the process computes
BUSY_SHARE = 0.02  # of a wait; a process that computes less hangs
START_S = 30.0  # for the start of a process on a busy machine
IDLE_BYTES = 256 << 20  # limit of a process's memory between images
MAX_PROCESSES = 4
NUM_TRIES = 2


class ReadMedium(NamedTuple):
    """A medium that is ready for the workers."""

    digest: bytes  # of its media file, which is in the blob store; to be pinned at once
    num_bytes: int
    grid: Grid


class ReadPiece(NamedTuple):
    """A piece of a clip, from `start_s` to `end_s` seconds, that is ready for the workers."""

    digest: bytes  # of its media file, which is in the blob store; to be pinned at once
    num_bytes: int
    grid: Grid
    start_s: float
    end_s: float


class _Job(NamedTuple):
    order: ReadImage
    result: asyncio.Future[ReadMedium]


class MediaHost:
    """Owner of the media processes and of the images that wait for them."""

    def __init__(self, spec: EngineSpec, config: ImageProcessorConfig, item_s: float = ITEM_S) -> None:
        self._spec, self._config, self._item_s = spec, config, item_s
        self._num_processes = spec.config.media_processes or default_processes()
        self._waiting: OrderedDict[str, deque[_Job]] = OrderedDict()  # by owner, the next one first
        self._idle: list[MediaLink] = []
        self._tasks: set[asyncio.Task[Any]] = set()

    async def read(self, source: bytes, kind: MediaKind = "image", detail: str = "auto", owner: str = "") -> ReadMedium:
        """Make a media file of the blob `source`, which the caller pins meanwhile. Owners take turns.

        RequestError if it is no image that the model can see, Overloaded if the blob store is full. If the caller is
        cancelled, an image that waits is dropped, and one that is being read is not tried again."""
        config = self._config.with_detail(_detail(detail))
        order = ReadImage(
            source=source, settings=msgspec.json.encode(config), max_pixels=self._spec.config.max_image_pixels
        )
        job = _Job(order, asyncio.get_running_loop().create_future())
        self._waiting.setdefault(owner, deque()).append(job)
        if len(self._tasks) < self._num_processes:
            task = asyncio.get_running_loop().create_task(self._work())
            self._tasks.add(task)
        return await job.result

    async def read_pieces(self, source: bytes, piece_s: float, owner: str = "") -> list[ReadPiece]:
        """Cut the clip of the blob `source` at quiet places into media files of at most `piece_s` seconds."""
        raise RequestError(f"clips are not cut into pieces of {piece_s:g} s yet: send images")

    def close(self) -> None:
        """Kill the processes, and end the images that wait with an error."""
        for task in list(self._tasks):
            task.cancel()  # it stops its process
        for link in self._idle:
            link.stop()
        while (job := self._next()) is not None:
            job.result.set_exception(InternalError("the engine ended before the image was read"))

    def _next(self) -> _Job | None:
        """Remove and return the next image whose caller still waits."""
        while self._waiting:
            owner, jobs = self._waiting.popitem(last=False)
            job = jobs.popleft()
            if jobs:
                self._waiting[owner] = jobs  # behind the others
            if not job.result.done():
                return job
        return None

    async def _work(self) -> None:
        """Read images in one process until none waits."""
        link, task = self._idle.pop() if self._idle else MediaLink(self._spec), asyncio.current_task()
        assert task is not None
        try:
            while (job := self._next()) is not None:
                try:
                    medium = await self._read(link, job)
                except TokenloomError as error:
                    _end(job, error)
                except asyncio.CancelledError:
                    link.stop()
                    _end(job, InternalError("the engine ended before the image was read"))
                    raise
                except Exception as error:  # a bug costs one image
                    logger.exception("reading an image failed")
                    _end(job, InternalError(f"reading an image failed: {type(error).__name__}: {error}"))
                else:
                    if not job.result.done():
                        job.result.set_result(medium)
        finally:
            self._idle.append(link)
            self._tasks.discard(task)  # at once: the next image needs a task of its own

    async def _read(self, link: MediaLink, job: _Job) -> ReadMedium:
        end = ""
        for _ in range(NUM_TRIES):
            try:
                answer = await link.ask(job.order, self._item_s)
            except TimeoutError:
                end = f"took longer than {self._item_s:g} s"
            except OSError:
                end = link.end()
            else:
                if isinstance(answer, ImageNotRead):
                    raise answer.error.to_exception()
                assert isinstance(answer, ImageRead)
                return ReadMedium(answer.digest, answer.num_bytes, answer.grid)
            link.lose(end)
            if job.result.done():  # the caller is gone
                break
        raise RequestError(
            f"the image could not be read in {NUM_TRIES} tries: the process that decodes images {end}: send a smaller "
            "one, or save it again"
        )


class MediaLink:
    """One media process and the socket to it; a question starts the process if there is none."""

    num_lost = 0

    def __init__(self, spec: EngineSpec) -> None:
        self._spec = spec
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._decoder: Decoder[MediaAnswer] = Decoder(MediaAnswer)

    async def ask(self, order: ReadImage, item_s: float) -> MediaAnswer:
        """Send an order and return its answer. OSError if the process ends, TimeoutError if it hangs or takes too long;
        then it must be stopped. InternalError if it does not start."""
        if self._process is not None and (self._process.poll() is not None or self._resident_bytes() > IDLE_BYTES):
            self.stop()
        channel = await self._started()
        begun = self._processor_s()
        receiving = asyncio.ensure_future(self._exchange(channel, encode(order)))
        try:
            for waits in range(1, MAX_WAITS + 1):
                await asyncio.wait([receiving], timeout=item_s)
                if receiving.done():
                    return receiving.result()
                if not may_go_on(self._processor_s() - begun, waits, item_s):
                    break
            raise TimeoutError
        finally:
            receiving.cancel()
            await asyncio.wait([receiving])  # it must leave the loop before the socket is closed

    async def _exchange(self, channel: socket.socket, frame: bytes) -> MediaAnswer:
        data = len(frame).to_bytes(LENGTH_BYTES, "little") + frame
        await asyncio.get_running_loop().sock_sendall(channel, data)
        return await self._receive(channel)

    def end(self) -> str:
        """Describe how the process ended."""
        process = self._process
        if process is None:
            return "could not be started"
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(1)
        code = process.poll()
        if code is None:
            return "closed its socket"
        return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"

    def lose(self, how: str) -> None:
        """Kill the process after it has failed, and say so in the log."""
        self.stop()
        MediaLink.num_lost += 1
        if is_worth_a_line(MediaLink.num_lost):
            logger.warning("a media process %s and is replaced", how)

    def stop(self) -> None:
        """Kill the process; the next question starts another one."""
        process, channel = self._process, self._socket
        self._process = self._socket = None
        if channel is not None:
            channel.close()
        if process is not None:
            process.kill()
            process.communicate()  # closes the lifeline, and waits

    async def _started(self) -> socket.socket:
        if self._socket is None:
            ours, theirs = socket.socketpair()
            ours.setblocking(False)
            self._socket = ours
            with theirs:
                fd, module = theirs.fileno(), "tokenloom.frontend.media.process"
                self._process = spawn_child(module, ["--fd", str(fd)], self._spec.environment(), [fd])
            try:
                async with asyncio.timeout(START_S):
                    ready = await self._receive(ours)
            except (TimeoutError, OSError) as error:
                how = f"did not start within {START_S:g} s" if isinstance(error, TimeoutError) else self.end()
                self.lose(how)
                raise InternalError(f"a media process {how} at its start: see its log") from None
            assert isinstance(ready, MediaReady)
        return self._socket

    async def _receive(self, channel: socket.socket) -> MediaAnswer:
        length = await _receive_bytes(channel, LENGTH_BYTES)
        return self._decoder.decode(await _receive_bytes(channel, int.from_bytes(length, "little")))

    def _processor_s(self) -> float:
        """Return the processor time of the process."""
        assert self._process is not None
        with contextlib.suppress(OSError), open(f"/proc/{self._process.pid}/stat", "rb") as file:
            user, system = file.read().rpartition(b")")[2].split()[11:13]
            return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
        return 0.0

    def _resident_bytes(self) -> int:
        assert self._process is not None
        with contextlib.suppress(OSError), open(f"/proc/{self._process.pid}/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        return 0


def may_go_on(processor_s: float, num_waits: int, item_s: float) -> bool:
    """Whether a process that has waited for `num_waits` times `item_s` on an image still computes, within its time."""
    return num_waits * BUSY_SHARE * item_s < processor_s < item_s


def default_processes() -> int:
    """Return how many processes decode images if the option says nothing: a quarter of the cores, 1 to 4."""
    return max(1, min(MAX_PROCESSES, len(os.sched_getaffinity(0)) // 4))


def _detail(detail: str) -> Detail:
    match detail:
        case "" | "auto":
            return "auto"
        case "low" | "high":
            return detail
    raise RequestError(f"detail is {detail!r:.40}: give low, high or auto")


def _end(job: _Job, error: TokenloomError) -> None:
    if not job.result.done():
        job.result.set_exception(error)


async def _receive_bytes(channel: socket.socket, num_bytes: int) -> bytes:
    loop, data = asyncio.get_running_loop(), bytearray()
    while len(data) < num_bytes:
        part = await loop.sock_recv(channel, num_bytes - len(data))
        if not part:
            raise ConnectionResetError("the peer is gone")
        data += part
    return bytes(data)
