"""Media come from allowed hosts with global addresses, in time and in size; nothing else is asked."""

from __future__ import annotations

import zlib

import pytest

from tokenloom.frontend.server.sources.addresses import is_public
from tokenloom.frontend.server.sources.http_fetch import MAX_HEADER_BYTES, resolve
from tokenloom.ipc.errors import RequestError
from tokenloom.tests.frontend.server.sources.web import ANSWER, Web, answering, content, fetcher, with_web


def redirect(location: str, status: int = 302) -> list[bytes]:
    return [f"HTTP/1.1 {status} Found\r\nLocation: {location}\r\nContent-Length: 3\r\n\r\nno!".encode()]


@with_web
async def test_bodies_of_each_framing_arrive_whole(server: Web) -> None:
    server.answers.update(
        {
            "/length": [ANSWER[:30], ANSWER[30:]],
            "/chunked": [
                b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhe\r\n",
                b"3\r\nllo\r\n0\r\n\r\n",
            ],
            "/close": [b"HTTP/1.0 200 OK\r\n\r\nhe", b"llo"],
        }
    )
    for path in server.answers:
        assert await content(fetcher(), server.url(path)) == b"hello", path
    head = server.requests[0]
    assert f"Host: a.example:{server.port}\r\n" in head and "Cookie" not in head


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ([b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n"], "status 404"),
        ([b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhello"], "ended after 5 of 9 bytes"),
        ([b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhe\r\n"], "ended after 2 of its bytes"),
        ([b"HTTP/1.1 200 OK\r\nContent-Length: 101\r\n\r\n"], "has 101 bytes, at most 100"),
        ([b"HTTP/1.1 200 OK\r\n\r\n", *[b"x" * 30] * 9], "has more than 100 bytes"),
        ([b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 9\r\n\r\n", zlib.compress(b"")], "as gzip"),
        ([b"SSH-2.0-OpenSSH_9.2\r\n"], "does not speak HTTP"),
        ([b"HTTP/1.1 200 OK\r\nX: " + b"x" * MAX_HEADER_BYTES, b"y" * 100], "headers of more than 65536 bytes"),
        ([], "ended after 0"),
        (redirect(""), "status 302"),
    ],
)
@with_web
async def test_anything_but_a_whole_answer_is_refused(server: Web, answer: list[bytes], reason: str) -> None:
    server.answers["/x"] = answer
    with pytest.raises(RequestError, match=reason):
        await content(fetcher(max_bytes=100), server.url("/x"))


@with_web
async def test_a_slow_server_costs_the_timeout(server: Web) -> None:
    server.answers["/drips"] = [b"HTTP/1.1 200 OK\r\n\r\n", *[b"x"] * 1000]
    for path in ("/hangs", "/drips"):
        with pytest.raises(RequestError, match=r"took longer than 0\.2 s"):
            await content(fetcher(timeout_s=0.2), server.url(path))


@with_web
async def test_redirects_are_followed_three_times(server: Web) -> None:
    server.answers.update({f"/{i}": redirect(f"/{i + 1}", 301 + i % 2) for i in range(4)} | {"/4": [ANSWER]})
    assert await content(fetcher(), server.url("/1")) == b"hello"
    with pytest.raises(RequestError, match="redirects more than 3 times"):
        await content(fetcher(), server.url("/0"))


@pytest.mark.parametrize(
    "location",
    [
        "http://127.0.0.1:{port}/secret",
        "http://localhost:{port}/secret",
        "http://169.254.169.254/latest/meta-data/",
        "http://[::1]:{port}/secret",
        "http://[::ffff:127.0.0.1]:{port}/secret",
        "http://2130706433:{port}/secret",
        "http://0x7f.1:{port}/secret",
        "file:///etc/passwd",
        "//other.example:{port}/secret",
    ],
)
@with_web
async def test_a_redirect_is_checked_like_the_first_url(server: Web, location: str) -> None:
    """The first host's address is made a global one; those that it redirects to are resolved in earnest."""

    server.answers.update({"/x": redirect(location.format(port=server.port)), "/secret": [ANSWER]})
    first = [True]

    async def resolve_host(host: str, port: int) -> list[str]:
        if host == "a.example":
            return ["127.0.0.1"]
        return await resolve(host, port)

    def is_allowed(address: str) -> bool:
        return bool(first and first.pop()) or is_public(address)

    domains = ("*",) if "other" not in location else ("a.example",)
    http = fetcher(resolve_host, domains=domains, is_allowed=is_allowed)
    with pytest.raises(RequestError):
        await content(http, server.url("/x"))
    assert len(server.requests) == 1


@with_web
async def test_one_private_address_of_a_host_is_enough_to_refuse_it(server: Web) -> None:
    server.answers["/x"] = [ANSWER]
    with pytest.raises(RequestError, match="outside the internet"):
        await content(fetcher(answering("127.0.0.1", "10.0.0.1")), server.url("/x"))
    assert not server.requests


@with_web
async def test_the_address_that_was_checked_is_the_one_connected_to(server: Web) -> None:
    """A name that has another address at each question is asked once for each connection."""

    server.answers["/x"] = [ANSWER]
    answers = iter([["127.0.0.1"], ["10.0.0.1"]])

    async def change(host: str, port: int) -> list[str]:
        return next(answers)

    http = fetcher(change)
    assert await content(http, server.url("/x")) == b"hello"
    with pytest.raises(RequestError, match="outside the internet"):
        await content(http, server.url("/x"))
    assert len(server.requests) == 1


@with_web
async def test_the_next_address_is_tried_if_one_refuses(server: Web) -> None:
    server.answers["/x"] = [ANSWER]
    http = fetcher(answering("127.0.0.2", "127.0.0.1"), is_allowed=lambda address: True)
    assert await content(http, server.url("/x")) == b"hello"


@with_web
async def test_hosts_that_were_not_allowed_are_not_even_resolved_and_an_unknown_one_is_the_callers_error(
    server: Web,
) -> None:
    asked: list[str] = []

    async def note(host: str, port: int) -> list[str]:
        asked.append(host)
        return []

    with pytest.raises(RequestError, match=r"b\.example is not among the 1"):
        await content(fetcher(note, domains=("a.example",)), "http://b.example/x")
    with pytest.raises(RequestError, match="cannot be read"):
        await content(fetcher(resolve), "http://name.invalid/x")
    assert not asked
