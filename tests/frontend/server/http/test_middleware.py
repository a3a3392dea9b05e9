"""HttpMiddleware: key, root path, number of open requests, disconnects and the limit of connections."""

from __future__ import annotations

import asyncio
import json
import logging
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import Message, Receive, Scope, Send

from tokenloom.frontend.forms.openai.errors import HttpError, json_response
from tokenloom.frontend.forms.prompt_limits import PromptLimits
from tokenloom.frontend.listening.keys.api_keys import ApiKeys
from tokenloom.frontend.server.api.continuation import Continuation, working_on
from tokenloom.frontend.server.api.openai.body_reader import BodyReader
from tokenloom.frontend.server.helpers.intake import new_intake_helper
from tokenloom.frontend.server.helpers.pool import HelperPool
from tokenloom.frontend.server.http.middleware import OPEN_PATHS, OVER_LIMIT, HttpMiddleware
from tokenloom.frontend.server.http.server import _new_task
from tokenloom.ipc.notes.deadly import LOSSES_TO_REFUSE, NONE, DeadlyRequests, ReadingNote
from tokenloom.tests.support.engine_specs import new_spec


async def endpoint(scope: Scope, receive: Receive, send: Send) -> None:
    pool = HelperPool(lambda: None, lambda: new_intake_helper(new_spec()))
    await BodyReader(pool, PromptLimits.of(new_spec(), None)).read(Request(scope, receive), msgspec.Struct)


def test_a_disconnect_within_the_body_is_neither_answered_nor_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    arriving: list[Message] = [
        {"type": "http.request", "body": b"{", "more_body": True},
        {"type": "http.disconnect"},
    ]
    sent: list[Message] = []

    async def receive() -> Message:
        return arriving.pop(0)

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
    with caplog.at_level(logging.DEBUG):
        asyncio.run(HttpMiddleware(endpoint, ApiKeys(), 100, lambda why: None)(scope, receive, send))
    assert (arriving, sent) == ([], [])
    assert [record for record in caplog.records if record.name.startswith("tokenloom")] == []


def answer_of(
    middleware: HttpMiddleware, path: str = "/v1/models", *chunks: bytes, **changes: object
) -> tuple[int, dict[str, str], str]:
    """Send a request; return status, headers, and the error message or the path that the app got."""
    arriving = [{"type": "http.request", "body": each, "more_body": True} for each in chunks]
    arriving.append({"type": "http.request", "body": b"", "more_body": False})
    sent: list[Message] = []

    async def receive() -> Message:
        return arriving.pop(0)

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "GET", "path": path, "headers": [], **changes}
    asyncio.run(middleware(scope, receive, send))
    body = json.loads(sent[1]["body"])
    headers = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
    return sent[0]["status"], headers, body["error"]["message"] if "error" in body else body["path"]


async def nothing(request: Request) -> Response:
    return Response()


@pytest.mark.parametrize(
    ("method", "path", "remedy"),
    [
        ("GET", "/models", "did you mean /v1/models?"),
        ("GET", "/v1/health", "did you mean /health?"),
        ("GET", "/v1/v1/models", "did you mean /v1/models?"),
        ("GET", "/v1/models/", "did you mean /v1/models?"),
        ("GET", "/v2/models", "not found; /openapi.json lists all paths"),
        ("OPTIONS", "/v1/models", "start with --cors-origins and the page's origin to let web pages call"),
        ("POST", "/v1/models", "method not allowed; /openapi.json lists all paths"),
    ],
)
def test_an_unknown_path_is_answered_with_the_one_that_was_meant(method: str, path: str, remedy: str) -> None:
    routes = [Route(each, nothing) for each in ("/v1/models", "/health", "/")]
    middleware = HttpMiddleware(Router(routes, redirect_slashes=False), ApiKeys(), 100, lambda why: None)
    status, _, message = answer_of(middleware, path, method=method)
    assert (
        status == (405 if method != "GET" else 404) and message.startswith(f"{method} {path}: ") and remedy in message
    )


async def echo_path(scope: Scope, receive: Receive, send: Send) -> None:
    await json_response({"path": scope["path"]})(scope, receive, send)


NO_BEARER = "the header authorization does not begin with `Bearer`"
WRONG = "the API key is wrong"


