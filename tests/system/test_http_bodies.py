"""A large body gets the same answer as a small one of equal meaning, through an intake process that may die."""

from __future__ import annotations

import json
import os
import signal
from typing import Any

import httpx2
import psutil
import pytest

from tokenloom.frontend.intake.body_parser import SMALL_BYTES
from tokenloom.tests.support.faults import inject
from tokenloom.tests.support.waiting import wait_until
from tokenloom.tests.system.http_engine import DEADLINE_S, QUESTION, sent, wait_idle
from tokenloom.tests.system.launched import LaunchedEngine

PADDING = b" " * (SMALL_BYTES + 1)  # white space, which makes a body large without changing it
WORDS = "The capital of Peru is Lima. "
NO_CALL = {"tool_choice": {"type": "none"}}
CHAT = {"messages": QUESTION, "max_tokens": 4, "temperature": 0}

BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "The capital of Peru is", "max_tokens": 4, "temperature": 0, "echo": True}),
    ("/v1/completions", {"prompt": [[5, 6, 7], [8, 9]], "max_tokens": 3, "n": 2, "temperature": 0, "logprobs": 1}),
    ("/v1/chat/completions", CHAT),
    ("/v1/chat/completions/batch", CHAT | {"messages": [QUESTION, [{"role": "user", "content": "Hello"}]]}),
    ("/v1/responses", {"input": "Hello", "max_output_tokens": 4, "temperature": 0, "instructions": "Be brief."}),
    ("/v1/messages", CHAT | {"system": "Be brief.", "tools": [{"name": "f", "input_schema": {}}]} | NO_CALL),
    ("/v1/messages", CHAT | {"messages": [*QUESTION, {"role": "assistant", "content": "The capital"}]}),
    ("/v1/messages", CHAT | {"messages": [{"role": "user", "content": [{"type": "image"}]}]}),
    ("/v1/messages", CHAT | {"messages": [], "system": "x"}),
    ("/v1/messages", CHAT | {"messages": [{"role": "user", "content": "hello " * 3000}]}),
    ("/v1/messages/count_tokens", {"messages": QUESTION, "system": [{"type": "text", "text": "Be brief."}]}),
    ("/v1/embeddings", {"input": ["a", "b c"], "encoding_format": "base64"}),
    ("/v1/embeddings", {"messages": QUESTION, "truncate_prompt_tokens": 5, "add_special_tokens": True}),
    ("/v1/embeddings", {"messages": [], "input": "x"}),
    ("/v1/chat/completions", CHAT | {"continue_final_message": True, "echo": True}),
    ("/tokenize", {"messages": QUESTION}),
    ("/tokenize", {"messages": QUESTION, "chat_template": "x"}),
    ("/detokenize", {"tokens": [5, 6, 7]}),
    ("/v1/completions", {"prompt": "x", "temprature": 1, "max_tokens": 1, "top_k": 1}),
    ("/v1/completions", {"prompt": [5] * 3000}),
    ("/v1/completions", {"prompt": "x", "max_tokens": 0, "echo": True, "prompt_logprobs": 1, "logprobs": 0}),
    ("/v1/embeddings", {"input": [5] * 2049}),
    ("/v1/chat/completions", CHAT | {"return_token_ids": True, "prompt_logprobs": 0}),
    ("/v1/completions", {"prompt": "x", "model": "gpt-7"}),
    ("/v1/completions", {"prompt": ["x"] * 200, "n": 128}),
    ("/v1/responses", {"input": []}),
    ("/tokenize", {"prompt": "x", "messages": QUESTION}),
    ("/detokenize", {"tokens": [-1]}),
]


def what_counts(answer: httpx2.Response) -> tuple[int, str | None, object]:
    """Return status, warning and body, without ids, times and cached tokens."""
    body = answer.json()
    body.get("usage", {}).pop("prompt_tokens_details", None)
    for name in ("input_tokens_details", "input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens"):
        body.get("usage", {}).pop(name, None)
    for name in ("id", "created", "created_at"):
        body.pop(name, None)
    for item in body.get("output", ()):
        item.pop("id")
    return answer.status_code, answer.headers.get("warning"), body


def intake_processes(engine: LaunchedEngine) -> list[psutil.Process]:
    return [process for process in engine.processes() if is_intake(process)]


