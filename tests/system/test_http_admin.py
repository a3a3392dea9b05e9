"""The endpoints beside generating: the document, tokens, metrics."""

from __future__ import annotations

import time

import httpx2

from tokenloom.tests.system.http_engine import DEADLINE_S, QUESTION, samples, wait_idle


def test_the_document_lists_every_route_and_field_and_what_needs_the_key(http: httpx2.Client, url: str) -> None:
    document = http.get("/openapi.json").json()
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            answer = http.request(method.upper(), path, content=b"?")
            assert answer.status_code in (200, 400), (path, answer.status_code)
            without_key = httpx2.request(method.upper(), url + path, content=b"?", timeout=DEADLINE_S)
            is_open = operation.get("security", document["security"]) == []
            assert (without_key.status_code != 401) == is_open == ("401" not in operation["responses"]), path
    schemas = document["components"]["schemas"]
    assert {"prompt", "echo", "guided_regex"} <= schemas["CompletionRequest"]["properties"].keys()
    assert schemas["ChatRequest"]["required"] == ["messages"]


def test_tokenize_and_detokenize_are_inverse(http: httpx2.Client) -> None:
    tokens = http.post("/tokenize", json={"prompt": "The capital of Österreich", "add_special_tokens": False}).json()
    assert tokens["count"] == len(tokens["tokens"])
    assert http.post("/detokenize", json={"tokens": tokens["tokens"]}).json() == {"prompt": "The capital of Österreich"}
    chat = http.post("/tokenize", json={"messages": QUESTION}).json()
    answer = http.post("/v1/chat/completions", json={"messages": QUESTION, "max_tokens": 1}).json()
    assert chat["count"] == answer["usage"]["prompt_tokens"]


def test_metrics_add_up_when_nothing_runs(http: httpx2.Client) -> None:
    begun = time.monotonic()
    http.post("/v1/completions", json={"prompt": "The capital of France is", "n": 3, "max_tokens": 5})
    wait_idle(http, begun)
    found = samples(http)

    def total(name: str) -> float:
        return sum(value for key, value in found.items() if key == name or key.startswith(name + "{"))

    prefix = "tokenloom_"
    assert total(prefix + "prompt_tokens_total") == total(prefix + "prompt_tokens_by_source_total") > 0
    assert total(prefix + "generation_tokens_total") == total(prefix + "request_generation_tokens_sum") > 0
    ended = total(prefix + "request_success_total")
    assert ended > 0
    for name in ("e2e_request_latency_seconds", "request_prompt_tokens", "request_generation_tokens"):
        assert total(f"{prefix}{name}_count") == ended
    assert total(prefix + "time_to_first_token_seconds_count") + total(
        prefix + "inter_token_latency_seconds_count"
    ) == total(prefix + "generation_tokens_total")
    assert total(prefix + "num_open_answers") == total(prefix + "num_requests_running") == 0
    assert total(prefix + "batch_size_count") == total(prefix + "engine_steps_total") > 0
    assert total(prefix + "request_aborts_total") == found.get(prefix + "request_success_total{abort}", 0)
    assert total(prefix + "request_timeouts_total") == found.get(prefix + "request_success_total{timeout}", 0)
    assert total(prefix + "socket_queue_depth") == 0
    assert found[prefix + "worker_memory_bytes{0}"] > 50e6
    assert all(found[f"{prefix}step_seconds_total{{{phase}}}"] > 0 for phase in ("schedule", "send", "device", "host"))
