"""Anthropic's API of an engine: a chat's answer in another form, under the same laws as the other endpoints."""

from __future__ import annotations

import datetime
import json
import time
from typing import Any

import httpx2
import pytest

from tokenloom.tests.system.http_engine import KEY, QUESTION, samples, wait_idle

PATH, COUNT = "/v1/messages", "/v1/messages/count_tokens"
BODY: dict[str, Any] = {"messages": QUESTION, "max_tokens": 12, "temperature": 0}
TOOL = {
    "name": "find",
    "input_schema": {"type": "object", "properties": {"city": {"const": "Lima"}}, "required": ["city"]},
}
FORCED = {"tools": [TOOL], "tool_choice": {"type": "any", "disable_parallel_tool_use": True}, "max_tokens": 200}
FORM = {"type": "json_schema", "schema": TOOL["input_schema"]}
FIELDS: dict[str, Any] = {  # name: a value that changes the answer
    "max_tokens": 2,
    "stop_sequences": ["capital"],
    "output_config": {"format": FORM},
    "output_format": FORM,
    "temperature": 3,
    "top_k": 1,
    "top_p": 1e-9,
    "system": "Answer with a sum.",
    "tool_choice": FORCED["tool_choice"],
}
NEEDS: dict[str, dict[str, Any]] = {
    "top_k": {"temperature": 3},
    "top_p": {"temperature": 3},
    "output_config": {"max_tokens": 40},
    "output_format": {"max_tokens": 40},
    "tool_choice": {"tools": [TOOL], "tool_choice": {"type": "none"}, "max_tokens": 200},
}
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


@pytest.mark.parametrize(
    "more", [{}, FORCED, {"stop_sequences": ["Peru"]}, {"max_tokens": 3}, FORCED | {"max_tokens": 9}]
)
def test_a_stream_builds_the_whole_answer(http: httpx2.Client, more: dict[str, Any]) -> None:
    whole, built = said(http, **more), dict[str, Any]()
    torn = ""
    with http.stream("POST", PATH, json=BODY | more | {"stream": True}) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        for line in answer.iter_lines():
            event = json.loads(line.removeprefix("data: ")) if line.startswith("data: ") else {"type": "none"}
            match event["type"]:
                case "message_start":
                    built = event["message"]
                case "content_block_start":
                    built["content"].append(event["content_block"])
                case "content_block_delta" if "text" in event["delta"]:
                    built["content"][-1]["text"] += event["delta"]["text"]
                case "content_block_delta":
                    torn += event["delta"]["partial_json"]
                case "message_delta":
                    built |= event["delta"] | {"usage": event["usage"]}
    if more == FORCED:
        built["content"][0]["input"] = json.loads(torn)
        assert built["content"][0]["input"] == {"city": "Lima"} and whole["stop_reason"] == "tool_use"
    for message in (whole, built):
        for name in ("id", "usage"):
            message.pop(name)
        for block in message["content"]:
            block.pop("id", None)
    assert built == whole


@pytest.mark.parametrize("name", FIELDS)
def test_a_field_acts(http: httpx2.Client, name: str) -> None:
    fields = NEEDS.get(name, {})
    assert said(http, **fields | {name: FIELDS[name]})["content"] != said(http, **fields)["content"]


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


def test_a_repeated_prompt_counts_as_cache_reads(http: httpx2.Client) -> None:
    messages = [{"role": "user", "content": "Which capitals do you know? " * 20}]
    cold, warm = (said(http, messages=messages, max_tokens=1)["usage"] for _ in range(2))
    assert cold["cache_creation_input_tokens"] > 0 == cold["cache_read_input_tokens"]
    assert warm["cache_read_input_tokens"] == cold["cache_creation_input_tokens"]
    assert warm["input_tokens"] == cold["input_tokens"] and warm["cache_creation_input_tokens"] == 0


