"""A proxy in front of an HTTP server that records every request and answer, byte for byte, for a failed test."""

from __future__ import annotations

import http.client
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from urllib.parse import urlsplit

TIMEOUT_S = 120.0
HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding", "te", "trailer", "upgrade", "proxy-connection", "host"}
MOST_BYTES = 6000  # of a body in a report


class Exchange:
    """One request and its answer."""

    def __init__(self, line: str, body: bytes) -> None:
        self.line, self.body = line, body
        self.status, self.answer = 0, b""

    def __str__(self) -> str:
        sent, got = (each[:MOST_BYTES].decode(errors="replace") for each in (self.body, self.answer))
        return f"→ {self.line}\n{sent}\n← {self.status}\n{got}\n"


class RecordingProxy:
    """Serves the answers of `target` on `url`, chunk by chunk; leaving a `with` closes it."""

    def __init__(self, target: str) -> None:
        self.exchanges: list[Exchange] = []
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(urlsplit(target).netloc, self.exchanges))
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def report(self) -> str:
        return "\n".join(map(str, self.exchanges))

    def __enter__(self) -> RecordingProxy:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._thread.join(TIMEOUT_S)
        self._server.server_close()


def _handler(target: str, exchanges: list[Exchange]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def forward(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length") or 0))
            exchange = Exchange(f"{self.command} {self.path}", body)
            exchanges.append(exchange)
            headers = {name: value for name, value in self.headers.items() if name.lower() not in HOP_BY_HOP}
            connection = http.client.HTTPConnection(target, timeout=TIMEOUT_S)
            try:
                connection.request(self.command, self.path, body or None, headers)
                self._give_back(connection.getresponse(), exchange)
            except OSError:  # the client has disconnected, which ends the request at the server, too
                self.close_connection = True
            finally:
                connection.close()

        def _give_back(self, answer: http.client.HTTPResponse, exchange: Exchange) -> None:
            exchange.status = answer.status
            self.send_response_only(answer.status)
            for name, value in answer.getheaders():
                if name.lower() not in HOP_BY_HOP | {"content-length"}:
                    self.send_header(name, value)
            self.send_header("connection", "close")  # marks the end of the answer
            self.end_headers()
            while data := answer.read1(65536):
                exchange.answer += data
                self.wfile.write(data)
                self.wfile.flush()
            self.close_connection = True

        do_GET = do_POST = do_DELETE = do_PUT = do_OPTIONS = forward  # noqa: N815

        def log_message(self, format: str, *args: object) -> None:
            """Log nothing: a failed test prints the exchanges."""

    return Handler