@pytest.mark.parametrize(
    ("authorization", "alone", "fault"),  # `alone`: in x-api-key
    [
        *((f"{scheme} KEY", None, "") for scheme in ("Bearer", "bearer", "BEARER  ")),
        *(("Bearer k1", None, ""), ("Bearer k2 \t", None, "")),
        *((None, "KEY", ""), (None, "k2", ""), ("Bearer other", "KEY", ""), ("Bearer KEY", "other", "")),
        *((None, None, "no API key was given"), ("", "", "no API key was given")),
        *((each, None, NO_BEARER) for each in ("KEY", "Basic KEY", "BearerKEY")),
        ("Bearer", None, "no API key follows `Bearer`"),
        *((f"Bearer {key}", None, WRONG) for key in ("key", "k", "k1 k2", "KEY KEY", "KEY\u00e9")),
        *((None, key, WRONG) for key in ("other", "k", "k1 k2")),
    ],
)
def test_a_key_follows_bearer_in_any_case_or_comes_alone_and_an_error_names_the_fault(
    authorization: str | None, alone: str | None, fault: str
) -> None:
    refused: list[str] = []
    middleware = HttpMiddleware(echo_path, ApiKeys(["KEY", "k1", "k2"]), 100, refused.append)
    given = {b"authorization": authorization, b"x-api-key": alone}
    headers = [(name, value.encode()) for name, value in given.items() if value is not None]
    status, told, text = answer_of(middleware, headers=headers)
    if not fault:
        assert (status, refused) == (200, [])
        return
    assert (status, told["www-authenticate"], refused) == (401, "Bearer", ["key"])
    assert text == f"{fault}: send the header `Authorization: Bearer KEY`, or `x-api-key: KEY`"


EVIL = [(b"host", b"evil.example")], [(b"host", b"localhost:8000"), (b"origin", b"https://evil.example")]


@pytest.mark.parametrize("headers", EVIL)
def test_without_a_key_other_sites_reach_the_open_paths_alone(headers: list[tuple[bytes, bytes]]) -> None:
    refused: list[str] = []
    middleware = HttpMiddleware(echo_path, ApiKeys(), 100, refused.append, "/llm")
    orders = ("/dashboard/abort", "/abort", "/pause")
    data = ("/v1/models", "/dashboard/data", "/server_info", "/kv", "/is_sleeping", "/v1/responses/resp_x")
    for path in (*orders, *data, "/llm/v1/models", "/nowhere", "/health/x", "/v1/messages"):
        for method in ("GET", "POST", "OPTIONS", "HEAD", "DELETE"):
            answer = answer_of(middleware, path, headers=headers, method=method, server=("127.0.0.1", 8000))
            assert answer[0] == 403 and "--api-key" in answer[2], (path, method)
    assert set(refused) == {"origin"}
    for path in OPEN_PATHS:
        assert answer_of(middleware, path, headers=headers, server=("127.0.0.1", 8000))[0] == 200, path
    assert answer_of(middleware, "/", headers=headers, method="POST", server=("127.0.0.1", 8000))[0] == 403


@pytest.mark.parametrize("headers", EVIL)
def test_a_key_lets_in_under_any_name_and_from_any_page(headers: list[tuple[bytes, bytes]]) -> None:
    middleware = HttpMiddleware(echo_path, ApiKeys(["KEY"]), 100, lambda why: None)
    server = ("127.0.0.1", 8000)
    assert answer_of(middleware, headers=[*headers, (b"x-api-key", b"KEY")], server=server)[0] == 200
    assert answer_of(middleware, headers=headers, server=server)[0] == 401


def test_the_host_is_checked_on_the_loopback_alone() -> None:
    middleware = HttpMiddleware(echo_path, ApiKeys(), 100, lambda why: None)
    places = {("127.0.0.1", 80): 403, ("::1", 80): 403, ("10.0.0.7", 80): 200, ("/run/x", None): 200}
    for server, status in places.items():
        assert answer_of(middleware, headers=EVIL[0], server=server)[0] == status, server


def test_errors_and_ids_on_anthropics_paths_have_anthropics_form() -> None:
    middleware = HttpMiddleware(echo_path, ApiKeys(["KEY"]), 100, lambda why: None, "/llm")
    sent = [(b"x-request-id", b"mine")]
    status, headers, _ = answer_of(middleware, "/llm/v1/messages/count_tokens", headers=sent)
    assert (status, headers["request-id"], headers["x-request-id"]) == (401, "mine", "mine")
    assert "request-id" not in answer_of(middleware, "/v1/models", headers=sent)[1]
    status, headers, _ = answer_of(middleware, "/v1/messages", **{OVER_LIMIT: True})
    assert (status, headers["retry-after"]) == (529, "1")


