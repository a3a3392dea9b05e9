"""A web server of scripted answers, and names that lead to it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import NamedTuple

from tokenloom.frontend.server.sources.http_fetch import HttpFetcher, Resolve
from tokenloom.frontend.server.sources.media_url import AllowedDomains
from tokenloom.tests.support.in_loop import in_loop

ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"


class Web(NamedTuple):
    """The server's port; the heads of the requests that it got; its answers by path, as parts with pauses between."""

    port: int
    requests: list[str]
    answers: dict[str, list[bytes]]

    def url(self, path: str, host: str = "a.example") -> str:
        return f"http://{host}:{self.port}{path}"


@contextlib.asynccontextmanager
async def web() -> AsyncIterator[Web]:
    """Serve answers; a path without one hangs."""
    requests: list[str] = []
    answers: dict[str, list[bytes]] = {}

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            requests.append(head)
            for part in answers.get(head.split()[1], []):
                writer.write(part)
                await writer.drain()
                await asyncio.sleep(0.01)
            if head.split()[1] not in answers:
                await reader.read()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # the fetcher has gone
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield Web(server.sockets[0].getsockname()[1], requests, answers)


with_web = in_loop(lambda _: web())  # the first argument of a test


def answering(*addresses: str) -> Resolve:
    """Make a resolver that finds these addresses for every name."""

    async def resolve(host: str, port: int) -> list[str]:
        return list(addresses)

    return resolve


def fetcher(
    resolve: Resolve | None = None,
    *,
    max_bytes: int = 1 << 20,
    timeout_s: float = 5.0,
    domains: tuple[str, ...] = ("*",),
    is_allowed: Callable[[str], bool] = lambda address: address == "127.0.0.1",
) -> HttpFetcher:
    """Make a fetcher for which the server's address is of the internet."""
    return HttpFetcher(
        AllowedDomains(domains), max_bytes, timeout_s, resolve=resolve or answering("127.0.0.1"), is_allowed=is_allowed
    )


async def content(http: HttpFetcher, url: str) -> bytes:
    return b"".join([part async for part in http.fetch(url)])
