"""Faults that users reported of other servers, and that this one never had. Each test names the report."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import pytest

from tokenloom.tests.system.http_engine import QUESTION

COMPLETION, CHAT = "/v1/completions", "/v1/chat/completions"
LONG = {"prompt": "The capital of France is", "max_tokens": 60, "ignore_eos": True, "temperature": 0}


def ask(http: httpx2.Client, path: str, body: dict[str, Any]) -> Any:
    answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


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
