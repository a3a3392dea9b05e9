"""Peers: passes HTTP requests on to the frontend of the same engine that can answer them.

A connection reaches any frontend, but an open answer, or a response being generated in the background, belongs to one.
Each frontend therefore listens on a socket in the run directory, and passes such a request, with its headers, on to
another frontend. A request that was passed on is not passed on again. A stream that is passed on goes on after the loss
of either frontend (api/openai/passed_stream.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote, urlencode

from starlette.requests import Request
from starlette.responses import Response

from ....ipc.spec.config.engine_spec import EngineSpec
from ...forms.openai.errors import HttpError
from ..api.openai.passed_stream import LostPeer, PassedStream, Place

PASSED_ON = "x-tokenloom-passed-on"  # header that marks a request from another frontend
_HOP_BY_HOP = ("connection", "content-length", "transfer-encoding", "keep-alive", "expect")
_BACKLOG = 128
PATIENCE_S = 60.0  # longest wait for the successor of a frontend that makes a stream
RETRY_S = 0.1


class Peers:
    """The other frontends of the engine. Owns this frontend's listening socket, once `listen` was called."""

    def __init__(self, spec: EngineSpec, index: int) -> None:
        self.index = index
        self._folder = Path(spec.run_directory)
        self.others = [each for each in range(spec.config.api_server_count) if each != index]

    def listen(self) -> list[socket.socket]:
        """Return the listening socket for other frontends, in a list; empty if there are no others."""
        if not self.others:
            return []
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path(self.index))  # left by this frontend's predecessor
        listener.bind(self._path(self.index))
        listener.listen(_BACKLOG)
        listener.setblocking(False)
        return [listener]

    async def ask_all(self, request: Request, body: bytes) -> Response | None:
        """Return the first successful answer of another frontend to the request; None if none succeeds, or if the
        request was passed on already."""
        for index in self.others if PASSED_ON not in request.headers else ():
            with contextlib.suppress(HttpError):
                response = await self.ask(request, index, body)
                if response.status_code < 400:
                    return response
        return None

    async def ask(self, request: Request, index: int, body: bytes = b"") -> Response:
        """Return another frontend's whole answer to the request with this body; HttpError 503 if that frontend is being
        replaced."""
        try:
            return await (await self._send(request, index, body)).whole()
        except (OSError, asyncio.IncompleteReadError, LostPeer):
            raise _is_replaced() from None

    async def follow(self, request: Request, index: int, place: Place) -> Response:
        """Return the stream of another frontend, from a place on. While that frontend is being replaced, wait:
        HttpError 503 if that takes longer than PATIENCE_S."""
        answer = await self._ask_patiently(request, index, place)
        if not answer.is_stream:
            return await answer.whole()

        async def ask_again() -> AsyncGenerator[bytes, None]:
            found = await self._ask_patiently(request, index, place)
            if not found.is_stream:
                raise HttpError(found.status, "the rest of the stream is not there any more")
            return found.parts

        stream = PassedStream(answer.parts, place, ask_again)
        stream.headers_sent = tuple((name.encode(), value.encode()) for name, value in answer.headers.items())
        return stream

    async def _ask_patiently(self, request: Request, index: int, place: Place) -> _Answer:
        """Ask for the stream behind a place until the other frontend answers."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + PATIENCE_S
        while True:
            try:
                return await self._send(request, index, b"", place)
            except (OSError, asyncio.IncompleteReadError):
                if loop.time() > deadline:
                    raise _is_replaced() from None
            await asyncio.sleep(RETRY_S)

    async def _send(self, request: Request, index: int, body: bytes, place: Place | None = None) -> _Answer:
        reader, writer = await asyncio.open_unix_connection(self._path(index))
        try:
            writer.write(_encode(request, body, place))
            await writer.drain()
            return await _Answer.begin(reader, writer)
        except BaseException:
            writer.close()
            raise

    def _path(self, index: int) -> str:
        return str(self._folder / f"http-{index}.sock")


def _is_replaced() -> HttpError:
    return HttpError(503, "the frontend that has it is being replaced: ask again", headers={"retry-after": "1"})


def _encode(request: Request, body: bytes, place: Place | None) -> bytes:
    query, left_out = request.scope["query_string"].decode("latin-1"), list(_HOP_BY_HOP)
    if place is not None:
        query = urlencode({**request.query_params, **place.parameters()})
        left_out.append("last-event-id")
    target = quote(request.scope["path"]) + (f"?{query}" if query else "")
    kept = [f"{name}: {value}" for name, value in request.headers.items() if name not in left_out]
    lines = [f"{request.method} {target} HTTP/1.1", *kept, f"content-length: {len(body)}", f"{PASSED_ON}: 1"]
    return "\r\n".join([*lines, "connection: close", "", ""]).encode("latin-1") + body


class _Answer(NamedTuple):
    """Another frontend's answer, of which the head has come."""

    status: int
    headers: Mapping[str, str]
    parts: AsyncGenerator[bytes, None]  # of the body; LostPeer if the other frontend ends amid it

    @classmethod
    async def begin(cls, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> _Answer:
        """Read the head."""
        status_line, *fields = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").rstrip().split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (field.partition(":") for field in fields)}
        is_chunked = headers.get("transfer-encoding") == "chunked"
        parts = _chunks(reader) if is_chunked else _whole(reader, int(headers.get("content-length", "0")))
        kept_headers = {name: value for name, value in headers.items() if name not in _HOP_BY_HOP}
        return cls(int(status_line.split()[1]), kept_headers, _closing(parts, writer))

    @property
    def is_stream(self) -> bool:
        return self.status == 200 and self.headers.get("content-type", "").startswith("text/event-stream")

    async def whole(self) -> Response:
        """Read the body."""
        body = b"".join([part async for part in self.parts])
        return Response(body, self.status, self.headers)


async def _chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while size := int((await reader.readuntil(b"\n")).partition(b";")[0], 16):
        yield (await reader.readexactly(size + 2))[:-2]


async def _whole(reader: asyncio.StreamReader, size: int) -> AsyncIterator[bytes]:
    yield await reader.readexactly(size)


async def _closing(parts: AsyncIterator[bytes], writer: asyncio.StreamWriter) -> AsyncGenerator[bytes, None]:
    try:
        async for part in parts:
            yield part
    except (OSError, asyncio.IncompleteReadError):
        raise LostPeer from None
    finally:
        writer.close()
