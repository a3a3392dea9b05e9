"""RecordingProxy: an HTTP server between a client and an engine, which keeps every request and its answer.

It passes streams on as they come. `change` may edit a body on its way, to make an engine's model say a given thing.
"""

from __future__ import annotations

import contextlib
import http.client
import http.server
import json
import threading
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

import msgspec

TIMEOUT_S = 600.0  # of an answer
_OF_A_CONNECTION = ("host", "content-length", "transfer-encoding", "connection", "accept-encoding")
_SET_ANEW = ("transfer-encoding", "connection", "date", "server")  # headers of an answer
Change = Callable[[str, Any], Any]  # path, decoded body → the body for the engine


class Exchange(msgspec.Struct, frozen=True, kw_only=True):
    """A request, as the client sent it, and its answer."""

    method: str
    path: str
    headers: Mapping[str, str]  # by lower-case name
    body: Any  # decoded JSON, None without a body
    status: int
    answer: bytes
    answer_headers: Mapping[str, str]
    is_whole: bool  # the client read the answer to its end


class RecordingProxy(http.server.ThreadingHTTPServer):
    """The proxy, which serves from the `with` on."""

    daemon_threads = True

    def __init__(self, url: str, change: Change | None = None) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.engine = urlsplit(url)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.change = change
        self._exchanges: list[Exchange] = []  # in the order of their ends
        self._num_open = 0
        self._changed = threading.Condition()

    @property
    def exchanges(self) -> list[Exchange]:
        """All requests so far and their answers, once those that are open have ended."""
        with self._changed:
            assert self._changed.wait_for(lambda: not self._num_open, TIMEOUT_S), f"{self._num_open} are still open"
            return list(self._exchanges)

    def open_one(self) -> None:
        with self._changed:
            self._num_open += 1

    def end_one(self, exchange: Exchange | None) -> None:
        """Keep an exchange that has ended; None: the engine could not be asked."""
        with self._changed:
            self._num_open -= 1
            self._exchanges += [] if exchange is None else [exchange]
            self._changed.notify_all()

    def __enter__(self) -> Self:
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.shutdown()
        self.server_close()


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: RecordingProxy

    def do_GET(self) -> None:
        self._pass_on()

    def do_HEAD(self) -> None:
        self._pass_on()

    def do_POST(self) -> None:
        self._pass_on()

    def do_DELETE(self) -> None:
        self._pass_on()

    def _pass_on(self) -> None:
        self.server.open_one()
        exchange: Exchange | None = None
        try:
            exchange = self._exchange()
        finally:
            self.server.end_one(exchange)

    def _exchange(self) -> Exchange:
        raw = self._body()
        body = json.loads(raw) if raw else None
        if raw and self.server.change is not None:
            raw = json.dumps(self.server.change(self.path, json.loads(raw))).encode()
        headers = {name: value for name, value in self.headers.items() if name.lower() not in _OF_A_CONNECTION}
        engine = self.server.engine
        connection = http.client.HTTPConnection(engine.hostname or "", engine.port, timeout=TIMEOUT_S)
        with contextlib.closing(connection):
            connection.request(self.command, self.path, raw or None, headers)
            response = connection.getresponse()
            answer, is_whole = self._send_back(response)
        return Exchange(
            method=self.command,
            path=self.path,
            headers={name.lower(): value for name, value in self.headers.items()},
            body=body,
            status=response.status,
            answer=answer,
            answer_headers={name.lower(): value for name, value in response.getheaders()},
            is_whole=is_whole,
        )

    def _body(self) -> bytes:
        if "chunked" not in self.headers.get("transfer-encoding", ""):
            return self.rfile.read(int(self.headers.get("content-length") or 0))
        found = b""
        while size := int(self.rfile.readline().partition(b";")[0], 16):
            found += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return found

    def _send_back(self, response: http.client.HTTPResponse) -> tuple[bytes, bool]:
        """Send the answer as it comes; return it, and whether the client took it all."""
        self.send_response(response.status)
        for name, value in response.getheaders():
            if name.lower() not in _SET_ANEW:
                self.send_header(name, value)
        in_chunks = response.getheader("content-length") is None and self.command != "HEAD"
        if in_chunks:
            self.send_header("transfer-encoding", "chunked")
        answer = b""
        try:
            self.end_headers()
            while part := response.read1(1 << 16):
                answer += part
                self.wfile.write(b"%x\r\n%s\r\n" % (len(part), part) if in_chunks else part)
                self.wfile.flush()
            if in_chunks:
                self.wfile.write(b"0\r\n\r\n")
        except OSError:
            self.close_connection = True
            return answer, False
        return answer, True

    def log_message(self, *arguments: object) -> None: ...
