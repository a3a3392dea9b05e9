"""Faults that users reported of other servers, and that this one never had. Each test names the report."""

from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import pytest

from tokenloom.tests.support.waiting import wait_until
from tokenloom.tests.system.http_engine import QUESTION, ask, samples, wait_idle

COMPLETION, CHAT = "/v1/completions", "/v1/chat/completions"
MAX_MODEL_LEN = 2048
NUM_LEAVING = 10
LONG = {"prompt": "The capital of France is", "max_tokens": 60, "ignore_eos": True, "temperature": 0}


def test_one_request_id_at_once_is_one_answer_and_harms_nobody(http: httpx2.Client) -> None:
    """vllm-project/vllm#10583."""
    with ThreadPoolExecutor(6) as threads:
        sent = [threads.submit(http.post, COMPLETION, json=LONG | {"request_id": "same"}) for _ in range(6)]
        answers = [each.result() for each in sent]
    statuses = sorted(answer.status_code for answer in answers)
    assert statuses[0] == 200 and set(statuses) <= {200, 400}
    texts = {answer.json()["choices"][0]["text"] for answer in answers if answer.status_code == 200}
    assert len(texts) == 1
    assert all("is open already" in answer.text for answer in answers if answer.status_code == 400)
    assert ask(http, COMPLETION, LONG | {"request_id": "same"})["choices"][0]["text"] in texts


