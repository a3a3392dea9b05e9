"""The access log writes one line per finished request, without user content, at a bounded cost."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Iterator

import pytest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tokenloom.frontend.listening.keys.api_keys import ApiKeys
from tokenloom.frontend.server.api.openai.events import SERVER_SEND
from tokenloom.frontend.server.http.access_log import MAX_ERRORS_PER_S, AccessLog
from tokenloom.frontend.server.http.middleware import HttpMiddleware, shown_path
from tokenloom.frontend.server.metrics.access_record import access_record
from tokenloom.ipc.errors import Overloaded, RequestError
from tokenloom.scripts.bench.engine_steps import Calls

IDS = [(b"x-request-id", b"id-1")]


async def answer(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer, fail or end early, as the path of the request says."""
    if scope["path"] == "/bad":
        raise RequestError("no")
    if scope["path"] == "/full":
        raise Overloaded("later")
    if scope["path"] == "/gone":
        return
    if (record := access_record.get()) is not None:
        record.num_prompt_tokens, record.num_completion_tokens = 12, 34
    await send({"type": "http.response.start", "status": 200, "headers": []})
    send = scope[SERVER_SEND]
    for body in (b"12345", b"678"):
        await send({"type": "http.response.body", "body": body, "more_body": True})
    if scope["path"] != "/torn":
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def new_log(*, has_all: bool, api_keys: list[str] | None = None) -> AccessLog:
    return AccessLog(HttpMiddleware(answer, ApiKeys(api_keys), 100, lambda why: None), has_all=has_all)


async def ask(app: ASGIApp, path: str) -> None:
    async def receive() -> Message:
        return {"type": "http.request", "body": b'{"prompt": "secret"}', "more_body": False}

    async def send(message: Message) -> None:
        pass

    scope = {"type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b"q=secret"}
    await app({**scope, "headers": IDS, "client": ("::ffff:10.0.0.9", 4242)}, receive, send)


def lines(capfd: pytest.CaptureFixture[str], log: AccessLog, *paths: str) -> list[str]:
    """Return the lines logged for requests of these paths, without time and level."""
    capfd.readouterr()
    for path in paths:
        asyncio.run(ask(log, path))
    found = capfd.readouterr().err.splitlines()
    assert all(re.match(r"\d\d:\d\d:\d\d INFO frontend: ", line) for line in found)
    return [line.split("frontend: ")[1] for line in found]


@pytest.fixture(autouse=True)
def info() -> Iterator[None]:
    logging.getLogger("tokenloom.http").setLevel(logging.INFO)
    yield
    logging.getLogger("tokenloom.http").setLevel(logging.NOTSET)


def test_a_line_has_client_path_status_size_times_tokens_and_id(capfd: pytest.CaptureFixture[str]) -> None:
    (line,) = lines(capfd, new_log(has_all=True), "/v1/completions")
    words = line.split()
    assert words[:6] == ["10.0.0.9:4242", "POST", "/v1/completions", "200", "8", "bytes"]
    assert words[7:9] == ["s", "first"] and 0 <= float(words[9]) <= float(words[6]) < 1
    assert words[10:] == ["s", "tokens", "12+34", "id", "id-1"] and "secret" not in line


def test_refused_and_cut_off_answers_are_logged(capfd: pytest.CaptureFixture[str]) -> None:
    bad, full, gone, torn = lines(capfd, new_log(has_all=True), "/bad", "/full", "/gone", "/torn")
    assert " 400 " in bad and " 503 " in full and " 499 " in gone and " cut " in gone and " 200 8 " in torn
    assert " cut " in torn and " cut " not in bad + full
    (refused,) = lines(capfd, new_log(has_all=True, api_keys=["KEY"]), "/v1/completions")
    assert " 401 " in refused and refused.endswith("id id-1")


def test_level_errors_omits_successes_and_probes(capfd: pytest.CaptureFixture[str]) -> None:
    log = new_log(has_all=False, api_keys=["KEY"])
    assert [line.split()[2:4] for line in lines(capfd, log, "/health", "/v1/models")] == [["/v1/models", "401"]]
    assert lines(capfd, new_log(has_all=False), "/v1/completions", "/torn") == []


def test_a_flood_of_errors_logs_limited_lines_per_second_and_the_number_dropped(
    capfd: pytest.CaptureFixture[str],
) -> None:
    now = [1000.0]
    log = AccessLog(HttpMiddleware(answer, ApiKeys(), 100, lambda why: None), has_all=False, clock=lambda: now[0])
    found = lines(capfd, log, *["/bad"] * (MAX_ERRORS_PER_S + 7))
    assert len(found) == MAX_ERRORS_PER_S
    now[0] += 1.0
    first, second = lines(capfd, log, "/bad")
    assert first == "7 failed HTTP requests more" and " 400 " in second


def test_a_log_level_above_info_turns_the_access_log_off(capfd: pytest.CaptureFixture[str]) -> None:
    logging.getLogger("tokenloom.http").setLevel(logging.WARNING)
    assert lines(capfd, new_log(has_all=True), "/bad") == []


@pytest.mark.parametrize(("has_all", "max_calls"), [(True, 65), (False, 12)])  # 47 and 6 by Python 3.11
def test_a_logged_request_costs_few_calls(capfd: pytest.CaptureFixture[str], has_all: bool, max_calls: int) -> None:
    """Count the calls beyond those of the app."""

    async def count(app: ASGIApp) -> int:
        with Calls() as calls:
            await ask(app, "/v1/completions")
        return calls.count

    middleware = HttpMiddleware(answer, ApiKeys(), 100, lambda why: None)
    with_log, without = (asyncio.run(count(app)) for app in (AccessLog(middleware, has_all=has_all), middleware))
    assert 0 < with_log - without < max_calls
    assert len(capfd.readouterr().err.splitlines()) == has_all


def test_the_id_of_a_stored_response_is_not_logged(capfd: pytest.CaptureFixture[str]) -> None:
    paths = ("/v1/responses/resp_mine_5ec7e7", "/llm/v1/responses/resp_5ec7e7/cancel", "/v1/responses/input_tokens")
    stored = ("/v1/files/file-5ec7e7/content", "/v1/batches/batch_5ec7e7/cancel", "/v1/files")
    assert [shown_path(path) for path in stored] == ["/v1/files/ID/content", "/v1/batches/ID/cancel", "/v1/files"]
    found = [line.split()[2] for line in lines(capfd, new_log(has_all=True), *paths, "/v1/responses")]
    assert found == ["/v1/responses/ID", "/llm/v1/responses/ID/cancel", "/v1/responses/input_tokens", "/v1/responses"]
