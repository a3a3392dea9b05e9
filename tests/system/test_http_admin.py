"""The endpoints beside generation: OpenAPI, tokens, metrics."""

from __future__ import annotations

import time

import httpx2
import pytest

from tokenloom.frontend.server.http.invocations import top_level_fields
from tokenloom.frontend.server.http.server_info import InfoEndpoints
from tokenloom.frontend.server.requests.frontend import Frontend
from tokenloom.tests.support.engine_specs import new_spec
from tokenloom.tests.system.http_engine import KEY, MAX_WAITING_TOKENS, QUESTION, ask, samples, wait_idle


def test_openapi_lists_every_route_and_field_and_the_routes_with_a_key(
    http: httpx2.Client, stranger: httpx2.Client
) -> None:
    document = http.get("/openapi.json").json()
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            answer = http.request(method.upper(), path, content=b"?")
            expected = (404,) if "{" in path else (200, 400)  # no stored response has the parameter's name as its id
            expected = (400,) if path.startswith(("/v1/files", "/v1/batches")) else expected  # without --state-dir
            expected = (403,) if path.endswith("_lora_adapter") else expected  # without --allow-runtime-lora
            assert answer.status_code in expected, (path, answer.status_code)
            without_key = stranger.request(method.upper(), path, content=b"?")
            is_open = operation.get("security", document["security"]) == []
            assert (without_key.status_code != 401) == is_open == ("401" not in operation["responses"]), path
    for path in ("/v1/embeddings", "/v2/embed"):
        kinds = document["paths"][path]["post"]["responses"]["200"]["content"]
        assert ("application/octet-stream" in kinds) == (path == "/v1/embeddings")
    schemas = document["components"]["schemas"]
    assert {"prompt", "echo", "guided_regex"} <= schemas["CompletionRequest"]["properties"].keys()
    assert schemas["ChatRequest"]["required"] == ["messages"]


@pytest.mark.parametrize(
    ("body", "path", "field"),
    [
        ("ResponsesRequest", "responses", "max_output_tokens"),
        ("ChatRequest", "chat/completions", "max_completion_tokens"),
        ("ChatRequest", "chat/completions", "max_tokens"),
        ("MessagesRequest", "messages", "max_tokens"),
    ],
)
def test_the_least_length_of_an_answer_is_the_documents(http: httpx2.Client, body: str, path: str, field: str) -> None:
    found = http.get("/openapi.json").json()["components"]["schemas"][body]["properties"][field]
    (least,) = {form["minimum"] for form in found.get("anyOf", [found]) if "minimum" in form}
    given = {"input": "Hi"} if path == "responses" else {"messages": QUESTION}
    assert http.post(f"/v1/{path}", json=given | {field: least}).status_code == 200
    assert http.post(f"/v1/{path}", json=given | {field: least - 1}).status_code == 400


def test_metrics_add_up_when_idle(http: httpx2.Client) -> None:
    begun, of_lost_clients = time.monotonic(), samples(http)["tokenloom_socket_queue_depth{clients}"]
    http.post("/v1/completions", json={"prompt": "The capital of France is", "n": 3, "max_tokens": 5})
    wait_idle(http, begun)
    found = {name.removeprefix("tokenloom_"): value for name, value in samples(http).items()}

    def total(name: str) -> float:
        return sum(value for key, value in found.items() if key == name or key.startswith(name + "{"))

    assert total("prompt_tokens_total") == total("prompt_tokens_by_source_total") > 0
    assert total("generation_tokens_total") == total("request_generation_tokens_sum") > 0
    assert total("request_success_total") == total("e2e_request_latency_seconds_count") > 0
    assert total("num_open_answers") == total("num_requests_running") == 0
    assert total("batch_size_count") == total("iteration_tokens_count") == total("engine_steps_total") > 0
    assert total("socket_queue_depth") <= of_lost_clients
    assert found["worker_memory_bytes{0}"] > 50e6
    assert all(found[f"step_seconds_total{{{phase}}}"] > 0 for phase in ("schedule", "send", "device", "host"))


def test_sagemakers_paths_act_as_health_and_as_the_bodys_endpoint(http: httpx2.Client) -> None:
    for method in ("GET", "POST"):
        assert http.request(method, "/ping").json()["status"] == http.get("/health").json()["status"] == "ok"
    tail = {"max_tokens": 3, "temperature": 0}
    assert ask(http, "/invocations", tail, tools=[], messages=QUESTION)["object"] == "chat.completion"
    assert ask(http, "/invocations", tail, prompt="The capital")["object"] == "text_completion"
    assert ask(http, "/invocations", input="Oslo")["data"][0]["embedding"]
    assert ask(http, "/invocations", messages=QUESTION, encoding_format="float")["data"][0]["embedding"]
    assert http.post("/invocations", json={"prompt": "The", "stream": True, **tail}).text.endswith("[DONE]\n\n")
    large = http.post("/invocations", content=b'{"prompt": "' + b"a " * 40_000 + b'"}')
    assert large.status_code == 400 and large.json()["error"]["code"] != "invalid_json"
    for body in (b'{"model": {"prompt": 1}}', b"", b'"prompt"'):
        refused = http.post("/invocations", content=body)
        assert refused.status_code == 400 and "messages for /v1/chat/completions" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        (b'{"a": {"b": 1}, "c": ["d", {"e": 2}], "f" : "\\"g\\": {", "h": 1}', {"a", "c", "f", "h"}),
        (b'{"a": "b", "c": [1, 2', {"a", "c"}),
        (b'{"a": "b\\', {"a"}),
        (b'["a"]', set()),
    ],
)
def test_the_start_of_a_body_shows_its_outermost_fields(text: bytes, fields: set[str]) -> None:
    assert top_level_fields(text) == fields


def test_the_configuration_is_at_vllms_path_and_holds_no_secret(http: httpx2.Client) -> None:
    info = http.get("/server_info?config_format=json").json()
    groups = info["vllm_config"]
    assert groups["model_config"]["max_model_len"] == 2048 and groups["cache_config"]["num_gpu_blocks"] > 0
    assert groups["engine_config"]["max_waiting_tokens"] == MAX_WAITING_TOKENS
    text = http.get("/server_info").text
    assert "max_num_seqs=256" in text and KEY not in text and KEY not in str(info)
    assert http.get("/server_info?config_format=yaml").json()["error"]["param"] == "config_format"


def test_the_tokenizers_configuration_is_served_if_the_option_is_set(http: httpx2.Client) -> None:
    info = http.get("/tokenizer_info").json()
    assert info["tokenizer_class"] and info["bos_token"] == "<|bos|>" and "message" in info["chat_template"]
    assert not {"vocab_file", "merges_file"} & info.keys()
    frontend = Frontend(new_spec(), None, None, lambda: None)
    paths = [each.path for each in InfoEndpoints(frontend, new_spec(), None).endpoints()]
    assert paths == ["/server_info"]


def test_pages_need_no_key_and_load_nothing_external(stranger: httpx2.Client) -> None:
    for page in ("/dashboard", "/chat", "/docs"):
        answer = stranger.get(page)
        assert answer.status_code == 200 and "default-src 'none'" in answer.headers["content-security-policy"]
        assert "https:" not in answer.text and "http:" not in answer.text and "@import" not in answer.text
    assert stranger.get("/redoc").headers["location"] == "docs"
    icon = stranger.get("/favicon.ico")
    assert icon.headers["content-type"] == "image/x-icon" and icon.content[:4] == b"\0\0\1\0"
    assert stranger.get("/dashboard/data").status_code == 401
