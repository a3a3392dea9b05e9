"""Fields of requests, one by one: each has the effect documented in docs/reference/conformance.md."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import httpx2
import pytest

from tokenloom.tests.system.http_engine import ask

COMPLETION, CHAT, RESPONSE = "/v1/completions", "/v1/chat/completions", "/v1/responses"
FRANCE = {"prompt": "The capital of France is", "temperature": 0}
QUESTION = {"messages": [{"role": "user", "content": "What is the capital of Peru?"}], "temperature": 0}
WILD = {"temperature": 50, "seed": 1}


Answer = dict[str, Any]


def _named_by_id(logprobs: Answer) -> bool:
    """Return whether all tokens are written token_id:ID, and offsets refer to the text."""
    names = [*logprobs["tokens"], *(name for top in logprobs["top_logprobs"] if top for name in top)]
    return all(map(re.compile("token_id:[0-9]+").fullmatch, names)) and logprobs["text_offset"][-1] > 15


def text_of(answer: Answer) -> str:
    choice = answer["choices"][0]
    return str(choice["text"] if "text" in choice else choice["message"]["content"])


def tokens_of(http: httpx2.Client, text: str) -> list[int]:
    body = {"prompt": text, "add_special_tokens": False}
    return list(ask(http, "/tokenize", body)["tokens"])


FIELDS: dict[str, tuple[str, Answer, Callable[[Answer], object]]] = {  # name: endpoint, body, condition on the answer
    "top_k": (COMPLETION, FRANCE | WILD | {"top_k": 1}, lambda a: text_of(a) == " Paris."),
    "max_completion_tokens": (
        CHAT,
        QUESTION | {"max_tokens": 9, "max_completion_tokens": 2},
        lambda a: a["usage"]["completion_tokens"] == 2,
    ),
    "return_tokens_as_token_ids": (
        COMPLETION,
        FRANCE | {"logprobs": 2, "echo": True, "max_tokens": 1, "return_tokens_as_token_ids": True},
        lambda a: _named_by_id(a["choices"][0]["logprobs"]),
    ),
    "add_special_tokens": (
        COMPLETION,
        FRANCE | {"add_special_tokens": False},
        lambda a: a["usage"]["prompt_tokens"] == 6,
    ),
    "add_generation_prompt": (
        CHAT,
        QUESTION | {"add_generation_prompt": False, "max_tokens": 1},
        lambda a: a["usage"]["prompt_tokens"] < 14,
    ),
    "timeout_s": (
        COMPLETION,
        FRANCE | {"ignore_eos": True, "max_tokens": 1900, "timeout_s": 0.1},
        lambda a: a["choices"][0]["finish_reason"] == "timeout",
    ),
}


@pytest.mark.parametrize("name", FIELDS)
def test_a_field_acts(http: httpx2.Client, name: str) -> None:
    path, body, holds = FIELDS[name]
    assert name in body
    answer = ask(http, path, body)
    assert holds(answer), answer


def test_prefixes_are_shared_only_within_a_cache_salt(http: httpx2.Client) -> None:
    prompt = {"prompt": "one two three " * 20, "max_tokens": 1}
    cached = [
        ask(http, COMPLETION, prompt | {"cache_salt": salt})["usage"]["prompt_tokens_details"]["cached_tokens"]
        for salt in ("a", "a", "b")
    ]
    assert cached[0] == 0 and cached[1] > 0 and cached[2] == 0


def test_a_cache_report_names_the_field_that_kept_a_prompt_from_the_cache(http: httpx2.Client) -> None:
    def report(path: str, time: str) -> Answer:
        system = f"It is {time}. " + "Look at the map before you answer. " * 8
        turns = [{"role": "user", "content": "Where is the old bridge of Mostar?"}]
        given: Answer = {"instructions": system, "input": turns} if path == RESPONSE else {"messages": turns}
        if path == "/v1/messages":
            given |= {"system": system, "max_tokens": 2}
        elif path == CHAT:
            given = {"messages": [{"role": "system", "content": system}, *turns], "max_tokens": 2}
        found: Answer = ask(http, path, given | {"include_cache_report": True})["usage"]["cache_report"]
        return found

    assert report(CHAT, "12:01:07")["missed_tokens"] == report(CHAT, "12:01:07")["missed_tokens"] == {}
    for path, time in ((CHAT, "12:02:33"), ("/v1/messages", "12:03:44"), (RESPONSE, "12:04:55")):
        found = report(path, time)
        assert found["missed_tokens"].keys() == {"time"} and found["missed_tokens"]["time"] > 40
        assert found["first_difference"]["field"] == "messages[0].content"
        assert "a time, a number or an id changed" in found["explanation"][0]


@pytest.mark.parametrize("path, body", [(CHAT, QUESTION), (COMPLETION, FRANCE)])
@pytest.mark.parametrize("has_usage", [False, True])
def test_every_chunk_has_usage_if_continuous_usage_is_requested(
    http: httpx2.Client, path: str, body: Answer, has_usage: bool
) -> None:
    options = {"stream": True, "stream_options": {"include_usage": has_usage, "continuous_usage_stats": True}}
    lines = http.post(path, json=body | options).text.splitlines()
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks if "usage" in chunk]
    if not has_usage:
        assert chunks and not counts
        return
    begin, num_tokens = (1, 8) if path == CHAT else (0, 3)  # a chat starts with a role and no tokens
    assert counts[:begin] == [0] * begin and counts[begin] > 0 and counts[-2:] == [num_tokens, num_tokens]
    assert counts[begin:-1] == sorted(set(counts[begin:-1])), "every chunk with a choice has tokens"


KEPT: Answer = {
    "stream_options": {"include_usage": True, "include_obfuscation": False},
    **dict.fromkeys(("user", "safety_identifier", "prompt_cache_key"), "x"),
    "metadata": {"a": "b"},
    "store": False,
    "service_tier": "auto",
    "prompt_cache_retention": "24h",
}
LET_THROUGH: dict[str, tuple[Answer, Answer]] = {  # a body, and fields without effect
    COMPLETION: (FRANCE, {"user": "u", "stream_options": {"include_usage": True}}),
    CHAT: (
        QUESTION,
        KEPT
        | {"modalities": ["text"], "verbosity": "low", "reasoning_effort": "low", "include_reasoning": True}
        | {"parallel_tool_calls": True, "functions": [], "function_call": "none"}
        | {"prediction": {"type": "content", "content": "Lima"}},
    ),
    RESPONSE: (
        {"input": "Hello!", "temperature": 0},
        KEPT
        | {"truncation": "disabled", "max_tool_calls": 3, "reasoning": {"effort": "low", "context": "all_turns"}}
        | {"client_metadata": {"turn_id": "x"}}
        | {"include": ["reasoning.encrypted_content"]},
    ),
}


@pytest.mark.parametrize(("tier", "shown"), [("flex", "flex"), ("auto", "default"), ("priority", "default")])
def test_a_flex_request_is_answered_and_says_so(http: httpx2.Client, tier: str, shown: str) -> None:
    for path, body in ((COMPLETION, FRANCE), (CHAT, QUESTION), (RESPONSE, {"input": "Hello!", "temperature": 0})):
        assert ask(http, path, body)["service_tier"] is None
        assert ask(http, path, body | {"service_tier": tier})["service_tier"] == shown
    streamed = http.post(CHAT, json=QUESTION | {"service_tier": tier, "stream": True}).text.splitlines()
    chunks = [json.loads(line[6:]) for line in streamed if line.startswith("data: {")]
    assert len(chunks) > 1 and {chunk["service_tier"] for chunk in chunks} == {shown}
    assert ask(http, "/v1/embeddings", {"input": "Hello!", "service_tier": tier})["data"]


@pytest.mark.parametrize("path", LET_THROUGH)
def test_bookkeeping_fields_do_not_change_the_answer(http: httpx2.Client, path: str) -> None:
    body, more = LET_THROUGH[path]
    plain, kept = ask(http, path, body), ask(http, path, body | more)
    if path == RESPONSE:
        assert plain["output"][0]["content"] == kept["output"][0]["content"]
    else:
        assert text_of(plain) == text_of(kept)
