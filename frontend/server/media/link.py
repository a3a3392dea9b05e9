"""MediaLink: one media process as its host sees it, and the socket to it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import subprocess

from ....ipc.child import describe_end, spawn_failure, spawn_helper
from ....ipc.codec import Decoder, encode
from ....ipc.errors import Overloaded
from ....ipc.messages.media_process import MediaAnswer, MediaOrder, MediaReady
from ....ipc.process.frames import LENGTH_BYTES
from ....ipc.process.log import is_worth_a_line
from ....ipc.shortages.failure import RETRY_S
from ....ipc.spec.config.engine_spec import EngineSpec

logger = logging.getLogger("tokenloom.frontend")

MODULE = "tokenloom.frontend.server.media.process"
MAX_WAITS = 6  # for a medium, each of the time that it may take, as long as the process computes
BUSY_SHARE = 0.02  # of a wait; a process that computes less hangs
START_S = 30.0  # for the start of a process on a busy machine
IDLE_BYTES = 256 << 20  # limit of a process's memory between media


class MediaLink:
    """One media process and the socket to it; a question starts the process if there is none."""

    num_lost = 0

    def __init__(self, spec: EngineSpec) -> None:
        self._spec = spec
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._decoder: Decoder[MediaAnswer] = Decoder(MediaAnswer)

    async def ask(self, order: MediaOrder, item_s: float) -> MediaAnswer:
        """Send an order and return its answer. OSError if the process ends, TimeoutError if it hangs or takes too long;
        then it must be stopped. Overloaded if it does not start."""
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
        assert self._process is not None
        return describe_end(self._process)

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
            try:
                self._process, self._socket = spawn_helper(MODULE, self._spec.environment())
                self._socket.setblocking(False)
            except OSError as error:
                raise Overloaded(f"a media process could not be started: {spawn_failure(error)}", RETRY_S) from None
            try:
                async with asyncio.timeout(START_S):
                    ready = await self._receive(self._socket)
            except (TimeoutError, OSError) as error:
                how = f"did not start within {START_S:g} s" if isinstance(error, TimeoutError) else self.end()
                self.lose(how)
                raise Overloaded(f"a media process {how} at its start: see its log", RETRY_S) from None
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
    """Whether a process that has waited for `num_waits` times `item_s` on a medium still computes, within its time."""
    return num_waits * BUSY_SHARE * item_s < processor_s < item_s


async def _receive_bytes(channel: socket.socket, num_bytes: int) -> bytes:
    loop, data = asyncio.get_running_loop(), bytearray()
    while len(data) < num_bytes:
        part = await loop.sock_recv(channel, num_bytes - len(data))
        if not part:
            raise ConnectionResetError("the peer is gone")
        data += part
    return bytes(data)
