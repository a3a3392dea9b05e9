"""Every recorded request of other people's clients is served, and its answer has the fields that they read.

The requests are forms with short texts: tests/clients/recorded has a file for each client. The
nightly test_ollama_clients.py and test_coding_agents.py run the clients themselves and compare.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

from tokenloom.tests.support.recorded_requests import LONGEST, RecordedRequest, load, names
from tokenloom.tests.system.http_engine import open_http
from tokenloom.tests.system.launched import LaunchedEngine, served

DEADLINE_S = 100.0  # of an answer; the prompts of agents are the longest of the suite
LONG = 32768  # tokens: the tools of an agent alone are thousands
READ = {  # fields that every client reads, by path
    "/api/chat": ["message.role", "message.content", "done", "model", "created_at"],
    "/api/generate": ["response", "done", "model", "created_at"],
    "/api/embed": ["embeddings.0.0"],
    "/api/embeddings": ["embedding.0"],
    "/api/tags": ["models.0.model", "models.0.size", "models.0.digest", "models.0.modified_at", "models.0.details"],
    "/api/ps": ["models.0.model", "models.0.size_vram", "models.0.expires_at"],
    "/api/show": ["details.family", "model_info", "capabilities.0", "template"],
    "/api/version": ["version"],
    "/api/pull": ["status"],
    "/v1/messages": ["message.usage.input_tokens", "delta.stop_reason", "usage.output_tokens"],
    "/v1/responses": ["response.id", "response.usage.total_tokens", "item.type"],
}
READ_WHOLE = {  # the same of answers that are no streams, if they differ
    "/v1/messages": ["id", "content", "stop_reason", "usage.output_tokens"],
    "/v1/responses": ["id", "output", "status", "usage.total_tokens"],
}
LAST = {  # a field of the last object of a stream, by path
    "/api/chat": ("done", (True,)),
    "/api/generate": ("done", (True,)),
    "/v1/messages": ("type", ("message_stop",)),
    "/v1/responses": ("type", ("response.completed", "response.incomplete")),
}

engine = served(
    *("--http", "0", "--served-model-name", "tokenloom-demo", "*", "--default-max-tokens", str(LONGEST)),
    *("--hf-overrides.max_position_embeddings", str(LONG), "--max-model-len", str(LONG)),
)


@pytest.fixture
def http(engine: LaunchedEngine) -> Iterator[httpx2.Client]:
    with open_http(engine.url) as http:
        http.timeout = DEADLINE_S
        yield http


@pytest.mark.parametrize("name", names())
def test_each_recorded_request_is_answered_with_what_the_client_reads(http: httpx2.Client, name: str) -> None:
    client = load(name)
    assert client.requests and client.version and client.source
    for position, request in enumerate(client.requests):
        if request.status != 200:
            continue  # its model or a value is wrong on purpose
        where = f"{client.client} {client.version}, request {position}: {request.method} {request.path}"
        answer = http.request(request.method, request.path, json=request.filled, headers=dict(request.headers))
        assert answer.status_code == 200, f"{where}: {answer.text}"
        ignored = answer.headers.get("warning", "").rpartition("ignored: ")[2].split(", ")
        assert all(" of type " in each for each in ignored if each), (
            f"{where}: only hosted tools are left out: {ignored}"
        )
        check(where, request, objects_of(answer))


def objects_of(answer: httpx2.Response) -> list[Any]:
    """Return the objects of a whole answer, of lines or of events."""
    if "event-stream" in answer.headers["content-type"]:
        lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
        return [json.loads(line) for line in lines if line != "[DONE]"]
    return [json.loads(line) for line in answer.text.splitlines()]


def check(where: str, request: RecordedRequest, objects: list[Any]) -> None:
    path = request.path.partition("?")[0]
    assert not any("error" in each and each["error"] for each in objects), f"{where}: {objects}"
    is_stream = path not in READ_WHOLE or bool(request.body.get("stream"))
    for read in (*(READ if is_stream else READ_WHOLE).get(path, ()), *request.reads):
        assert any(has(each, read) for each in objects), f"{where}: nothing at {read} in {objects}"
    if path in LAST and is_stream:
        field, values = LAST[path]
        assert objects[-1][field] in values, f"{where} ends with {objects[-1]}"


def has(value: Any, path: str) -> bool:
    """Return whether a value has a field at a path of names and indices."""
    for part in path.split("."):
        if isinstance(value, list) and part.isdecimal() and int(part) < len(value):
            value = value[int(part)]
        elif isinstance(value, dict) and part in value:
            value = value[part]
        else:
            return False
    return True
