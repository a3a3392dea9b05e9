"""A request controls how a chat's messages become its prompt."""

from __future__ import annotations

import json
from typing import Any

import httpx2
import pytest

from tokenloom.tests.system.http_engine import QUESTION, ask, refusal

CHAT, TOKENIZE = "/v1/chat/completions", "/tokenize"
BEGUN = [*QUESTION, {"role": "assistant", "content": "The capital of Peru"}]
GREEDY = {"temperature": 0}
CONTINUED = {"messages": BEGUN, "continue_final_message": True}


def tokens(http: httpx2.Client, **body: object) -> list[int]:
    return list(ask(http, TOKENIZE, body)["tokens"])


def test_an_answer_continues_the_last_message(http: httpx2.Client) -> None:
    """vllm-project/vllm#10111 and #19285."""

    def content(**more: object) -> str:
        return str(ask(http, CHAT, CONTINUED | GREEDY | more)["choices"][0]["message"]["content"])

    assert content() == " is Lima."
    assert content(echo=True) == "The capital of Peru is Lima."
    assert content(add_generation_prompt=False) == " is Lima."


def test_a_stream_echoes_before_its_text(http: httpx2.Client) -> None:
    lines = http.post(CHAT, json=CONTINUED | GREEDY | {"echo": True, "stream": True}).text.splitlines()
    chunks = [json.loads(line[6:])["choices"][0]["delta"] for line in lines if line.startswith("data: {")]
    assert [chunk.get("content") for chunk in chunks][:2] == ["", "The capital of Peru"]
    assert "".join(chunk.get("content", "") for chunk in chunks) == "The capital of Peru is Lima."


def test_an_echo_needs_a_last_message_of_the_answers_role(http: httpx2.Client) -> None:
    (choice,) = ask(http, CHAT, {"messages": QUESTION, "echo": True, "max_tokens": 1} | GREEDY)["choices"]
    assert choice["message"]["content"] == "The"


def test_continuing_a_message_and_adding_a_generation_prompt_conflict(http: httpx2.Client) -> None:
    for path in (CHAT, TOKENIZE):
        found = refusal(http, path, CONTINUED | {"add_generation_prompt": True})
        assert "begins a turn" in found["message"] and found["param"] == "continue_final_message"


def test_tokenize_returns_the_chats_prompt(http: httpx2.Client) -> None:
    for fields in (CONTINUED, {"messages": BEGUN}, {"messages": QUESTION, "add_special_tokens": True}):
        made = ask(http, CHAT, fields | GREEDY | {"max_tokens": 1, "return_token_ids": True})
        assert made["prompt_token_ids"] == tokens(http, **fields)
    plain, special = tokens(http, messages=QUESTION), tokens(http, messages=QUESTION, add_special_tokens=True)
    assert special[1:] == plain and special[0] == tokens(http, prompt="x")[0]
    assert len(tokens(http, prompt="x", add_special_tokens=False)) == 1


def test_tokenize_can_return_token_strings(http: httpx2.Client) -> None:
    answer = ask(http, TOKENIZE, {"prompt": "The capital", "return_token_strs": True})
    assert answer["token_strs"] == ["<|bos|>", "The", "\u0120capital"] and len(answer["tokens"]) == answer["count"] == 3
    assert ask(http, TOKENIZE, {"prompt": "The capital"})["token_strs"] is None


def test_a_template_in_a_request_is_refused(http: httpx2.Client) -> None:
    for path in (CHAT, TOKENIZE):
        found = refusal(http, path, {"messages": QUESTION, "chat_template": "{{ messages }}"})
        assert found["param"] == "chat_template" and "--trust-request-chat-template" in found["message"]
    found = refusal(http, CHAT, {"messages": QUESTION, "chat_template_kwargs": {"chat_template": "x"}})
    assert "use the fields" in found["message"]


def test_a_chat_accepts_documents_for_its_template(http: httpx2.Client) -> None:
    answer = http.post(CHAT, json={"messages": QUESTION, "max_tokens": 1, "documents": [{"title": "a", "text": "b"}]})
    assert answer.status_code == 200 and "warning" not in answer.headers


TOOLS = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in ("add", "sub")]


def allowing(path: str, mode: str, name: str = "sub") -> dict[str, Any]:
    """Return a body whose tool_choice allows one of two tools."""
    if path == CHAT:
        names = [{"type": "function", "function": {"name": name}}]
        choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": names}}
        return {"messages": QUESTION, "tools": TOOLS, "tool_choice": choice} | GREEDY
    tools = [{"type": "function", **tool["function"]} for tool in TOOLS]  # type: ignore[dict-item]
    choice = {"type": "allowed_tools", "mode": mode, "tools": [{"type": "function", "name": name}]}
    return {"input": QUESTION[0]["content"], "tools": tools, "tool_choice": choice} | GREEDY


