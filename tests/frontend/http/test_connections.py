"""Time limits of HTTP clients and the limit of connections, with uvicorn's parser on real sockets and a test app."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncGenerator, Awaitable, Callable

import pytest
import uvicorn
import uvloop
from starlette.types import Receive, Scope, Send

from tokenloom.frontend.http.connections import MIN_BYTES_PER_S, Connections, HttpConnection
from tokenloom.frontend.http.middleware import HttpMiddleware
from tokenloom.frontend.openai.forms.errors import HttpError

DEADLINE_S = 10.0
LIMIT_S = 0.2
HEAD = b"POST /x HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n"
CHUNKED = b"POST /x HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
GET = b"GET %s HTTP/1.1\r\nhost: x\r\n\r\n"
BAD_URL = b"http://x:99999/"  # the parser takes it as a target; its port is too large


class Server:
    """Server that answers with the length of the body; on `/slow` only once `finish` is set."""

    def __init__(self) -> None:
        self.refused: list[tuple[int, str]] = []
        self.finish = asyncio.Event()
        self.connections: Connections
        self.port = 0
        self.accepted: list[HttpConnection] = []
        self._clients: list[Client] = []

    async def app(self, scope: Scope, receive: Receive, send: Send) -> None:
        length, has_more = 0, True
        while has_more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            length, has_more = length + len(message["body"]), message["more_body"]
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"8")]})
        if scope["path"] == "/slow":
            await send({"type": "http.response.body", "body": b"slow", "more_body": True})
            await self.finish.wait()
            await send({"type": "http.response.body", "body": b"done"})
        else:
            await send({"type": "http.response.body", "body": b"%08d" % length})

    def on_refused(self, connection: HttpConnection, error: HttpError, why: str) -> None:
        self.refused.append((error.status, why))

    @contextlib.asynccontextmanager
    async def serve(self, max_connections: int) -> AsyncGenerator[None, None]:
        middleware = HttpMiddleware(self.app, None, 10**9, lambda why: self.refused.append((503, why)))
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
        """Send byte by byte until the server closes the connection."""
        with contextlib.suppress(ConnectionError, RuntimeError):  # uvloop raises RuntimeError if it is closed
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


def run(test: Callable[[Server], Awaitable[None]], max_connections: int = 100) -> None:
    async def within() -> None:
        server = Server()
        async with server.serve(max_connections):
            await test(server)

    async def limited() -> None:
        await asyncio.wait_for(within(), DEADLINE_S)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(limited())


def test_a_head_sent_byte_by_byte_gets_408_and_is_closed() -> None:
    async def test(server: Server) -> None:
        client, begun = await server.connect(), time.monotonic()
        dribbling = asyncio.ensure_future(client.dribble(b"GET / HTTP/1.1\r\nx: " + b"y" * 500, 0.02))
        status, body = await client.answer()
        assert status == 408 and b"the head of the request did not come whole" in body
        assert json.loads(body)["error"]["type"] == "invalid_request_error"
        assert LIMIT_S <= time.monotonic() - begun < 3 * LIMIT_S
        await client.rest()
        await dribbling
        assert server.refused == [(408, "slow")]

    run(test)


@pytest.mark.parametrize("interval_s", [0.02, 2 * DEADLINE_S])
def test_a_body_that_trickles_or_stalls_gets_408_and_is_closed(interval_s: float) -> None:
    async def test(server: Server) -> None:
        client = await server.connect(HEAD % 100_000)
        dribbling = asyncio.ensure_future(client.dribble(b"x" * 1000, interval_s))
        status, body = await client.answer()
        assert status == 408 and b"of the body came within" in body
        await client.rest()
        dribbling.cancel()

    run(test)


def test_a_body_at_the_minimum_rate_may_take_longer_than_the_limit() -> None:
    async def test(server: Server) -> None:
        num_pieces, piece = 15, b"x" * int(MIN_BYTES_PER_S * LIMIT_S)
        client = await server.connect(HEAD % (num_pieces * len(piece)))
        for _ in range(num_pieces):
            client.send(piece)
            await asyncio.sleep(LIMIT_S / 4)
        assert await client.answer() == (200, b"%08d" % (num_pieces * len(piece)))

    run(test)


def test_a_connection_that_never_sends_is_closed_without_an_answer() -> None:
    async def test(server: Server) -> None:
        client = await server.connect()
        assert await client.rest() == b"" and server.refused == []

    run(test)


def test_an_idle_connection_stays_open_but_half_a_second_request_gets_408() -> None:
    async def test(server: Server) -> None:
        client = await server.connect(GET % b"/")
        assert (await client.answer())[0] == 200
        await asyncio.sleep(2 * LIMIT_S)
        client.send(GET % b"/")
        assert (await client.answer())[0] == 200
        client.send(b"GET /")
        assert (await client.answer())[0] == 408

    run(test)


def test_an_answer_has_no_time_limit_even_with_half_a_request_behind_it() -> None:
    async def test(server: Server) -> None:
        client = await server.connect(GET % b"/slow" + b"GET / HT")
        await asyncio.sleep(3 * LIMIT_S)
        server.finish.set()
        assert await client.answer() == (200, b"slowdone")
        assert (await client.answer())[0] == 408

    run(test)


@pytest.mark.parametrize("broken", [CHUNKED + b"no chunk\r\n", GET % BAD_URL], ids=["body", "url"])
@pytest.mark.parametrize("has_begun", [True, False])
def test_an_open_answer_gets_no_error_of_the_request_behind_it(broken: bytes, has_begun: bool) -> None:
    async def test(server: Server) -> None:
        client = await server.connect(GET % b"/slow" + (b"" if has_begun else broken))
        if has_begun:
            await client.begin()
            client.send(broken)
        assert await client.rest() == b"" and server.refused == []

    run(test)


def test_a_bad_url_behind_a_complete_answer_gets_400() -> None:
    async def test(server: Server) -> None:
        client = await server.connect(GET % b"/")
        assert (await client.answer())[0] == 200
        client.send(GET % BAD_URL)
        assert (await client.answer())[0] == 400 and server.refused == [(400, "http")]

    run(test)


def test_the_time_of_a_body_does_not_run_while_the_answer_before_it_is_open() -> None:
    async def test(server: Server) -> None:
        client = await server.connect(GET % b"/slow" + HEAD % 3 + b"x")
        await client.begin()
        server.accepted[0].check(asyncio.get_running_loop().time() + 100 * LIMIT_S, 0.0)
        server.finish.set()
        assert await client.take(4) == b"done"
        client.send(b"xx")
        assert await client.answer() == (200, b"%08d" % 3) and server.refused == []

    run(test)


def test_the_timer_runs_only_while_a_connection_waits_for_its_client() -> None:
    async def test(server: Server) -> None:
        assert not server.connections.has_timer
        idle, slow = await server.connect(GET % b"/"), await server.connect(GET % b"/slow")
        await idle.answer()
        while server.connections.has_timer:
            await asyncio.sleep(LIMIT_S / 10)
        half = await server.connect(b"GET")
        await asyncio.sleep(LIMIT_S / 10)
        assert server.connections.has_timer
        await half.rest()
        while server.connections.has_timer:
            await asyncio.sleep(LIMIT_S / 10)
        server.finish.set()
        assert (await slow.answer())[0] == 200

    run(test)


def test_time_in_which_the_loop_was_blocked_does_not_count() -> None:
    async def test(server: Server) -> None:
        client = await server.connect(b"GET / HTTP/1.1\r\n")
        await asyncio.sleep(LIMIT_S / 2)
        client.send(b"host: x\r\n\r\n")
        time.sleep(5 * LIMIT_S)  # the rest of the request waits in the socket
        assert (await client.answer())[0] == 200

    run(test)


def test_a_new_connection_at_the_limit_closes_the_one_idle_for_longest() -> None:
    async def test(server: Server) -> None:
        first, second = await server.connect(GET % b"/"), await server.connect(GET % b"/")
        for each in (first, second):
            assert (await each.answer())[0] == 200
        first.send(GET % b"/")
        assert (await first.answer())[0] == 200
        third = await server.connect(GET % b"/")
        assert (await third.answer())[0] == 200
        assert await second.rest() == b"" and server.refused == []
        first.send(GET % b"/")
        assert (await first.answer())[0] == 200

    run(test, max_connections=2)


def test_if_all_connections_are_busy_a_new_one_gets_503_except_for_probes() -> None:
    async def test(server: Server) -> None:
        busy = [await server.connect(GET % b"/slow") for _ in range(2)]
        for _ in range(3):
            refused = await server.connect(GET % b"/v1/models")
            status, body = await refused.answer()
            assert status == 503 and json.loads(body)["error"]["code"] == "overloaded"
            assert await refused.rest() == b""
            probe = await server.connect(GET % b"/health")
            assert (await probe.answer())[0] == 200
        assert server.refused == [(503, "connections")] * 3
        server.finish.set()
        for each in busy:
            assert await each.answer() == (200, b"slowdone")
        again = await server.connect(GET % b"/v1/models")
        assert (await again.answer())[0] == 200

    run(test, max_connections=2)


def test_a_request_that_is_not_http_gets_400_in_openais_form() -> None:
    async def test(server: Server) -> None:
        client = await server.connect(b"\x16\x03\x01 this is TLS\r\n\r\n")
        status, body = await client.answer()
        assert status == 400 and "HTTP/1.1" in json.loads(body)["error"]["message"]
        assert await client.rest() == b"" and server.refused == [(400, "http")]

    run(test)