def is_intake(process: psutil.Process) -> bool:
    """Return whether a process is a living intake process."""
    try:
        return "tokenloom intake" in " ".join(process.cmdline())
    except psutil.Error:  # it has ended or is ending
        return False


@pytest.mark.parametrize(("path", "body"), BODIES, ids=[f"{path} {list(body)}" for path, body in BODIES])
def test_a_large_body_gets_the_same_answer_as_a_small_one(http: httpx2.Client, path: str, body: dict[str, Any]) -> None:
    small = json.dumps(body).encode()
    answers = [what_counts(http.post(path, content=content)) for content in (small, PADDING + small)]
    assert answers[0] == answers[1] and answers[0][0] in (200, 400, 404)


def test_a_large_invalid_body_gets_the_same_error_as_a_small_one(http: httpx2.Client) -> None:
    for content in (b"[]", b"{", rb'{"prompt":"\ud800"}', b'{"prompt":"\xff"}'):
        small, large = (http.post("/v1/completions", content=each) for each in (content, PADDING + content))
        assert small.status_code == large.status_code == 400
        ours, theirs = (each.json()["error"] for each in (small, large))
        if "byte" not in ours["message"]:  # a position or a length
            assert ours == theirs
        assert {**ours, "message": ""} == {**theirs, "message": ""}


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_far_too_long_text_is_served_if_truncation_is_requested(http: httpx2.Client, side: str) -> None:
    text = WORDS * 20_000
    token_ids = http.post("/tokenize", json={"prompt": WORDS * 100}).json()["tokens"]
    kept = token_ids[-20:] if side == "left" else token_ids[:20]
    fields = {"max_tokens": 4, "temperature": 0, "return_token_ids": True, "logprobs": 1}
    body = fields | {"prompt": text, "truncate_prompt_tokens": 20, "truncation_side": side}
    assert len(text) > 2 * SMALL_BYTES
    (long,) = http.post("/v1/completions", json=body).json()["choices"]
    (short,) = http.post("/v1/completions", json=fields | {"prompt": kept}).json()["choices"]
    assert long["prompt_token_ids"] == kept and long["text"] == short["text"]


def test_all_texts_of_a_large_body_are_answered(http: httpx2.Client) -> None:
    prompts = [f"{i} {WORDS * 5}" for i in range(500)]
    answer = http.post("/v1/completions", json={"prompt": prompts, "max_tokens": 1}).json()
    assert [choice["index"] for choice in answer["choices"]] == list(range(500))


def test_a_killed_intake_process_fails_no_other_request(engine: LaunchedEngine, http: httpx2.Client) -> None:
    body, restarts = PADDING + json.dumps(CHAT).encode(), http.get("/health").json()["restarts"]
    assert http.post("/v1/chat/completions", content=body).status_code == 200
    for process in intake_processes(engine):
        os.kill(process.pid, signal.SIGKILL)
    assert http.post("/v1/chat/completions", content=body).status_code == 200
    assert http.get("/health").json()["restarts"] == restarts


def test_a_disconnect_during_tokenization_ends_the_intake_process(engine: LaunchedEngine, http: httpx2.Client) -> None:
    body = PADDING + json.dumps(CHAT).encode()
    inject(engine.faults, "intake.read", "hang")
    with sent(engine.url, "/v1/chat/completions", body):
        assert engine.wait_struck("intake.read", None, DEADLINE_S)
        processes = intake_processes(engine)
        assert processes and http.get("/health").status_code == 200
    wait_until(lambda: not all(map(is_intake, processes)), "the question goes on")
    assert http.post("/v1/chat/completions", content=body).status_code == 200
    wait_idle(http)


@pytest.mark.parametrize("num_bytes", [1 << 20, 20 << 20])
@pytest.mark.parametrize(("path", "field"), [("/v1/chat/completions", "messages"), ("/v1/responses", "input")])
def test_a_text_model_refuses_a_large_image_by_its_name_and_not_by_its_size(
    http: httpx2.Client, path: str, field: str, num_bytes: int
) -> None:
    image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{'A' * (num_bytes // 3 * 4)}"}}
    answer = http.post(path, json={field: [{"role": "user", "content": [image]}]})
    assert answer.status_code == 400 and "AAAA" not in answer.text
    assert answer.json()["error"]["message"].startswith(f"{field}[0].content[0]: the model ")
    assert "does not see images" in answer.text and answer.json()["error"]["param"] == field
