"""A request controls how a chat's messages become its prompt."""

from __future__ import annotations

import json
from typing import Any

import httpx2
import pytest

from tokenloom.tests.system.http_engine import QUESTION, ask

CHAT, TOKENIZE = "/v1/chat/completions", "/tokenize"
BEGUN = [*QUESTION, {"role": "assistant", "content": "The capital of Peru"}]
GREEDY = {"temperature": 0}
CONTINUED = {"messages": BEGUN, "continue_final_message": True}
NAMES = ("add", "sub")


def tokens(http: httpx2.Client, **body: object) -> list[int]:
    return list(ask(http, TOKENIZE, body)["tokens"])


def test_an_answer_continues_the_last_message(http: httpx2.Client) -> None:
    """vllm-project/vllm#10111 and #19285."""

    def content(**more: object) -> str:
        return str(ask(http, CHAT, CONTINUED | GREEDY | more)["choices"][0]["message"]["content"])

    assert content() == content(add_generation_prompt=False) == " is Lima."
    assert content(echo=True) == "The capital of Peru is Lima."
    assert content(messages=QUESTION, continue_final_message=False, echo=True, max_tokens=1) == "The"


def test_a_stream_echoes_before_its_text(http: httpx2.Client) -> None:
    lines = http.post(CHAT, json=CONTINUED | GREEDY | {"echo": True, "stream": True}).text.splitlines()
    chunks = [json.loads(line[6:])["choices"][0]["delta"] for line in lines if line.startswith("data: {")]
    assert [chunk.get("content") for chunk in chunks][:2] == ["", "The capital of Peru"]
    assert "".join(chunk.get("content", "") for chunk in chunks) == "The capital of Peru is Lima."


def test_tokenize_returns_the_chats_prompt(http: httpx2.Client) -> None:
    for fields in (CONTINUED, {"messages": BEGUN}, {"messages": QUESTION, "add_special_tokens": True}):
        made = ask(http, CHAT, fields | GREEDY | {"max_tokens": 1, "return_token_ids": True})
        assert made["prompt_token_ids"] == tokens(http, **fields)
    plain, special = tokens(http, messages=QUESTION), tokens(http, messages=QUESTION, add_special_tokens=True)
    assert special[1:] == plain and special[0] == tokens(http, prompt="x")[0]
    assert len(tokens(http, prompt="x", add_special_tokens=False)) == 1


@pytest.mark.parametrize("name", ["add", "sub"])
def test_a_forced_call_uses_an_allowed_tool(http: httpx2.Client, name: str) -> None:
    one = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}
    tools = [{"type": "function", "function": {"name": each, "parameters": one}} for each in NAMES]
    allowed = {"mode": "required", "tools": [{"type": "function", "function": {"name": name}}]}
    choice = {"type": "allowed_tools", "allowed_tools": allowed}
    body = {"messages": QUESTION, "tools": tools, "tool_choice": choice, "parallel_tool_calls": False, "max_tokens": 60}
    (choice,) = ask(http, CHAT, body | GREEDY)["choices"]
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == [name]


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


BATCH = "/v1/chat/completions/batch"


def test_several_chats_in_a_request_get_the_answers_of_separate_requests(http: httpx2.Client) -> None:
    others = [{"role": "user", "content": "What is the capital of France?"}]
    fields = GREEDY | {"max_tokens": 6, "logprobs": True, "top_logprobs": 1}
    alone = [ask(http, CHAT, fields | {"messages": each}) for each in (QUESTION, others)]
    batch = ask(http, BATCH, fields | {"messages": [QUESTION, others], "request_id": "b"})
    assert (batch["id"], batch["object"]) == ("chatcmpl-b", "chat.completion")
    assert batch["choices"] == [one["choices"][0] | {"index": index} for index, one in enumerate(alone)]
    for name in ("prompt_tokens", "completion_tokens"):
        assert batch["usage"][name] == sum(one["usage"][name] for one in alone)


def test_tokenize_can_return_token_strings_whose_ids_are_the_text(http: httpx2.Client) -> None:
    answer = ask(http, TOKENIZE, {"prompt": "The capital", "return_token_strs": True})
    assert answer["token_strs"] == ["<|bos|>", "The", "\u0120capital"] and len(answer["tokens"]) == answer["count"] == 3
    assert ask(http, "/detokenize", {"tokens": answer["tokens"][1:]}) == {"prompt": "The capital"}
