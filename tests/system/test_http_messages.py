"""Anthropic's API of an engine: a chat's answer in another form, under the same laws as the other endpoints."""

from __future__ import annotations

import datetime
import json
from typing import Any

import httpx2

from tokenloom.tests.system.http_engine import KEY, QUESTION

PATH, COUNT = "/v1/messages", "/v1/messages/count_tokens"
BODY: dict[str, Any] = {"messages": QUESTION, "max_tokens": 12, "temperature": 0}
KEPT = {
    "metadata": {"user_id": "u"},
    "service_tier": "auto",
    "inference_geo": "us",
    "speed": "standard",
    "cache_control": {"type": "ephemeral"},
    "context_management": {"edits": []},
    "thinking": {"type": "enabled", "budget_tokens": 1024},
}


def said(http: httpx2.Client, **fields: Any) -> dict[str, Any]:
    answer = http.post(PATH, json=BODY | fields)
    assert answer.status_code == 200 and "warning" not in answer.headers, answer.text
    found: dict[str, Any] = answer.json()
    return found


def error(answer: httpx2.Response) -> tuple[int, str, str]:
    body = answer.json()
    assert body["type"] == "error" and set(body["error"]) == {"type", "message"}
    assert answer.headers["request-id"] == answer.headers["x-request-id"]
    return answer.status_code, body["error"]["type"], body["error"]["message"]


def test_a_stream_builds_the_whole_answer(http: httpx2.Client) -> None:
    answer = http.post(PATH, json=BODY | {"stream": True})
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: ")]
    assert [events[0]["type"], events[-1]["type"]] == ["message_start", "message_stop"]
    text = "".join(each["delta"]["text"] for each in events if each["type"] == "content_block_delta")
    assert [{"type": "text", "text": text}] == said(http)["content"]


def test_metadata_does_not_change_the_message(http: httpx2.Client) -> None:
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "context-management-2025-06-27"}
    answer = http.post(f"{PATH}?beta=true", json=BODY | KEPT, headers=headers)
    assert "warning" not in answer.headers and answer.json()["content"] == said(http)["content"]


def test_a_message_gets_the_answer_of_the_same_chat(http: httpx2.Client) -> None:
    chat = http.post("/v1/chat/completions", json=BODY).json()
    message = said(http)
    assert message["content"] == [{"type": "text", "text": chat["choices"][0]["message"]["content"]}]
    assert (message["model"], message["stop_reason"]) == (chat["model"], "end_turn")
    assert http.post(COUNT, json={"messages": QUESTION}).json() == {"input_tokens": chat["usage"]["prompt_tokens"]}


def test_every_error_has_anthropics_form(http: httpx2.Client, stranger: httpx2.Client) -> None:
    long = {"messages": [{"role": "user", "content": "hello " * 4000}]}
    for more, status, kind in (
        ({"model": "claude-none"}, 404, "not_found_error"),
        ({"stop_sequences": [""]}, 400, "invalid_request_error"),
        (long, 400, "invalid_request_error"),
        (long | {"stream": True}, 400, "invalid_request_error"),
    ):
        found = error(http.post(PATH, json=BODY | more))
        assert found[:2] == (status, kind) and ("prompt is too long" in found[2]) == ("messages" in more)
    assert error(http.post(f"{PATH}/batches", json={}))[:2] == (404, "not_found_error")
    assert error(http.post(PATH, content=b"{"))[:2] == (400, "invalid_request_error")
    assert error(stranger.post(PATH, json=BODY))[:2] == (401, "authentication_error")
    assert stranger.post(PATH, json=BODY, headers={"x-api-key": KEY}).status_code == 200


def test_what_anthropics_own_server_would_do_is_left_out_with_a_warning(http: httpx2.Client) -> None:
    more = {"tools": [{"type": "web_search_20250305", "name": "w"}], "container": "c", "mcp_servers": [{"url": "x"}]}
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
    answer = http.post("/v1/messages", json=body | more)
    assert answer.status_code == 200, answer.text
    for name in ("tools[0] of type web_search_20250305", "container", "mcp_servers"):
        assert name in answer.headers["warning"]


def test_anthropics_clients_get_models_in_anthropics_form(http: httpx2.Client) -> None:
    version = {"anthropic-version": "2023-06-01"}
    (card,) = http.get("/v1/models").json()["data"]
    (model,) = http.get("/v1/models", headers=version).json()["data"]
    assert (model["type"], model["id"], model["display_name"]) == ("model", card["id"], card["id"])
    assert datetime.datetime.fromisoformat(model["created_at"]).timestamp() == card["created"]
    assert http.get(f"/v1/models/{model['id']}", headers=version).json() == model
    assert http.get(f"/v1/models/{model['id']}").json() == card
    assert error(http.get("/v1/models/gpt-7", headers=version))[:2] == (404, "not_found_error")
    assert http.get("/v1/models/gpt-7").json()["error"]["code"] == "model_not_found"
