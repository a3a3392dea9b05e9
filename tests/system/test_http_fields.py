"""Fields of requests, one by one: each has the effect documented in docs/conformance.md."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable
from typing import Any

import httpx2
import pytest

from tokenloom.tests.system.http_engine import ask, refusal

COMPLETION, CHAT, RESPONSE = "/v1/completions", "/v1/chat/completions", "/v1/responses"
FRANCE = {"prompt": "The capital of France is", "temperature": 0}
QUESTION = {"messages": [{"role": "user", "content": "What is the capital of Peru?"}], "temperature": 0}
LONG = {**FRANCE, "max_tokens": 60, "ignore_eos": True}
WILD = {"temperature": 50, "seed": 1}
SCHEMA = {"type": "object", "properties": {"a": {"enum": [7]}}, "required": ["a"], "additionalProperties": False}

USAGE = ("prompt_tokens", "completion_tokens"), ("input_tokens", "output_tokens")

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
    "top_p": (COMPLETION, FRANCE | {"temperature": 1, "top_p": 1e-9}, lambda a: text_of(a) == " Paris."),
    "min_p": (COMPLETION, FRANCE | WILD | {"min_p": 1}, lambda a: text_of(a) == " Paris."),
    "min_tokens": (COMPLETION, FRANCE | {"min_tokens": 9}, lambda a: a["usage"]["completion_tokens"] >= 9),
    "max_tokens": (COMPLETION, FRANCE | {"max_tokens": 1}, lambda a: a["choices"][0]["finish_reason"] == "length"),
    "max_completion_tokens": (
        CHAT,
        QUESTION | {"max_tokens": 9, "max_completion_tokens": 2},
        lambda a: a["usage"]["completion_tokens"] == 2,
    ),
    "include_stop_str_in_output": (
        COMPLETION,
        FRANCE | {"stop": "ri", "include_stop_str_in_output": True},
        lambda a: text_of(a) == " Pari",
    ),
    "ignore_eos": (COMPLETION, LONG, lambda a: a["usage"]["completion_tokens"] == 60),
    "skip_special_tokens": (
        COMPLETION,
        FRANCE | {"skip_special_tokens": False, "ignore_eos": True, "max_tokens": 3},
        lambda a: text_of(a) == " Paris.<|eos|>",
    ),
    "truncate_prompt_tokens": (
        COMPLETION,
        FRANCE | {"truncate_prompt_tokens": 3},
        lambda a: a["usage"]["prompt_tokens"] == 3,
    ),
    "allowed_token_ids": (
        COMPLETION,
        FRANCE | {"allowed_token_ids": [300], "max_tokens": 4, "return_token_ids": True},
        lambda a: a["choices"][0]["token_ids"] == [300] * 4,
    ),
    "bad_words": (COMPLETION, FRANCE | {"bad_words": ["Paris"]}, lambda a: "Paris" not in text_of(a)),
    "request_id": (COMPLETION, FRANCE | {"request_id": "mine"}, lambda a: a["id"] == "cmpl-mine"),
    "return_tokens_as_token_ids": (
        COMPLETION,
        FRANCE | {"logprobs": 2, "echo": True, "max_tokens": 1, "return_tokens_as_token_ids": True},
        lambda a: _named_by_id(a["choices"][0]["logprobs"]),
    ),
    "return_token_ids": (
        COMPLETION,
        FRANCE | {"return_token_ids": True},
        lambda a: len(a["choices"][0]["token_ids"]) == 3,
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
        LONG | {"max_tokens": 1900, "timeout_s": 0.1},
        lambda a: a["choices"][0]["finish_reason"] == "timeout",
    ),
    "queue_timeout_s": (COMPLETION, FRANCE | {"queue_timeout_s": 9}, lambda a: text_of(a) == " Paris."),
    "priority": (COMPLETION, FRANCE | {"priority": -5}, lambda a: text_of(a) == " Paris."),
    "spaces_between_special_tokens": (
        COMPLETION,
        FRANCE | {"spaces_between_special_tokens": False},
        lambda a: text_of(a) == " Paris.",
    ),
    "guided_json": (
        COMPLETION,
        FRANCE | {"guided_json": SCHEMA, "max_tokens": 60},
        lambda a: json.loads(text_of(a)) == {"a": 7},
    ),
    "guided_regex": (COMPLETION, FRANCE | {"guided_regex": "[ab]{3}"}, lambda a: re.fullmatch("[ab]{3}", text_of(a))),
    "guided_choice": (CHAT, QUESTION | {"guided_choice": ["x", "yy"]}, lambda a: text_of(a) in ("x", "yy")),
    "guided_grammar": (
        COMPLETION,
        FRANCE | {"guided_grammar": 'start: "a" "b"'},
        lambda a: text_of(a) == "ab",
    ),
    "structured_outputs": (
        COMPLETION,
        FRANCE | {"structured_outputs": {"choice": ["only"]}},
        lambda a: text_of(a) == "only",
    ),
    "best_of": (COMPLETION, FRANCE | {"n": 2, "best_of": 2}, lambda a: len(a["choices"]) == 2),
}


@pytest.mark.parametrize("name", FIELDS)
def test_a_field_acts(http: httpx2.Client, name: str) -> None:
    path, body, holds = FIELDS[name]
    assert name in body
    answer = ask(http, path, body)
    assert holds(answer), answer


@pytest.mark.parametrize("name, value", [("presence_penalty", 2), ("frequency_penalty", 2), ("repetition_penalty", 5)])
def test_a_penalty_changes_a_repetitive_answer(http: httpx2.Client, name: str, value: float) -> None:
    plain, punished = (set(_ids(ask(http, COMPLETION, LONG | more))) for more in ({}, {name: value}))
    assert len(punished) > len(plain)


def _ids(answer: Answer) -> list[int]:
    return [hash(token) for token in re.findall(r"\w+|\W", text_of(answer))]


def test_a_stop_token_ends_the_answer_and_is_named(http: httpx2.Client) -> None:
    (dot,) = tokens_of(http, ".")
    (choice,) = ask(http, COMPLETION, FRANCE | {"stop_token_ids": [dot]})["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (" Paris", "stop", dot)


def test_prefixes_are_shared_only_within_a_cache_salt(http: httpx2.Client) -> None:
    prompt = {"prompt": "one two three " * 20, "max_tokens": 1}
    cached = [
        ask(http, COMPLETION, prompt | {"cache_salt": salt})["usage"]["prompt_tokens_details"]["cached_tokens"]
        for salt in ("a", "a", "b")
    ]
    assert cached[0] == 0 and cached[1] > 0 and cached[2] == 0


@pytest.mark.parametrize("path, body", [(CHAT, QUESTION), (COMPLETION, FRANCE)])
@pytest.mark.parametrize("has_usage", [False, True])
def test_every_chunk_has_usage_if_continuous_usage_is_requested(
    http: httpx2.Client, path: str, body: Answer, has_usage: bool
) -> None:
    options = {"stream": True, "stream_options": {"include_usage": has_usage, "continuous_usage_stats": True}}
    lines = http.post(path, json=body | options).text.splitlines()
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    if not has_usage:
        assert chunks and not any("usage" in chunk for chunk in chunks)
        return
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    begin, num_tokens = (1, 8) if path == CHAT else (0, 3)  # a chat starts with a role and no tokens
    assert counts[:begin] == [0] * begin and counts[begin] > 0 and counts[-2:] == [num_tokens, num_tokens]
    assert counts[begin:-1] == sorted(set(counts[begin:-1])), "every chunk with a choice has tokens"


def test_the_last_text_of_a_streamed_chat_has_the_finish_reason(http: httpx2.Client) -> None:
    body = QUESTION | {"stream": True, "max_tokens": 3, "ignore_eos": True}
    lines = http.post(CHAT, json=body).text.splitlines()
    role, *texts = [json.loads(line[6:])["choices"][0] for line in lines if line.startswith("data: {")]
    assert role["delta"] == {"role": "assistant", "content": ""}
    assert all(each["delta"]["content"] for each in texts)
    assert [each["finish_reason"] for each in texts] == [None] * (len(texts) - 1) + ["length"]


LET_THROUGH = {
    COMPLETION: {"user": "u"},
    CHAT: {
        "user": "u",
        "metadata": {"a": "b"},
        "store": False,
        "service_tier": "auto",
        "modalities": ["text"],
        "safety_identifier": "s",
        "prompt_cache_key": "k",
        "prompt_cache_retention": "24h",
        "verbosity": "low",
        "reasoning_effort": "low",
        "include_reasoning": True,
        "parallel_tool_calls": True,
        "functions": [],
        "function_call": "none",
        "prediction": {"type": "content", "content": "Lima"},
    },
    RESPONSE: {
        "user": "u",
        "metadata": {"a": "b"},
        "store": False,
        "service_tier": "auto",
        "truncation": "disabled",
        "safety_identifier": "s",
        "prompt_cache_key": "k",
        "prompt_cache_retention": "24h",
        "max_tool_calls": 3,
        "include": ["reasoning.encrypted_content"],
        "reasoning": {"effort": "low"},
    },
}


@pytest.mark.parametrize("path", LET_THROUGH)
def test_bookkeeping_fields_do_not_change_the_answer(http: httpx2.Client, path: str) -> None:
    body: Answer = {COMPLETION: FRANCE, CHAT: QUESTION, RESPONSE: {"input": "Hello!", "temperature": 0}}[path]
    plain, kept = ask(http, path, body), ask(http, path, body | LET_THROUGH[path])
    if path == RESPONSE:
        assert plain["output"][0]["content"] == kept["output"][0]["content"]
    else:
        assert text_of(plain) == text_of(kept)


REFUSED: list[tuple[str, Answer]] = [
    *((COMPLETION, {name: value}) for name, value in (("suffix", "x"), ("best_of", 3))),
    *((COMPLETION, {name: value}) for name, value in (("use_beam_search", True), ("length_penalty", 2))),
    *((CHAT, {name: value}) for name, value in (("modalities", ["audio"]), ("audio", {"voice": "x"}))),
    *((RESPONSE, {name: value}) for name, value in (("n", 2), ("return_token_ids", True), ("prompt_logprobs", 1))),
    *((RESPONSE, {name: value}) for name, value in (("conversation", "c"), ("prompt", {"id": "pmpt_1"}))),
]


@pytest.mark.parametrize("path, more", REFUSED, ids=[next(iter(more)) for _, more in REFUSED])
def test_unsupported_fields_are_refused_by_name(http: httpx2.Client, path: str, more: Answer) -> None:
    body: Answer = {COMPLETION: FRANCE, CHAT: QUESTION, RESPONSE: {"input": "Hello!"}}[path]
    answer = http.post(path, json=body | more)
    assert answer.status_code == 400 and next(iter(more)) in answer.json()["error"]["message"]


def in_base64(num_bytes: int) -> str:
    return base64.b64encode(bytes(num_bytes)).decode()


def picture(num_bytes: int) -> Answer:
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{in_base64(num_bytes)}"}}


PARTS: dict[str, tuple[Answer, str]] = {  # name: a part, and the error behind its place
    "video": (
        {"type": "video_url", "video_url": {"url": "http://x/y"}},
        " is a part of type 'video_url', which is not served",
    ),
    "file": ({"type": "file", "file": {"url": "http://x/y"}}, " is a part of type 'file', which is not served"),
    "audio": ({"type": "input_audio", "input_audio": {"data": in_base64(10), "format": "wav"}}, "does not hear audio"),
    "image": (picture(10), "does not see images"),
    "large image": (picture(60_000), "does not see images"),
}


@pytest.mark.parametrize("kind", PARTS)
@pytest.mark.parametrize(("path", "field"), [(CHAT, "messages"), (RESPONSE, "input"), ("/tokenize", "messages")])
def test_parts_other_than_text_are_refused(http: httpx2.Client, path: str, field: str, kind: str) -> None:
    part, words = PARTS[kind]
    content = [{"type": "text", "text": "What is this?"}, part]
    error = refusal(http, path, {field: [{"role": "user", "content": content}]})
    place, _, what = error["message"].partition("[0].content[1]")
    assert (error["param"], place) == (field, field) and words in what and "AAAA" not in what


def test_template_kwargs_cannot_override_the_templates_own_fields(http: httpx2.Client) -> None:
    answer = http.post(CHAT, json=QUESTION | {"chat_template_kwargs": {"messages": []}})
    assert answer.status_code == 400 and "use the fields" in answer.json()["error"]["message"]
    assert ask(http, CHAT, QUESTION | {"chat_template_kwargs": {"enable_thinking": False}})["choices"]


ROOM = 1  # tokens that the prompt leaves free


@pytest.mark.parametrize(
    ("path", "bound", "body"),
    [
        (COMPLETION, "max_tokens", lambda text: {"prompt": text}),
        (CHAT, "max_tokens", lambda text: {"messages": [{"role": "user", "content": text}]}),
        (CHAT, "max_completion_tokens", lambda text: {"messages": [{"role": "user", "content": text}]}),
        (RESPONSE, "max_output_tokens", lambda text: {"input": text}),
    ],
)
def test_an_answer_ends_at_max_model_len_even_if_more_tokens_are_allowed(
    http: httpx2.Client, path: str, bound: str, body: Callable[[str], Answer]
) -> None:
    max_model_len = http.get("/v1/models").json()["data"][0]["max_model_len"]

    def usage(num_words: int, **fields: object) -> tuple[int, int]:
        answer = ask(http, path, body("Peru is" + " Peru" * num_words) | {"temperature": 0} | fields)
        assert answer.get("status") == "incomplete" or answer["choices"][0]["finish_reason"] == "length"
        return tuple(answer["usage"][name] for name in USAGE[path == RESPONSE])  # type: ignore[return-value]

    num_words = max_model_len - ROOM - usage(0, **{bound: 1})[0]
    assert usage(num_words, **{bound: 100_000}) == (max_model_len - ROOM, ROOM)