@pytest.mark.parametrize("name", ["add", "sub"])
def test_a_forced_call_uses_an_allowed_tool(http: httpx2.Client, name: str) -> None:
    more = {"parallel_tool_calls": False}
    (choice,) = ask(http, CHAT, allowing(CHAT, "required", name) | more | {"max_tokens": 60})["choices"]
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == [name]
    body = allowing("/v1/responses", "required", name) | more | {"max_output_tokens": 60}
    answer = ask(http, "/v1/responses", body)
    assert [item["name"] for item in answer["output"]] == [name]
    assert answer["tool_choice"]["type"] == "allowed_tools"


@pytest.mark.parametrize("path", [CHAT, "/v1/responses"])
def test_allowing_an_unknown_tool_is_refused(http: httpx2.Client, path: str) -> None:
    found = refusal(http, path, allowing(path, "auto", "mul"))
    assert (found["message"], found["param"]) == ("tool_choice allows mul; tools has add, sub", "tool_choice")


@pytest.mark.parametrize("kind", ["web_search", "mcp", "code_interpreter", "file_search"])
@pytest.mark.parametrize("path", [CHAT, "/v1/responses"])
def test_a_tool_that_a_server_would_run_is_left_out_unless_it_is_chosen(
    http: httpx2.Client, path: str, kind: str
) -> None:
    body: dict[str, Any] = {"messages": QUESTION} if path == CHAT else {"input": "x"}
    tools = [*([TOOLS[0]] if path == CHAT else []), {"type": kind, kind: {}}]
    answer = http.post(path, json=body | GREEDY | {"tools": tools, "tool_choice": "none"})
    place = "tools[1]" if path == CHAT else "tools[0]"
    assert answer.status_code == 200, answer.text
    assert answer.headers["warning"] == f'299 - "unknown fields were ignored: {place} of type {kind}"'
    found = refusal(http, path, body | {"tools": tools, "tool_choice": {"type": kind}})
    assert found["message"] == f"tool_choice is of type '{kind}', which is not served: leave it out"
    assert found["param"] == "tool_choice"


@pytest.mark.parametrize("stream", [False, True])
def test_the_first_request_of_codex_calls_a_tool_in_a_namespace(http: httpx2.Client, stream: bool) -> None:
    one = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}
    space = {"type": "function", "name": "spawn", "description": "d", "strict": False, "parameters": one}
    body: dict[str, Any] = {
        "instructions": "You are a coding agent.",
        "input": [
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
            {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search"}},
        ],
        "tools": [
            {"type": "function", "name": "exec_command", "parameters": {"type": "object", "properties": {}}},
            {"type": "namespace", "name": "agents", "description": "d", "tools": [space]},
            {"type": "web_search", "external_web_access": True},
        ],
        "tool_choice": {"type": "function", "name": "spawn", "namespace": "agents"},
        "store": False,
        "stream": stream,
    }
    answer = http.post("/v1/responses", json=body)
    assert answer.status_code == 200, answer.text
    assert answer.headers["warning"].count(" of type ") == 2
    lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
    whole = json.loads(lines[-1])["response"] if stream else answer.json()
    (call,) = whole["output"]
    assert (call["type"], call["name"], call["namespace"]) == ("function_call", "spawn", "agents")
    assert json.loads(call["arguments"]) == {"a": 1}


def test_an_item_that_is_not_served_is_refused_by_name(http: httpx2.Client) -> None:
    found = refusal(http, "/v1/responses", {"input": [{"type": "item_reference", "id": "msg_1"}]})
    assert found["message"].startswith("input[0] is of type 'item_reference'") and found["param"] == "input"
    found = refusal(http, "/v1/responses", {"input": [{"type": "web_search_call", "id": "ws_1"}]})
    assert "input is empty" in found["message"]


BATCH = "/v1/chat/completions/batch"


def test_several_chats_in_a_request_get_the_answers_of_separate_requests(http: httpx2.Client) -> None:
    others = [{"role": "user", "content": "What is the capital of France?"}]
    fields = GREEDY | {"max_tokens": 6, "logprobs": True, "top_logprobs": 1}
    alone = [ask(http, CHAT, fields | {"messages": each}) for each in (QUESTION, others, QUESTION)]
    batch = ask(http, BATCH, fields | {"messages": [QUESTION, others, QUESTION], "request_id": "b"})
    assert batch["id"] == "chatcmpl-b" and batch["object"] == "chat.completion"
    assert [each["index"] for each in batch["choices"]] == [0, 1, 2]
    for one, choice in zip(alone, batch["choices"], strict=True):
        assert choice["message"] == one["choices"][0]["message"]
        assert choice["finish_reason"] == one["choices"][0]["finish_reason"]
    assert batch["choices"][0]["message"] != batch["choices"][1]["message"]
    for name in ("prompt_tokens", "completion_tokens"):
        assert batch["usage"][name] == sum(one["usage"][name] for one in alone)
