"""HttpFetcher: fetches media over http(s) from allowed hosts with public addresses.

A name is resolved once for each connection, all its addresses must be public, and the connection goes to one of them,
so that a name whose address changes cannot lead elsewhere. Redirects are checked in the same way. No proxy, cookie or
header of the caller is used. The content is yielded as it arrives.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import TypeAlias

import httptools

from ....ipc.digits import whole_number
from ....ipc.errors import RequestError
from ....ipc.shortages.failure import shortage_of
from .addresses import is_public
from .media_url import AllowedDomains, MediaUrl, parse_url

MAX_REDIRECTS = 3
MAX_HEADER_BYTES = 64 << 10
READ_BYTES = 256 << 10
REDIRECTS = (301, 302, 303, 307, 308)
Resolve: TypeAlias = Callable[[str, int], Awaitable[list[str]]]


async def resolve(host: str, port: int) -> list[str]:
    """Return the addresses of a host."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


class HttpFetcher:
    """Fetcher of URLs from allowed domains, each within `timeout_s` and `max_bytes`."""

    def __init__(
        self,
        domains: AllowedDomains,
        max_bytes: int,
        timeout_s: float,
        *,
        resolve: Resolve = resolve,
        is_allowed: Callable[[str], bool] = is_public,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """is_allowed: whether it is allowed to connect to an address. tls: None: trust the machine's certificate
        authorities."""
        self._domains, self._max_bytes, self._timeout_s = domains, max_bytes, timeout_s
        self._resolve, self._is_allowed, self._tls = resolve, is_allowed, tls

    async def fetch(self, text: str) -> AsyncGenerator[bytes]:
        """Yield the content of a URL in parts. RequestError if the URL may not or cannot be fetched, is too large or
        takes too long; Overloaded if a resource of this machine has run out."""
        url = parse_url(text)
        deadline = asyncio.get_running_loop().time() + self._timeout_s
        for _ in range(MAX_REDIRECTS + 1):
            self._domains.check(url)
            response = _Response(url, self._max_bytes)
            async with self._connection(url, deadline) as reader:
                while response.wants_data:
                    async with self._bounded(url, deadline):
                        data = await reader.read(READ_BYTES)
                    for part in response.receive(data):
                        yield part
            if not response.location:
                return
            url = url.follow(response.location)
        raise RequestError(f"{parse_url(text)} redirects more than {MAX_REDIRECTS} times: give the last URL")

    @contextlib.asynccontextmanager
    async def _bounded(self, url: MediaUrl, deadline: float) -> AsyncIterator[None]:
        """Turn errors of the connection, and a missed deadline, into RequestError, or Overloaded if a resource of this
        machine has run out."""
        try:
            async with asyncio.timeout_at(deadline):
                yield
        except TimeoutError:
            raise RequestError(
                f"{url} took longer than {self._timeout_s:g} s: send the file itself, or raise --media-fetch-timeout-s"
            ) from None
        except OSError as error:
            refusal = RequestError(f"{url} cannot be read: {error}: check the URL, or send the file itself")
            raise shortage_of(error, f"{url} cannot be read") or refusal from None

    @contextlib.asynccontextmanager
    async def _connection(self, url: MediaUrl, deadline: float) -> AsyncIterator[asyncio.StreamReader]:
        """Connect and send the request; the context's value is the reader of the response."""
        async with self._bounded(url, deadline):
            reader, writer = await self._connect(url, await self._addresses(url))
        try:
            writer.write(
                f"GET {url.target} HTTP/1.1\r\nHost: {url.host_header}\r\nUser-Agent: tokenloom\r\nAccept: */*\r\n"
                "Accept-Encoding: identity\r\nConnection: close\r\n\r\n".encode("ascii")
            )
            yield reader
        finally:
            writer.transport.abort()

    async def _addresses(self, url: MediaUrl) -> list[str]:
        addresses = await self._resolve(url.host, url.port)
        if not addresses or not all(map(self._is_allowed, addresses)):
            raise RequestError(f"{url}: the host {url.host} has an address outside the internet: use another host")
        return addresses

    async def _connect(self, url: MediaUrl, addresses: list[str]) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Connect to the first address that accepts the connection, and return its reader and writer."""
        tls, name = None, None
        if url.is_https:
            if self._tls is None:
                self._tls = ssl.create_default_context()
            tls, name = self._tls, url.host
        for address in addresses[:-1]:
            with contextlib.suppress(OSError):
                return await asyncio.open_connection(address, url.port, ssl=tls, server_hostname=name, limit=READ_BYTES)
        return await asyncio.open_connection(addresses[-1], url.port, ssl=tls, server_hostname=name, limit=READ_BYTES)


class _Response:
    """One HTTP response while it arrives; a redirect sets `location`. The parser calls the methods on_…."""

    def __init__(self, url: MediaUrl, max_bytes: int) -> None:
        self.location = ""
        self._url, self._max_bytes = url, max_bytes
        self._parser = httptools.HttpResponseParser(self)
        self._length: int | None = None
        self._is_chunked = self._has_headers = self._is_complete = False
        self._num_bytes = self._num_header_bytes = 0
        self._parts: list[bytes] = []
        self._error = ""

    @property
    def wants_data(self) -> bool:
        return not (self._is_complete or self.location)

    def receive(self, data: bytes) -> list[bytes]:
        """Return the parts of the body in `data`; [] for a redirect. b"" means that the connection has ended.
        RequestError if the response is incomplete, too large, or neither a redirect nor one with status 200."""
        if not data:
            if not self._has_headers or self._length is not None or self._is_chunked:
                raise self._refusal(f"ended after {self._num_bytes} of {self._length or 'its'} bytes")
            self._is_complete = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            raise self._refusal(f"does not speak HTTP: {error}") from None
        self._check(len(data))
        parts, self._parts = self._parts, []
        return [] if self.location else parts

    def _check(self, num_new: int) -> None:
        if not self._has_headers:
            self._num_header_bytes += num_new
            if self._num_header_bytes > MAX_HEADER_BYTES:
                raise self._refusal(f"sent headers of more than {MAX_HEADER_BYTES} bytes")
            return
        status = self._parser.get_status_code()
        if status in REDIRECTS and self.location:
            return
        if status != 200:
            raise self._refusal(f"answered with status {status}")
        if self._error:
            raise self._refusal(self._error)
        if max(self._length or 0, self._num_bytes) > self._max_bytes:
            size = self._length if self._length is not None else f"more than {self._max_bytes}"
            raise RequestError(
                f"{self._url} has {size} bytes, at most {self._max_bytes} are read: use a smaller file or raise "
                "--max-media-bytes"
            )

    def on_header(self, name: bytes, value: bytes) -> None:
        key, text = name.lower(), value.decode("latin-1").strip()
        if key == b"location":
            self.location = text
        elif key == b"content-length":
            self._length = whole_number(text)
        elif key == b"transfer-encoding":
            self._is_chunked = text.lower() != "identity"
        elif key == b"content-encoding" and text.lower() not in ("", "identity"):
            self._error = f"compressed the file as {text[:40]}, which was not asked for"

    def on_headers_complete(self) -> None:
        self._has_headers = True
        if self._parser.get_status_code() not in REDIRECTS:
            self.location = ""

    def on_body(self, part: bytes) -> None:
        self._num_bytes += len(part)
        self._parts.append(part)

    def on_message_complete(self) -> None:
        self._is_complete = True

    def _refusal(self, reason: str) -> RequestError:
        return RequestError(f"{self._url} {reason}: check the URL, or send the file itself")
