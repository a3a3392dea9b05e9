"""An HTTP server with uvicorn's parser on real sockets and an app that counts bytes, and its clients."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import selectors
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

import uvicorn
import uvloop
from starlette.types import Receive, Scope, Send

from tokenloom.frontend.forms.openai.errors import HttpError
from tokenloom.frontend.listening.keys.api_keys import ApiKeys
from tokenloom.frontend.server.http.connections import Connections, HttpConnection
from tokenloom.frontend.server.http.middleware import HttpMiddleware

DEADLINE_S = 10.0
LIMIT_S = 0.2
ARRIVAL_S = 0.001  # of bytes on the loopback
HEAD = b"POST /x HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n"
CHUNKED = b"POST /x HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
GET = b"GET %s HTTP/1.1\r\nhost: x\r\n\r\n"


class Server:
    """Server that answers with the length of the body; on `/slow` only once `finish` is set, and on `/stream` in two
    parts without saying their length. `/fails` fails."""

    def __init__(self) -> None:
        self.refused: list[tuple[int, str]] = []
        self.finish = asyncio.Event()
        self.connections: Connections
        self.port = 0
        self.accepted: list[HttpConnection] = []
        self._clients: list[Client] = []

    async def app(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/fails":
            raise HttpError(400, "no")
        length, has_more = 0, True
        while has_more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            length, has_more = length + len(message["body"]), message["more_body"]
        headers = [] if scope["path"] == "/stream" else [(b"content-length", b"8")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        if scope["path"] == "/stream":
            await send({"type": "http.response.body", "body": b"%08d" % length, "more_body": True})
            await send({"type": "http.response.body", "body": b"more"})
        elif scope["path"] == "/slow":
            await send({"type": "http.response.body", "body": b"slow", "more_body": True})
            await self.finish.wait()
            await send({"type": "http.response.body", "body": b"done"})
        else:
            await send({"type": "http.response.body", "body": b"%08d" % length})

    def on_refused(self, connection: HttpConnection, error: HttpError, why: str) -> None:
        self.refused.append((error.status, why))

    @contextlib.asynccontextmanager
    async def serve(self, max_connections: int) -> AsyncGenerator[None, None]:
        middleware = HttpMiddleware(self.app, ApiKeys(), 10**9, lambda why: self.refused.append((503, why)))
        config = uvicorn.Config(middleware, http="httptools", lifespan="off", log_config=None, access_log=False)
        config.load()
        state = uvicorn.server.ServerState()
        self.connections = Connections(LIMIT_S, max_connections, self.on_refused)
        loop = asyncio.get_running_loop()

        def accept() -> HttpConnection:
            self.accepted.append(HttpConnection(config, state, self.connections, True))
            return self.accepted[-1]

        listener = await loop.create_server(accept, "127.0.0.1", 0)
        self.port = listener.sockets[0].getsockname()[1]
        try:
            yield
        finally:
            self.finish.set()
            listener.close()
            for each in self._clients:
                await each.close()
            while self.connections.num_open:
                await asyncio.sleep(0.01)

    async def connect(self, data: bytes = b"") -> Client:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(data)
        self._clients.append(Client(reader, writer))
        return self._clients[-1]


class Client:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    def send(self, data: bytes) -> None:
        self._writer.write(data)

    async def dribble(self, data: bytes, interval_s: float) -> None:
        """Send byte by byte."""
        for byte in data:
            self._writer.write(bytes([byte]))
            await asyncio.sleep(interval_s)

    async def answer(self) -> tuple[int, bytes]:
        """Read status and body of the next answer."""
        head = await self._reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        return int(head.split(b" ")[1]), await self._reader.readexactly(length)

    async def begin(self) -> None:
        """Read the first half of the answer on `/slow`."""
        await self._reader.readuntil(b"\r\n\r\nslow")

    async def until(self, end: bytes) -> bytes:
        return await self._reader.readuntil(end)

    async def take(self, num_bytes: int) -> bytes:
        return await self._reader.readexactly(num_bytes)

    async def rest(self) -> bytes:
        """Read until the server closes the connection."""
        with contextlib.suppress(ConnectionError):  # reset, because it closed with unread data
            return await self._reader.read()
        return b""

    async def close(self) -> None:
        self._writer.close()
        with contextlib.suppress(ConnectionError):
            await self._writer.wait_closed()


class ClockLoop(asyncio.SelectorEventLoop):
    """A loop with a clock that jumps to the next timer if nothing is ready, so that no test waits or is late."""

    def __init__(self) -> None:
        self.now_s = 0.0
        super().__init__(_JumpingSelector(self))

    def time(self) -> float:
        return self.now_s


class _JumpingSelector(selectors.EpollSelector):
    def __init__(self, loop: ClockLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        found = super().select(None if timeout is None else min(timeout, ARRIVAL_S))
        if timeout is not None and not found:
            self._loop.now_s += timeout
        return found


def run(
    test: Callable[[Server], Awaitable[None]],
    max_connections: int = 100,
    new_loop: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop,
) -> None:
    async def within() -> None:
        server = Server()
        async with server.serve(max_connections):
            await test(server)

    async def limited() -> None:
        await asyncio.wait_for(within(), DEADLINE_S)

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(limited())


def served(**options: Any) -> Callable[[Callable[..., Awaitable[None]]], Callable[..., None]]:
    """Make a test that runs a coroutine with a server, by `run` with these options."""

    def decorate(body: Callable[..., Awaitable[None]]) -> Callable[..., None]:
        @functools.wraps(body)
        def test(**arguments: Any) -> None:
            run(lambda server: body(server, **arguments), **options)

        _, *parameters = inspect.signature(body).parameters.values()
        test.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # pytest gives these
        return test

    return decorate
