"""Time limits of HTTP clients and the limit of connections, with uvicorn's parser on real sockets and a test app."""

from __future__ import annotations

import asyncio
import json

import pytest

from tokenloom.frontend.server.http.connections import MAX_PIPELINED, MIN_BYTES_PER_S
from tokenloom.tests.frontend.server.http.rig import CHUNKED, DEADLINE_S, GET, HEAD, LIMIT_S, ClockLoop, Server, served

BAD_URL = b"http://x:99999/"  # the parser takes it as a target; its port is too large


@served(new_loop=ClockLoop)
async def test_a_head_sent_byte_by_byte_gets_408_and_is_closed(server: Server) -> None:
    client, begun = await server.connect(), asyncio.get_running_loop().time()
    dribbling = asyncio.ensure_future(client.dribble(b"GET / HTTP/1.1\r\nx: " + b"y" * 500, 0.02))
    status, body = await client.answer()
    assert status == 408 and b"the head of the request did not come whole" in body
    assert json.loads(body)["error"]["type"] == "invalid_request_error"
    assert LIMIT_S <= asyncio.get_running_loop().time() - begun < 2 * LIMIT_S
    await client.rest()
    dribbling.cancel()
    assert server.refused == [(408, "slow")]


@pytest.mark.parametrize("interval_s", [0.02, 2 * DEADLINE_S])
@served(new_loop=ClockLoop)
async def test_a_body_that_trickles_or_stalls_gets_408_and_is_closed(server: Server, interval_s: float) -> None:
    client = await server.connect(HEAD % 100_000)
    dribbling = asyncio.ensure_future(client.dribble(b"x" * 1000, interval_s))
    status, body = await client.answer()
    assert status == 408 and b"of the body came within" in body
    await client.rest()
    dribbling.cancel()


@served(new_loop=ClockLoop)
async def test_a_body_at_the_minimum_rate_may_take_longer_than_the_limit(server: Server) -> None:
    num_pieces, piece = 15, b"x" * int(MIN_BYTES_PER_S * LIMIT_S)
    client = await server.connect(HEAD % (num_pieces * len(piece)))
    for _ in range(num_pieces):
        client.send(piece)
        await asyncio.sleep(LIMIT_S / 4)
    assert await client.answer() == (200, b"%08d" % (num_pieces * len(piece)))


@served(new_loop=ClockLoop)
async def test_a_connection_that_never_sends_is_closed_without_an_answer(server: Server) -> None:
    client = await server.connect()
    assert await client.rest() == b"" and server.refused == []


@served(new_loop=ClockLoop)
async def test_an_idle_connection_stays_open_but_half_a_second_request_gets_408(server: Server) -> None:
    client = await server.connect(GET % b"/")
    assert (await client.answer())[0] == 200
    await asyncio.sleep(2 * LIMIT_S)
    client.send(GET % b"/")
    assert (await client.answer())[0] == 200
    client.send(b"GET /")
    assert (await client.answer())[0] == 408


@served(new_loop=ClockLoop)
async def test_an_answer_has_no_time_limit_even_with_half_a_request_behind_it(server: Server) -> None:
    client = await server.connect(GET % b"/slow" + b"GET / HT")
    await asyncio.sleep(3 * LIMIT_S)
    server.finish.set()
    assert await client.answer() == (200, b"slowdone")
    assert (await client.answer())[0] == 408


@pytest.mark.parametrize("broken", [CHUNKED + b"no chunk\r\n", GET % BAD_URL], ids=["body", "url"])
@pytest.mark.parametrize("has_begun", [True, False])
@served(new_loop=ClockLoop)
async def test_an_open_answer_gets_no_error_of_the_request_behind_it(
    server: Server, broken: bytes, has_begun: bool
) -> None:
    client = await server.connect(GET % b"/slow" + (b"" if has_begun else broken))
    if has_begun:
        await client.begin()
        client.send(broken)
    assert await client.rest() == b"" and server.refused == []


@served()
async def test_the_time_of_a_body_does_not_run_while_the_answer_before_it_is_open(server: Server) -> None:
    client = await server.connect(GET % b"/slow" + HEAD % 3 + b"x")
    await client.begin()
    server.accepted[0].check(asyncio.get_running_loop().time() + 100 * LIMIT_S, 0.0)
    server.finish.set()
    assert await client.take(4) == b"done"
    client.send(b"xx")
    assert await client.answer() == (200, b"%08d" % 3) and server.refused == []


@served(new_loop=ClockLoop)
async def test_the_timer_runs_only_while_a_connection_waits_for_its_client(server: Server) -> None:
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


@served(new_loop=ClockLoop)
async def test_time_in_which_the_loop_was_blocked_does_not_count(server: Server) -> None:
    client = await server.connect(b"GET / HTTP/1.1\r\n")
    await asyncio.sleep(LIMIT_S / 8)
    loop = asyncio.get_running_loop()
    assert isinstance(loop, ClockLoop)
    loop.now_s += 5 * LIMIT_S
    await asyncio.sleep(LIMIT_S / 8)  # the timer has run
    client.send(b"host: x\r\n\r\n")
    assert (await client.answer())[0] == 200


