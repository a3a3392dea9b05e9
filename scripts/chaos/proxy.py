"""A proxy between one client and the engine's socket, which can delay traffic or close the connection."""

from __future__ import annotations

import asyncio
import contextlib


class Proxy:
    """Listens at `path`, a unix socket, and connects each client to `target`. Call it from its event loop only."""

    def __init__(self, path: str, target: str) -> None:
        self.path, self._target = path, target
        self._may_pass = asyncio.Event()
        self._may_pass.set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        self._server = await asyncio.start_unix_server(self._serve, self.path)

    async def hold(self, seconds: float) -> None:
        """Pause both directions for `seconds`."""
        self._may_pass.clear()
        await asyncio.sleep(seconds)
        self._may_pass.set()

    def cut(self) -> None:
        """Close both sides; data on its way is lost."""
        for writer in list(self._writers):
            writer.transport.abort()

    async def close(self) -> None:
        assert self._server is not None
        self._server.close()
        self.cut()
        await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            upstream_reader, upstream_writer = await asyncio.open_unix_connection(self._target)
        except OSError:  # the frontend is being replaced: the client reconnects
            self._hang_up(writer)
            return
        self._writers.add(upstream_writer)
        pumps = [
            asyncio.ensure_future(self._pump(reader, upstream_writer)),
            asyncio.ensure_future(self._pump(upstream_reader, writer)),
        ]
        await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        for pump in pumps:
            pump.cancel()
        self._hang_up(writer)
        self._hang_up(upstream_writer)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                await self._may_pass.wait()
                writer.write(data)
                await writer.drain()

    def _hang_up(self, writer: asyncio.StreamWriter) -> None:
        self._writers.discard(writer)
        writer.transport.abort()
