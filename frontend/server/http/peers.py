"""Peers: passes HTTP requests on to the frontend of the same engine that can answer them.

A connection reaches any frontend, but an open answer, or a response being generated in the background, belongs to one.
Each frontend therefore listens on a socket in the run directory, and passes such a request, with its headers, on to
another frontend. A request that was passed on is not passed on again.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path
from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from ....ipc.spec.config.engine_spec import EngineSpec
from ...forms.openai.errors import HttpError

PASSED_ON = "x-tokenloom-passed-on"  # header that marks a request from another frontend
_HOP_BY_HOP = ("connection", "content-length", "transfer-encoding", "keep-alive", "expect")
_BACKLOG = 128


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
        """Return another frontend's answer to the request with this body; HttpError 503 if that frontend is being
        replaced."""
        try:
            reader, writer = await asyncio.open_unix_connection(self._path(index))
            try:
                return await _exchange(request, body, reader, writer)
            except BaseException:
                writer.close()
                raise
        except (OSError, asyncio.IncompleteReadError):
            headers = {"retry-after": "1"}
            raise HttpError(503, "the frontend that has it is being replaced: ask again", headers=headers) from None

    def _path(self, index: int) -> str:
        return str(self._folder / f"http-{index}.sock")


async def _exchange(
    request: Request, body: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> Response:
    query = request.scope["query_string"].decode("latin-1")
    target = quote(request.scope["path"]) + (f"?{query}" if query else "")
    kept = [f"{name}: {value}" for name, value in request.headers.items() if name not in _HOP_BY_HOP]
    lines = [f"{request.method} {target} HTTP/1.1", *kept, f"content-length: {len(body)}", f"{PASSED_ON}: 1"]
    writer.write("\r\n".join([*lines, "connection: close", "", ""]).encode("latin-1") + body)
    await writer.drain()
    status_line, *fields = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").rstrip().split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (field.partition(":") for field in fields)}
    is_chunked = headers.get("transfer-encoding") == "chunked"
    kept_headers = {name: value for name, value in headers.items() if name not in _HOP_BY_HOP}
    pieces = _chunks(reader) if is_chunked else _whole(reader, int(headers.get("content-length", "0")))
    return StreamingResponse(_closing(pieces, writer), int(status_line.split()[1]), kept_headers)


async def _chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while size := int((await reader.readline()).partition(b";")[0], 16):
        yield (await reader.readexactly(size + 2))[:-2]


async def _whole(reader: asyncio.StreamReader, size: int) -> AsyncIterator[bytes]:
    yield await reader.readexactly(size)


async def _closing(pieces: AsyncIterator[bytes], writer: asyncio.StreamWriter) -> AsyncGenerator[bytes, None]:
    try:
        async for piece in pieces:
            yield piece
    finally:
        writer.close()
