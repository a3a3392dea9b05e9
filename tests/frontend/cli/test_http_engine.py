"""HttpEngine beside a scripted server of OpenAI's API."""

from __future__ import annotations

import json
import threading
from collections.abc import Generator, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from tokenloom import SamplingParams
from tokenloom.frontend.cli.attached import End
from tokenloom.frontend.cli.http_engine import HttpEngine
from tokenloom.ipc.errors import ConfigError, EngineDead, RequestError
from tokenloom.ipc.messages.client import ChatMessage

Script = dict[str, tuple[int, bytes]]  # status and body by path

MODELS = json.dumps({"object": "list", "data": [{"id": "m", "default_sampling_params": {"top_k": 3}}, {"id": "n"}]})


class Server(ThreadingHTTPServer):
    """Answers by its script and keeps the requests."""

    def __init__(self, script: Script) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.script = {"/v1/models": (200, MODELS.encode())} | script
        self.requests: list[tuple[str, str | None, Any]] = []
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        self.server.requests.append((self.path, self.headers.get("authorization"), json.loads(body or b"null")))
        status, answer = self.server.script.get(self.path, (404, b"nothing here"))
        self.send_response(status)
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *arguments: object) -> None: ...


@pytest.fixture
def serve() -> Iterator[Any]:
    servers: list[Server] = []

    def start(**script: tuple[int, bytes]) -> Server:
        servers.append(Server({f"/{path.replace('__', '/')}": answer for path, answer in script.items()}))
        threading.Thread(target=servers[-1].serve_forever, args=(0.02,), daemon=True).start()
        return servers[-1]

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def events(*chunks: object) -> bytes:
    return b"".join(
        b"data: %s\n\n" % (each if isinstance(each, bytes) else json.dumps(each).encode()) for each in chunks
    )


def read(stream: Generator[str, None, End]) -> tuple[list[str], End]:
    pieces: list[str] = []
    while True:
        try:
            pieces.append(next(stream))
        except StopIteration as stop:
            return pieces, stop.value


def delta(**fields: object) -> dict[str, object]:
    reason = fields.pop("finish_reason", None)
    return {"choices": [{"index": 0, "delta": fields, "finish_reason": reason}]}


def test_a_chat_is_streamed_with_its_thoughts_end_and_count(serve: Any) -> None:
    usage = {"choices": [], "usage": {"completion_tokens": 9}}
    chunks = (delta(role="assistant"), delta(reasoning_content="hm "), delta(content="Li"), delta(content="ma"))
    server = serve(v1__chat__completions=(200, events(*chunks, delta(finish_reason="stop"), usage, b"[DONE]")))
    engine = HttpEngine(f"{server.url}/v1/", "secret")
    assert engine.model == "m" and engine.sampling_defaults == {"top_k": 3}
    params = SamplingParams(temperature=0.5, top_k=4, max_tokens=None)
    assert read(engine.stream([ChatMessage("user", "Peru?")], params)) == (["hm ", "Li", "ma"], End("stop", 9))
    path, key, body = server.requests[-1]
    assert (path, key) == ("/v1/chat/completions", "Bearer secret")
    assert body["messages"] == [{"role": "user", "content": "Peru?"}] and body["model"] == "m"
    assert (body["temperature"], body["top_p"], body["top_k"]) == (0.5, 1.0, 4) and "max_tokens" not in body


def test_a_text_is_continued_and_tokens_are_counted_without_usage(serve: Any) -> None:
    chunks = ({"choices": [{"text": "a"}]}, {"choices": [{"text": "b", "finish_reason": "length"}]})
    server = serve(v1__completions=(200, events(*chunks, b"[DONE]")))
    stream = HttpEngine(server.url, None).stream("x", SamplingParams(max_tokens=2))
    assert read(stream) == (["a", "b"], End("length", 2))
    _, key, body = server.requests[-1]
    assert key is None and body["prompt"] == "x"


@pytest.mark.parametrize(
    "answer, error, message",
    [
        ((200, events(delta(content="Li"))), EngineDead, "ended the answer early"),
        ((200, events(b"{}}")), EngineDead, "not OpenAI's"),
        ((200, events({"error": {"message": "too busy"}})), RequestError, "too busy"),
        ((400, b'{"error": {"message": "too long"}}'), RequestError, "status 400: too long"),
        ((500, b"\xff broken"), RequestError, "status 500"),
    ],
)
def test_an_answer_that_fails_says_why(
    serve: Any, answer: tuple[int, bytes], error: type[Exception], message: str
) -> None:
    engine = HttpEngine(serve(v1__chat__completions=answer).url, None)
    with pytest.raises(error, match=message):
        read(engine.stream([ChatMessage("user", "x")], SamplingParams()))


@pytest.mark.parametrize("models", [b"<html>", b"[]", b'{"data": []}', b'{"data": 3}'])
def test_what_is_no_server_of_the_api_is_refused(serve: Any, models: bytes) -> None:
    with pytest.raises(ConfigError, match=r"no server of OpenAI's API|serves no model"):
        HttpEngine(serve(v1__models=(200, models)).url, None)


def test_a_port_where_nothing_listens_is_refused(serve: Any) -> None:
    server = serve()
    server.shutdown()
    server.server_close()
    with pytest.raises(ConfigError, match="does not answer"):
        HttpEngine(server.url, None)


@pytest.mark.parametrize(
    "answer, health",
    [((200, b'{"status": "ok"}'), (True, {"status": "ok"})), ((200, b""), (True, {})), ((503, b"no"), (False, {}))],
)
def test_the_health_of_any_server_is_read(serve: Any, answer: tuple[int, bytes], health: object) -> None:
    assert HttpEngine(serve(health=answer).url, None).health() == health