@served(max_connections=2)
async def test_a_new_connection_at_the_limit_closes_the_one_idle_for_longest(server: Server) -> None:
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


@served(max_connections=2)
async def test_if_all_connections_are_busy_a_new_one_gets_503_except_for_probes(server: Server) -> None:
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


@pytest.mark.parametrize("request_line", [b"\x16\x03\x01 this is TLS\r\n\r\n", GET % BAD_URL], ids=["tls", "url"])
@served(new_loop=ClockLoop)
async def test_a_request_that_is_not_http_gets_400_in_openais_form_also_behind_an_answer(
    server: Server, request_line: bytes
) -> None:
    client = await server.connect(GET % b"/")
    assert (await client.answer())[0] == 200
    for each in (client, await server.connect()):
        each.send(request_line)
        status, body = await each.answer()
        assert status == 400 and "HTTP/1.1" in json.loads(body)["error"]["message"]
        assert await each.rest() == b""
    assert server.refused == [(400, "http")] * 2


@pytest.mark.parametrize("keeps", [b"", b"connection: keep-alive\r\n"])
@pytest.mark.parametrize("body", [b"", b"abc"])
@served()
async def test_a_client_of_http_1_0_gets_a_stream_without_chunks_until_the_connection_closes(
    server: Server, body: bytes, keeps: bytes
) -> None:
    head = b"POST /stream HTTP/1.0\r\nexpect: 100-continue\r\ncontent-length: %d\r\n" % len(body)
    client = await server.connect(head + keeps + b"\r\n" + body)
    got, _, content = (await client.rest()).partition(b"\r\n\r\n")
    assert content == b"%08dmore" % len(body)
    assert got.splitlines()[0] == b"HTTP/1.1 200 OK", "100 Continue is unknown to HTTP/1.0"
    assert b"transfer-encoding" not in got.lower() and b"connection: close" in got.lower()


@served()
async def test_a_client_of_http_1_0_gets_an_answer_of_known_length_with_it_and_none_to_head(server: Server) -> None:
    client = await server.connect(b"GET / HTTP/1.0\r\n\r\n")
    assert await client.answer() == (200, b"%08d" % 0) and await client.rest() == b""
    client = await server.connect(b"HEAD /stream HTTP/1.0\r\n\r\n")
    head, _, content = (await client.rest()).partition(b"\r\n\r\n")
    assert content == b"" and b"transfer-encoding" not in head.lower()


@served()
async def test_a_client_of_http_1_1_gets_chunks_and_100_continue_also_behind_an_answer(server: Server) -> None:
    head = b"POST /stream HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: 3\r\n\r\n"
    client = await server.connect()
    for _ in range(2):
        client.send(head)
        continued = b"HTTP/1.1 100 Continue\r\n\r\n"
        assert await client.take(len(continued)) == continued
        client.send(b"abc")
        content = b"8\r\n00000003\r\n4\r\nmore\r\n0\r\n\r\n"
        assert (await client.until(content)).lower().count(b"transfer-encoding: chunked") == 1


SMUGGLED = b"GET /smuggled HTTP/1.1\r\nhost: x\r\n\r\n"
LENGTH, CODING = b"content-length: %d\r\n" % len(SMUGGLED), b"transfer-encoding: chunked\r\n"


@pytest.mark.parametrize(
    "fields",
    [
        *(CODING + LENGTH, LENGTH + CODING, b"content-length: 0\r\n" + LENGTH, LENGTH + b"content-length: 0\r\n"),
        *(
            b"content-length: +0\r\n",
            b"content-length: -1\r\n",
            b"content-length: 0x0\r\n",
            b"content-length: 0, 36\r\n",
        ),
        *(b"transfer-encoding: chunked, identity\r\n", b"transfer-encoding : chunked\r\n", b" x: y\r\n", b"x\r\n"),
        *(b"content-length: 99999999999999999999999\r\n", b"x: a\0b\r\n", b"content-length: \xb2\r\n"),
    ],
    ids=str,
)
@served(new_loop=ClockLoop)
async def test_a_request_whose_length_is_in_doubt_is_refused_with_all_that_follows(
    server: Server, fields: bytes
) -> None:
    client = await server.connect(b"POST /x HTTP/1.1\r\nhost: x\r\n" + fields + b"\r\n" + b"0\r\n\r\n" + SMUGGLED)
    answers = await client.rest()
    assert answers.startswith(b"HTTP/1.1 400 ") and b"200 OK" not in answers


@served()
async def test_requests_in_one_packet_are_answered_in_their_order(server: Server) -> None:
    bodies = [b"x" * length for length in (3, 0, 70_000, 1)]
    client = await server.connect(b"".join(HEAD % len(body) + body for body in bodies))
    assert [await client.answer() for _ in bodies] == [(200, b"%08d" % len(body)) for body in bodies]


@served()
async def test_too_many_requests_on_a_connection_end_the_open_answer_without_an_error_in_the_log(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    client = await server.connect(GET % b"/slow")
    await client.begin()
    client.send(GET % b"/" * (MAX_PIPELINED + 1))
    await client.rest()
    (connection,) = server.accepted
    server.finish.set()
    while connection.tasks:
        await asyncio.sleep(0.01)
    assert "Traceback" not in caplog.text and "ERROR" not in caplog.text
