"""A large body gets the same answer as a small one of equal meaning, through an intake process that may die."""

from __future__ import annotations

import json
import os
import signal
from typing import Any

import httpx2
import psutil
import pytest

from tokenloom.frontend.server.bodies.body_parser import SMALL_BYTES
from tokenloom.tests.support.faults import inject
from tokenloom.tests.support.waiting import wait_until
from tokenloom.tests.system.http_engine import DEADLINE_S, QUESTION, sent, wait_idle
from tokenloom.tests.system.launched import LaunchedEngine

PADDING = b" " * (SMALL_BYTES + 1)  # white space, which makes a body large without changing it
CHAT = {"messages": QUESTION, "max_tokens": 4, "temperature": 0}

BODIES: list[tuple[str, dict[str, Any]]] = [  # of each endpoint one that is served, and some that are not
    ("/v1/completions", {"prompt": [[5, 6, 7], [8, 9]], "max_tokens": 3, "n": 2, "temperature": 0, "logprobs": 1}),
    ("/v1/completions", {"prompt": "x", "temprature": 1, "max_tokens": 1, "top_k": 1}),
    ("/v1/completions", {"prompt": [5] * 3000}),
    ("/v1/completions", {"prompt": ["x"] * 200, "n": 128}),
    ("/v1/completions", {"prompt": "x", "model": "gpt-7"}),
    ("/v1/chat/completions", CHAT | {"return_token_ids": True, "prompt_logprobs": 0}),
    ("/v1/chat/completions", CHAT | {"continue_final_message": True, "echo": True}),
    ("/v1/chat/completions/batch", CHAT | {"messages": [QUESTION, [{"role": "user", "content": "Hello"}]]}),
    ("/v1/responses", {"input": "Hello", "max_output_tokens": 4, "temperature": 0, "instructions": "Be brief."}),
    ("/v1/messages", CHAT | {"messages": [*QUESTION, {"role": "assistant", "content": "The capital"}]}),
    ("/v1/messages", CHAT | {"messages": [{"role": "user", "content": [{"type": "image"}]}]}),
    ("/v1/messages/count_tokens", {"messages": QUESTION, "system": [{"type": "text", "text": "Be brief."}]}),
    ("/v1/embeddings", {"input": ["a", "b c"], "encoding_format": "base64"}),
    ("/v1/embeddings", {"messages": QUESTION, "truncate_prompt_tokens": 5, "add_special_tokens": True}),
    ("/v2/embed", {"texts": ["Lima", "a longer text"], "embedding_types": ["float", "int8"]}),
    ("/score", {"text_1": "Lima", "text_2": ["a", "b c"]}),
    ("/score", {"text_1": ["Lima", "Oslo"], "text_2": ["a", "b", "c"]}),
    ("/rerank", {"query": "Lima", "documents": ["a", {"text": "b c"}], "top_n": 1}),
    ("/pooling", {"input": ["a", [5, 6]], "task": "token_embed", "dimensions": 2}),
    ("/generative_scoring", {"query": [8], "items": [[5], [6, 7]], "label_token_ids": [5, 6]}),
    ("/tokenize", {"messages": QUESTION}),
    ("/tokenize", {"prompt": "x", "messages": QUESTION}),
    ("/detokenize", {"tokens": [5, 6, 7]}),
]


def what_counts(answer: httpx2.Response) -> tuple[int, str | None, object]:
    """Return status, warning and body, without ids, times and cached tokens."""
    body = answer.json()
    body.get("usage", {}).pop("prompt_tokens_details", None)
    for name in ("input_tokens_details", "input_tokens"):
        body.get("usage", {}).pop(name, None)
    for name in ("cache_read_input_tokens", "cache_creation_input_tokens", "cache_creation"):
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
