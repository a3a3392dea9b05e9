"""The limits of a request's head and trailers, which hold before a key is checked, on real sockets."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator

import pytest
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tokenloom.frontend.server.http.connections import MAX_HEAD_BYTES, MAX_HEADERS, MAX_PIPELINED
from tokenloom.tests.frontend.server.http.rig import CHUNKED, GET, Server, run, served

SENT_BYTES = 4 << 20  # by a client that does not stop
MANY_HEADERS = b"".join(b"x-%d: %s\r\n" % (i, b"a" * 50) for i in range(1000))
ENDLESS = {  # the begin of a request, and the repeated part
    "headers": (b"GET / HTTP/1.1\r\n", MANY_HEADERS),
    "header": (b"GET / HTTP/1.1\r\nx: ", b"a" * 60_000),
    "header name": (b"GET / HTTP/1.1\r\n", b"a" * 60_000),
    "url": (b"GET /", b"a" * 60_000),
    "blank lines": (b"", b"\r\n" * 30_000),
    "trailers": (CHUNKED + b"0\r\n", MANY_HEADERS),
    "trailer": (CHUNKED + b"1\r\nx\r\n0\r\nx: ", b"a" * 60_000),
    "chunk extension": (CHUNKED + b"1;", b"a" * 60_000),
    "chunk size": (CHUNKED, b"0" * 60_000),
}


def pieces(begin: bytes, repeated: bytes) -> Iterator[bytes]:
    yield begin
    for _ in range(SENT_BYTES // len(repeated)):
        yield repeated


@pytest.mark.parametrize("kind", ENDLESS)
@served()
async def test_a_head_without_end_gets_431_and_its_rest_is_dropped(server: Server, kind: str) -> None:
    client = await server.connect()
    for piece in pieces(*ENDLESS[kind]):  # a client that reads nothing before it has sent all
        client.send(piece)
    status, body = await client.answer()
    assert status == 431 and str(MAX_HEAD_BYTES) in json.loads(body)["error"]["message"]
    assert await client.rest() == b"" and server.refused == [(431, "head")]
    assert len(getattr(server.accepted[0], "url", b"")) <= MAX_HEAD_BYTES
    assert len(server.accepted[0].headers or ()) <= MAX_HEADERS


@pytest.mark.parametrize("kind", ["headers", "trailers", "url"])
@served()
async def test_a_head_is_refused_once_though_much_of_it_comes_at_once(server: Server, kind: str) -> None:
    begin, repeated = ENDLESS[kind]
    client = await server.connect(begin)
    while not server.accepted or server.accepted[0].headers is None:
        await asyncio.sleep(0)
    client.send(repeated * 4)
    assert (await client.answer())[0] == 431
    client.send(repeated * 4)  # no reset
    assert await client.rest() == b"" and server.refused == [(431, "head")]


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"GET /%b HTTP/1.1\r\nhost: x\r\n" % (b"u" * 60_000), 200),
        (b"GET /%b HTTP/1.1\r\nhost: x\r\n" % (b"u" * MAX_HEAD_BYTES), 431),
        (b"GET / HTTP/1.1\r\ncookie: %b\r\n" % (b"c" * 60_000), 200),
        (b"GET / HTTP/1.1\r\ncookie: %b\r\n" % (b"c" * MAX_HEAD_BYTES), 431),
        (b"GET / HTTP/1.1\r\n" + b"x: y\r\n" * MAX_HEADERS, 200),
        (b"GET / HTTP/1.1\r\n" + b"x: y\r\n" * (MAX_HEADERS + 1), 431),
    ],
    ids=["url", "longer url", "cookie", "longer cookie", "headers", "more headers"],
)
@pytest.mark.parametrize("num_pieces", [1, 40])
@served()
async def test_the_limit_does_not_depend_on_how_a_head_comes(
    server: Server, head: bytes, status: int, num_pieces: int
) -> None:
    client, size = await server.connect(), -(-len(head) // num_pieces)
    for begin in range(0, len(head), size):
        client.send(head[begin : begin + size])
    client.send(b"\r\n")
    assert (await client.answer())[0] == status


@served()
async def test_each_request_of_a_connection_has_the_whole_limit(server: Server) -> None:
    client = await server.connect()
    for _ in range(4):
        client.send(b"GET / HTTP/1.1\r\ncookie: %b\r\n\r\n" % (b"c" * 40_000))
        assert (await client.answer())[0] == 200


@served()
async def test_requests_that_wait_for_an_answer_before_them_are_few(server: Server) -> None:
    client = await server.connect(GET % b"/" * (MAX_PIPELINED // 2))
    for _ in range(MAX_PIPELINED // 2):
        assert (await client.answer())[0] == 200
    client = await server.connect(GET % b"/slow" * 5000)
    assert b"HTTP" not in await client.rest()
    assert len(server.accepted[1].pipeline) <= MAX_PIPELINED


def test_a_body_of_any_number_of_tiny_chunks_is_passed_on_in_few_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    num_parts, pass_on = 0, HttpToolsProtocol.on_body

    def count(connection: HttpToolsProtocol, body: bytes) -> None:
        nonlocal num_parts
        num_parts += 1
        pass_on(connection, body)

    monkeypatch.setattr(HttpToolsProtocol, "on_body", count)

    async def test(server: Server) -> None:
        client = await server.connect(CHUNKED + b"1\r\nx\r\n" * 100_000 + b"0\r\nx-trailer: y\r\n\r\n")
        assert await client.answer() == (200, b"%08d" % 100_000)
        assert [name for name, _ in server.accepted[0].headers] == [b"host", b"transfer-encoding"]
        client.send(GET % b"/x")
        assert await client.answer() == (200, b"%08d" % 0)  # of the next request, without a body

    run(test)
    assert 1 <= num_parts <= 200