def test_every_error_has_anthropics_form(http: httpx2.Client, stranger: httpx2.Client) -> None:
    assert error(http.post(PATH, json=BODY | {"model": "claude-none"}))[:2] == (404, "not_found_error")
    assert error(http.post(f"{PATH}/batches", json={}))[:2] == (404, "not_found_error")
    assert error(http.post(PATH, content=b"{"))[:2] == (400, "invalid_request_error")
    for headers in ({}, {"x-api-key": "wrong"}, {"authorization": "Bearer wrong"}):
        answer = stranger.post(PATH, json=BODY, headers=headers)
        assert error(answer)[:2] == (401, "authentication_error")
    assert stranger.post(PATH, json=BODY, headers={"x-api-key": KEY}).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"messages": [{"role": "user", "content": "hello " * 4000}]}, "prompt is too long"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1 << 31}}, "thinking.budget_tokens must be in"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"tools": [{"type": "bash_20250124", "name": "b"}], "tool_choice": {"type": "any"}}, "tools is empty"),
        ({"tool_choice": {"type": "any"}}, "tools is empty"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "g"}}, "tool_choice names 'g', tools has find"),
        ({"output_config": {"format": FORM | {"schema": {"type": 7}}}}, "output_config.format.schema"),
        ({"output_format": FORM | {"schema": {"type": "texts"}}}, "output_format.schema: Invalid type"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "messages[0].content[0] is a part of type 'image' without an image",
        ),
    ],
)
def test_a_bad_value_names_its_field(http: httpx2.Client, fields: dict[str, Any], message: str, stream: bool) -> None:
    status, kind, text = error(http.post(PATH, json=BODY | fields | {"stream": stream}))
    assert (status, kind) == (400, "invalid_request_error") and message in text, text


def test_an_unknown_message_field_gets_a_warning(http: httpx2.Client) -> None:
    answer = http.post(PATH, json=BODY | FORCED | {"max_token": 3, "tools": [TOOL | {"strict": True}]})
    assert answer.status_code == 200 and "max_token (did you mean max_tokens?)" in answer.headers["warning"]
    assert "strict" not in answer.headers["warning"], "clients send tools as they were made for other servers"


def test_a_disconnect_ends_the_message_request(http: httpx2.Client) -> None:
    aborted = "tokenloom_request_aborts_total{disconnect}"
    begun, before = time.monotonic(), samples(http).get(aborted, 0)
    endless = {"output_format": FORM | {"schema": {"type": "string", "minLength": 9000}}, "max_tokens": 1900}
    with http.stream("POST", PATH, json=BODY | endless | {"stream": True}) as answer:
        next(answer.iter_lines())
    wait_idle(http, begun)
    assert samples(http)[aborted] == before + 1


def test_what_anthropics_own_server_would_do_is_left_out_with_a_warning(http: httpx2.Client) -> None:
    more = {"tools": [{"type": "web_search_20250305", "name": "w"}], "container": "c", "mcp_servers": [{"url": "x"}]}
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
    answer = http.post("/v1/messages", json=body | more)
    assert answer.status_code == 200, answer.text
    for name in ("tools[0] of type web_search_20250305", "container", "mcp_servers"):
        assert name in answer.headers["warning"]


def test_anthropics_clients_get_models_in_anthropics_form(http: httpx2.Client) -> None:
    version = {"anthropic-version": "2023-06-01"}
    plain, page = http.get("/v1/models").json(), http.get("/v1/models", headers=version).json()
    (model,), (card,) = page["data"], plain["data"]
    assert page == {"data": [model], "has_more": False, "first_id": model["id"], "last_id": model["id"]}
    assert (model["type"], model["id"], model["display_name"]) == ("model", card["id"], card["id"])
    assert datetime.datetime.fromisoformat(model["created_at"]).timestamp() == card["created"]
    assert http.get(f"/v1/models/{model['id']}", headers=version).json() == model
    assert http.get(f"/v1/models/{model['id']}").json() == card
    assert error(http.get("/v1/models/gpt-7", headers=version))[:2] == (404, "not_found_error")
    assert http.get("/v1/models/gpt-7").json()["error"]["code"] == "model_not_found"