def test_prompt_logprobs_of_a_cached_prompt_are_those_of_the_first_time(http: httpx2.Client) -> None:
    """vllm-project/vllm#8268 and #42245."""
    body = {"prompt": "The capital of Peru is Lima. " * 12, "max_tokens": 1, "temperature": 0}
    first = ask(http, COMPLETION, body | {"prompt_logprobs": 2})
    assert ask(http, COMPLETION, body)["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    again = ask(http, COMPLETION, body | {"prompt_logprobs": 2})
    pairs = zip(first["choices"][0]["prompt_logprobs"], again["choices"][0]["prompt_logprobs"], strict=True)
    assert first["choices"][0]["prompt_logprobs"][0] is None
    for one, other in list(pairs)[1:]:
        assert one.keys() == other.keys()
        for token_id, found in one.items():
            assert found["logprob"] == pytest.approx(other[token_id]["logprob"], abs=1e-4)


def test_a_stop_token_leaves_the_text_with_include_stop_str(http: httpx2.Client) -> None:
    """vllm-project/vllm#55483."""
    body = {"prompt": "The capital of France is", "temperature": 0, "max_tokens": 20}
    (token_id,) = ask(http, "/tokenize", {"prompt": " Paris", "add_special_tokens": False})["tokens"]
    (choice,) = ask(http, COMPLETION, body | {"stop_token_ids": [token_id], "include_stop_str_in_output": True})[
        "choices"
    ]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (" Paris", "stop", token_id)


def test_empty_tool_calls_in_a_history_are_none(http: httpx2.Client) -> None:
    """vllm-project/vllm#13978."""
    said = {"role": "assistant", "content": "Lima."}
    bodies = [
        {"messages": [*QUESTION, turn, *QUESTION], "max_tokens": 1, "temperature": 0}
        for turn in (said, said | {"tool_calls": []}, said | {"tool_calls": None})
    ]
    assert len({str(ask(http, CHAT, body)["choices"]) for body in bodies}) == 1


@pytest.mark.parametrize("expects", [True, False])
def test_an_upload_in_chunks_is_read(http: httpx2.Client, expects: bool) -> None:
    """ggml-org/llama.cpp#20269."""

    def pieces() -> Any:
        yield b'{"prompt": "The capital'
        yield b' of France is", "max_tokens": 1, "temperature": 0}'

    headers = {"content-type": "application/json"} | ({"expect": "100-continue"} if expects else {})
    answer = http.post(COMPLETION, content=pieces(), headers=headers)
    assert answer.status_code == 200 and answer.json()["choices"][0]["text"] == " Paris"


@pytest.mark.parametrize(
    ("structure", "expected"),
    [({"choice": ["yes"]}, "yes"), ({"regex": "[ab]{3}"}, None), ({"json": {"type": "boolean"}}, None)],
)
def test_a_grammar_that_ends_before_min_tokens_ends_the_answer(
    http: httpx2.Client, structure: dict[str, Any], expected: str | None
) -> None:
    """vllm-project/vllm#53665."""
    body = {"prompt": "x", "max_tokens": 60, "min_tokens": 50, "temperature": 0, "structured_outputs": structure}
    answer = ask(http, COMPLETION, body)
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "stop" and 0 < answer["usage"]["completion_tokens"] < 50
    assert choice["text"] == (expected or choice["text"]) != ""


def test_clients_that_leave_keep_no_blocks_and_no_answers(http: httpx2.Client) -> None:
    """vllm-project/vllm#22545 and #10430."""
    wait_idle(http)
    aborted = samples(http).get("tokenloom_request_success_total{abort}", 0.0)
    body = LONG | {"max_tokens": 1800, "n": 3, "stream": True, "temperature": 1}
    with contextlib.ExitStack() as clients:
        streams = []  # a stream whose iterator is dropped is closed
        for number in range(NUM_LEAVING):
            sent = body | {"prompt": f"Text {number}. " * 20}
            answer = clients.enter_context(http.stream("POST", COMPLETION, json=sent))
            assert answer.status_code == 200
            streams.append(answer.iter_lines())
            assert next(streams[-1])
        wait_until(lambda: samples(http)["tokenloom_kv_cache_usage_perc"])
    wait_until(lambda: not samples(http)["tokenloom_num_open_answers"])
    wanted = {
        "tokenloom_request_success_total{abort}": aborted + NUM_LEAVING * 3,
        "tokenloom_kv_cache_usage_perc": 0.0,
        "tokenloom_num_requests_running": 0.0,
        "tokenloom_num_requests_waiting": 0.0,
    }
    wait_until(lambda: {name: samples(http)[name] for name in wanted} == wanted, lambda: samples(http))


def test_a_hidden_token_is_found_by_a_stop_string_only_if_it_is_shown(http: httpx2.Client) -> None:
    """ggml-org/llama.cpp#6770: as in vLLM."""
    body = {"messages": QUESTION, "max_tokens": 20, "temperature": 0, "ignore_eos": True, "stop": ["<|end|>"]}
    (hidden,) = ask(http, CHAT, body)["choices"]
    (shown,) = ask(http, CHAT, body | {"skip_special_tokens": False})["choices"]
    assert (hidden["finish_reason"], hidden["stop_reason"]) == ("length", None)
    assert (shown["finish_reason"], shown["stop_reason"]) == ("stop", "<|end|>")
    assert hidden["message"]["content"].startswith(shown["message"]["content"])


def test_a_special_token_in_a_users_text_is_that_token(http: httpx2.Client) -> None:
    """ggml-org/llama.cpp#24382: as in transformers and vLLM."""
    (end,) = ask(http, "/tokenize", {"prompt": "<|end|>", "add_special_tokens": False})["tokens"]
    chats = [{"messages": [{"role": "user", "content": text}]} for text in ("ab", "a<|end|>b")]
    plain, with_end = (ask(http, "/tokenize", chat)["tokens"] for chat in chats)
    assert with_end.count(end) == plain.count(end) + 1


def test_any_temperature_gives_an_answer_and_tiny_ones_the_likeliest(http: httpx2.Client) -> None:
    body = {"prompt": "The capital of France is", "max_tokens": 8, "seed": 1}
    texts = [
        ask(http, COMPLETION, body | {"temperature": temperature})["choices"][0]["text"]
        for temperature in (0, 1e-45, 1e-20, 1e-7, 1e-4, 2, 100)
    ]
    assert len(set(texts[:5])) == 1 and len(set(texts)) > 1


def test_a_request_whose_tokens_are_all_forbidden_is_refused(http: httpx2.Client) -> None:
    (token_id,) = ask(http, "/tokenize", {"prompt": " Paris", "add_special_tokens": False})["tokens"]
    body = {"prompt": "x", "max_tokens": 3, "allowed_token_ids": [token_id], "bad_words": ["Paris"]}
    for fields, words in ((body, "no token may come"), (body | {"allowed_token_ids": []}, "no token could come")):
        answer = http.post(COMPLETION, json=fields)
        assert answer.status_code == 400 and words in answer.text
    assert ask(http, COMPLETION, LONG | {"max_tokens": 1})["choices"][0]["text"] == " Paris"


def test_seeds_have_64_bits_and_minus_one_is_the_largest(http: httpx2.Client) -> None:
    body = {"prompt": "x", "max_tokens": 12, "temperature": 2}
    texts = {
        seed: ask(http, COMPLETION, body | {"seed": seed})["choices"][0]["text"]
        for seed in (0, -1, 2**64 - 1, -(2**63), 2**63)
    }
    assert texts[-1] == texts[2**64 - 1] and texts[-(2**63)] == texts[2**63] and len(set(texts.values())) == 3
    for seed in (2**64, -(2**63) - 1):
        error = http.post(COMPLETION, json=body | {"seed": seed}).json()["error"]
        assert error["param"] == "seed" and str(seed) in error["message"]


@pytest.mark.parametrize("short_by", [2, 1, 0, -1])
def test_a_prompt_needs_room_for_one_token_of_its_answer(http: httpx2.Client, short_by: int) -> None:
    answer = http.post(COMPLETION, json={"prompt": [5] * (MAX_MODEL_LEN - short_by), "ignore_eos": True})
    if short_by > 0:
        assert answer.json()["usage"]["completion_tokens"] == short_by, "max_tokens has no default below the room"
    else:
        assert answer.status_code == 400 and answer.json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    "prompt",
    [None, 7, 1.5, True, {}, [], [[]], [None], [{}], ["x", None], [1, "x"], [1.5], [True], [[1], 2], [-1]],
    ids=str,
)
def test_a_prompt_of_another_form_is_refused_by_its_name(http: httpx2.Client, prompt: object) -> None:
    answer = http.post(COMPLETION, json={"prompt": prompt, "max_tokens": 1})
    assert answer.status_code == 400 and answer.json()["error"]["param"].startswith("prompt"), answer.text