@pytest.mark.parametrize(
    ("path", "seen"),
    [
        ("/llm/v1/models", "/v1/models"),
        ("/v1/models", "/v1/models"),  # the proxy has removed it
        ("/llm", "/"),
        ("/llmx/y", "/llmx/y"),
    ],
)
def test_the_proxys_root_path_is_removed_if_present_also_from_that_of_a_probe(path: str, seen: str) -> None:
    assert answer_of(HttpMiddleware(echo_path, ApiKeys(), 100, lambda why: None, "/llm"), path)[2] == seen
    with_key = HttpMiddleware(echo_path, ApiKeys(["KEY"]), 100, lambda why: None, "/llm")
    assert answer_of(with_key, "/llm/health")[0] == 200


def test_a_request_is_noted_under_its_path_query_and_body_and_refused_once_it_is_deadly(tmp_path: Path) -> None:
    table, seen, refused = DeadlyRequests(tmp_path), list[bytes](), list[str]()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        while (await receive())["more_body"]:
            pass
        seen.append(bytes(note.cells[:16]))
        await asyncio.sleep(0)
        seen.append(bytes(note.cells[:16]))
        await echo_path(scope, receive, send)

    for number in range(LOSSES_TO_REFUSE):
        note = ReadingNote(str(tmp_path), f"frontend-{number}")
        middleware = HttpMiddleware(app, ApiKeys(), 100, refused.append, note=note)
        assert answer_of(middleware, "/v1/completions", b"{", b"}", query_string=b"a=1")[0] == 200
        assert seen[-2:] == [note.key_of(b"GET /v1/completions?a=1\n{}")] * 2 and note.current == NONE
        note.begin(seen[-1])  # the frontend ends in its next request of this kind
        table.on_loss(f"frontend-{number}", is_to_blame=True)
    note = ReadingNote(str(tmp_path), "successor")
    middleware, num_seen = HttpMiddleware(app, ApiKeys(), 100, refused.append, note=note), len(seen)
    assert answer_of(middleware, "/v1/completions", b"{}", query_string=b"a=1")[0] == 400
    assert refused == ["deadly"]
    assert len(seen) == num_seen and note.current == NONE
    assert answer_of(middleware, "/health", b"{}")[0] == 200 and seen[-2:] == [NONE, NONE], "probes are not noted"
    for path, content, query in (
        ("/v1/chat", b"{}", b"a=1"),
        ("/v1/completions", b"{} ", b"a=1"),
        ("/v1/completions", b"{}", b""),
    ):
        assert answer_of(middleware, path, content, query_string=query)[0] == 200


def test_a_task_that_is_made_for_a_request_is_noted_under_its_key() -> None:
    note, key = ReadingNote(), b"k" * 16

    async def work() -> bytes:
        await asyncio.sleep(0)
        return note.current

    async def main() -> list[bytes]:
        asyncio.get_running_loop().set_task_factory(partial(_new_task, note))
        before = note.begin(key)
        of_request = asyncio.create_task(work())
        note.end(before)
        return [await of_request, await asyncio.create_task(work())]

    assert asyncio.run(main()) == [key, NONE]


@pytest.mark.parametrize(
    ("path", "begin", "end"),
    [
        ("/v1/chat/completions", b'data: {"error":', b"data: [DONE]\n\n"),
        ("/v1/messages", b'event: error\ndata: {"type":"error",', b"}\n\n"),
        ("/v1/responses", b'event: error\ndata: {"error":', b"}\n\n"),
        ("/api/chat", b'{"error":', b"}\n"),
    ],
)
def test_an_error_of_a_stream_that_an_earlier_frontend_has_begun_ends_the_stream(
    path: str, begin: bytes, end: bytes
) -> None:
    async def fails(scope: Scope, receive: Receive, send: Send) -> None:
        raise HttpError(503, "the engine drains")

    messages: list[Any] = []

    async def send(message: Any) -> None:
        messages.append(message)

    async def receive() -> Any:
        await asyncio.Event().wait()

    app = HttpMiddleware(fails, ApiKeys(), 99, lambda why: None)
    scope = {"type": "http", "method": "POST", "path": path, "headers": []}
    with working_on(Continuation(nonce=b"n", created=0.0, is_resumed=True)):
        asyncio.run(app(scope, receive, send))
    head, last = messages
    assert head["status"] == 200 and not any(name == b"content-length" for name, _ in head["headers"])
    assert last["body"].startswith(begin) and last["body"].endswith(end) and not last["more_body"]