@pytest.mark.parametrize(
    "body",
    [
        *(b"null", b"true", b"7", b'"x"', b"[{}]", b"{}x", b"{} {}", b"{,}", b"{'prompt': 'x'}", b'{"prompt"}'),
        *(b'{"prompt": "x",}', b'{"prompt": NaN}', b'{"prompt": "x", "temperature": Infinity}', b'{"prompt": "\t"}'),
        *(b'{"prompt": "x", "max_tokens": 1e400}', b'{"prompt": "\\ud83d"}', b"\x00", b"prompt=x", b"{" * 9000),
        b'{"prompt": "x"}\x00',
    ],
    ids=lambda body: str(body[:40]),
)
def test_a_body_that_is_no_json_object_is_the_callers_error(http: httpx2.Client, body: bytes) -> None:
    answer = http.post(COMPLETION, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400 and answer.json()["error"]["message"]


@pytest.mark.parametrize("method", ["HEAD", "OPTIONS", "TRACE", "PUT", "PATCH", "DELETE"])
def test_another_method_is_refused_and_sends_nothing_back(http: httpx2.Client, method: str) -> None:
    for path in (COMPLETION, "/v1/models", "/health"):
        answer = http.request(method, path, headers={"x-secret": "not to be sent back"})
        if method == "HEAD" and path != COMPLETION:
            assert answer.status_code == 200 and answer.content == b"" and int(answer.headers["content-length"]) > 0
            continue
        assert answer.status_code == 405 and answer.headers["allow"] and "not to be sent back" not in answer.text


def test_a_turn_of_claude_code_is_answered(http: httpx2.Client) -> None:
    """vllm-project/vllm#44576."""
    cached = {"cache_control": {"type": "ephemeral"}}
    (question,) = QUESTION
    reminder = {"type": "text", "text": "<system-reminder>No files are open.</system-reminder>"}
    body: dict[str, Any] = {
        "model": "tokenloom-demo",
        "max_tokens": 12,
        "temperature": 0,
        "system": [{"type": "text", "text": "You are a helper."} | cached],
        "messages": [{"role": "user", "content": [reminder, {"type": "text", "text": question["content"]} | cached]}],
        "thinking": {"type": "adaptive"},
        "output_config": {"effort": "high"},
        "metadata": {"user_id": "user_1_account__session_2"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    }
    for turns in ([], [{"role": "assistant", "content": [{"type": "text", "text": "Lima."}]}, *QUESTION]):
        answer = ask(http, "/v1/messages?beta=true", body | {"messages": [*body["messages"], *turns]})
        assert answer["type"] == "message" and answer["usage"]["output_tokens"] > 0
