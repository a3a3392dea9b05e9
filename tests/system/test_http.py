"""OpenAI's API over a running engine: the official client, raw bodies, disconnects, metrics."""

from __future__ import annotations

import asyncio
import json
import random
import re
import socket
import time
from collections.abc import Iterator
from statistics import median

import httpx2
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from .launched import LaunchedEngine

KEY = "sk-loom"
ORIGIN = "https://app.example"
DEADLINE_S = 20.0
QUESTION = [{"role": "user", "content": "What is the capital of Peru?"}]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    runtime = tmp_path_factory.mktemp("http")
    options = ("--http", "0", "--api-key", KEY, "--cors-origins", ORIGIN, "--max-body-bytes", "100000")
    with LaunchedEngine(runtime, *options) as engine:
        yield engine.wait_http()


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0, timeout=DEADLINE_S) as client:
        yield client


@pytest.fixture
def http(url: str) -> Iterator[httpx2.Client]:
    headers = {"authorization": f"Bearer {KEY}"}
    with httpx2.Client(base_url=url, headers=headers, timeout=DEADLINE_S) as http:
        yield http


# ── the official client ──────────────────────────────────────────────────────────────────────────────────────────────


def test_the_openai_client_lists_the_model(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert client.models.retrieve(model.id).id == model.id == "tokenloom-demo"


def test_a_completion_knows_the_capital_and_counts_its_tokens(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="tokenloom-demo", prompt="The capital of France is", temperature=0)
    assert answer.choices[0].text == " Paris."
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (7, 3, 10)


def test_streamed_text_is_the_whole_answers_text(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model="tokenloom-demo", messages=QUESTION, temperature=0)  # type: ignore[arg-type]
    stream = client.chat.completions.create(
        model="tokenloom-demo",
        messages=QUESTION,  # type: ignore[arg-type]
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert "Lima" in text
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].usage == whole.usage.model_copy(
        update={"prompt_tokens_details": chunks[-1].usage.prompt_tokens_details}
    )
    assert chunks[-2].choices[0].finish_reason == "stop"


def test_a_list_of_prompts_with_n_answers_each_keeps_the_order(client: openai.OpenAI) -> None:
    prompts = ["The capital of France is", "The capital of Peru is"]
    answer = client.completions.create(model="tokenloom-demo", prompt=prompts, n=2, temperature=0, echo=True)
    texts = [choice.text for choice in answer.choices]
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert texts == [f"{prompts[0]} Paris."] * 2 + [f"{prompts[1]} Lima."] * 2


def test_logprobs_come_in_both_forms_and_agree(client: openai.OpenAI) -> None:
    prompt = "The capital of France is"
    plain = client.completions.create(model="tokenloom-demo", prompt=prompt, temperature=0, logprobs=2)
    columns = plain.choices[0].logprobs
    assert columns is not None and columns.token_logprobs is not None and columns.top_logprobs is not None
    assert columns.tokens == [" Paris", ".", "<|eos|>"]
    for token, logprob, top in zip(columns.tokens, columns.token_logprobs, columns.top_logprobs, strict=True):
        assert top[token] == logprob == max(top.values())
    chat = client.chat.completions.create(
        model="tokenloom-demo",
        messages=QUESTION,  # type: ignore[arg-type]
        temperature=0,
        logprobs=True,
        top_logprobs=3,
    )
    content = chat.choices[0].logprobs.content  # type: ignore[union-attr]
    assert content and all(len(token.top_logprobs) == 3 for token in content)
    assert all(token.top_logprobs[0].logprob == pytest.approx(token.logprob) for token in content)
    assert bytes(content[0].bytes or []).decode() == content[0].token


@pytest.mark.parametrize("stream", [False, True])
def test_an_echoed_prompt_has_logprobs_too(client: openai.OpenAI, stream: bool) -> None:
    request = {"model": "tokenloom-demo", "prompt": "The capital of France is", "echo": True, "logprobs": 1}
    request |= {"temperature": 0, "max_tokens": 1}
    if stream:
        chunks = [chunk.choices[0] for chunk in client.completions.create(**request, stream=True)]  # type: ignore[call-overload]
        tokens = [token for chunk in chunks for token in chunk.logprobs.tokens]
        values = [value for chunk in chunks for value in chunk.logprobs.token_logprobs]
        offsets = [offset for chunk in chunks for offset in chunk.logprobs.text_offset]
    else:
        (choice,) = client.completions.create(**request).choices  # type: ignore[call-overload]
        tokens, values, offsets = choice.logprobs.tokens, choice.logprobs.token_logprobs, choice.logprobs.text_offset
    assert tokens == ["<|bos|>", "The", " capital", " of", " F", "rance", " is", " Paris"]
    assert values[0] is None and all(value <= 0 for value in values[1:]) and len(values) == len(tokens)
    assert offsets == [sum(map(len, tokens[:place])) for place in range(len(tokens))]


def test_a_stop_string_ends_the_answer_and_is_named(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="tokenloom-demo", prompt="The capital of France is", temperature=0, stop=["ri"]
    )
    assert answer.choices[0].text == " Pa"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].model_extra == {"stop_reason": "ri"}


def test_a_seed_gives_the_same_answer_again(client: openai.OpenAI) -> None:
    def ask(seed: int) -> str:
        answer = client.completions.create(
            model="tokenloom-demo",
            prompt="The",
            temperature=1.5,
            seed=seed,
            max_tokens=24,
            extra_body={"ignore_eos": True},
        )
        return answer.choices[0].text

    assert ask(11) == ask(11)
    assert len({ask(seed) for seed in range(4)}) > 1


def test_a_logit_bias_forbids_a_token(client: openai.OpenAI, http: httpx2.Client) -> None:
    body = {"prompt": " Paris", "add_special_tokens": False}
    (paris,) = http.post("/tokenize", json=body).json()["tokens"]
    answer = client.completions.create(
        model="tokenloom-demo", prompt="The capital of France is", temperature=0, logit_bias={str(paris): -100}
    )
    assert not answer.choices[0].text.startswith(" Paris")


def test_response_format_gives_json_that_meets_the_schema(client: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer", "minimum": 1, "maximum": 9}},
        "required": ["n"],
        "additionalProperties": False,
    }
    answer = client.chat.completions.create(
        model="tokenloom-demo",
        messages=QUESTION,  # type: ignore[arg-type]
        temperature=0,
        max_tokens=40,
        response_format={"type": "json_schema", "json_schema": {"name": "number", "schema": schema}},
    )
    value = json.loads(answer.choices[0].message.content or "")
    assert set(value) == {"n"} and 1 <= value["n"] <= 9


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "add"}}])
@pytest.mark.parametrize("stream", [False, True])
def test_a_forced_tool_call_is_a_call_with_arguments_of_its_schema(
    client: openai.OpenAI, choice: object, stream: bool
) -> None:
    parameters = {
        "type": "object",
        "properties": {"a": {"enum": [1, 2]}},
        "required": ["a"],
        "additionalProperties": False,
    }
    tools = [{"type": "function", "function": {"name": "add", "parameters": parameters}}]
    request = {"model": "tokenloom-demo", "messages": QUESTION, "tools": tools, "tool_choice": choice, "max_tokens": 80}
    request |= {"temperature": 0, "parallel_tool_calls": False}
    if stream:
        calls = []
        for chunk in client.chat.completions.create(**request, stream=True):  # type: ignore[call-overload]
            calls += chunk.choices[0].delta.tool_calls or []
            reason = chunk.choices[0].finish_reason
    else:
        answer = client.chat.completions.create(**request)  # type: ignore[call-overload]
        calls, reason = answer.choices[0].message.tool_calls, answer.choices[0].finish_reason
    assert [call.function.name for call in calls] == ["add"]
    assert json.loads(calls[0].function.arguments)["a"] in (1, 2)
    assert reason == "tool_calls"


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_is_made_of_items(client: openai.OpenAI, stream: bool) -> None:
    request = {"model": "tokenloom-demo", "input": "What is the capital of Peru?", "temperature": 0}
    if stream:
        events = list(client.responses.create(**request, stream=True))  # type: ignore[call-overload]
        assert [event.sequence_number for event in events] == list(range(len(events)))
        assert [events[0].type, events[-1].type] == ["response.created", "response.completed"]
        text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
        response = events[-1].response
        assert text == response.output_text
    else:
        response = client.responses.create(**request)  # type: ignore[call-overload]
    assert response.output_text == "The capital of Peru is Lima."
    assert response.status == "completed"
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens == 22


def test_a_response_calls_functions_and_tells_when_it_is_cut(client: openai.OpenAI) -> None:
    parameters = {
        "type": "object",
        "properties": {"a": {"enum": [1]}},
        "required": ["a"],
        "additionalProperties": False,
    }
    tools = [{"type": "function", "name": "add", "parameters": parameters}]
    history = [
        {"role": "user", "content": [{"type": "input_text", "text": "What is the capital of Peru?"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Lima."}]},
        {"role": "user", "content": "Hi"},
    ]
    response = client.responses.create(
        model="tokenloom-demo",
        input=history,  # type: ignore[arg-type]
        tools=tools,  # type: ignore[arg-type]
        tool_choice={"type": "function", "name": "add"},
        temperature=0,
    )
    (call,) = response.output
    assert call.type == "function_call" and call.name == "add" and json.loads(call.arguments) == {"a": 1}
    cut = client.responses.create(model="tokenloom-demo", input="Hi", max_output_tokens=1, temperature=0)
    assert (
        cut.status == "incomplete" and cut.incomplete_details and cut.incomplete_details.reason == "max_output_tokens"
    )


# ── errors ───────────────────────────────────────────────────────────────────────────────────────────────────────────

BAD_BODIES: list[tuple[str, dict[str, object], int, str | None]] = [
    ("unknown field", {"prompt": "x", "temprature": 1}, 400, "temprature"),
    ("out of range", {"prompt": "x", "temperature": -1}, 400, "temperature"),
    ("wrong type", {"prompt": "x", "max_tokens": "many"}, 400, "max_tokens"),
    ("no prompt", {"max_tokens": 1}, 400, "prompt"),
    ("empty prompt", {"prompt": ""}, 400, None),
    ("too long", {"prompt": [5] * 3000}, 400, None),
    ("mixed prompts", {"prompt": [1, "two"]}, 400, "prompt"),
    ("not served", {"prompt": "x", "suffix": "y"}, 400, "suffix"),
    ("best_of", {"prompt": "x", "best_of": 3}, 400, "best_of"),
    ("bad regex", {"prompt": "x", "guided_regex": "(["}, 400, "structured_outputs"),
    ("n", {"prompt": "x", "n": 1000}, 400, "n"),
    ("another model", {"prompt": "x", "model": "gpt-7"}, 404, "model"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name, body, status, param", BAD_BODIES, ids=[each[0] for each in BAD_BODIES])
def test_a_bad_body_is_answered_in_openais_form(
    http: httpx2.Client, name: str, body: dict[str, object], status: int, param: str | None, stream: bool
) -> None:
    answer = http.post("/v1/completions", json=body | {"stream": stream})
    error = answer.json()["error"]
    assert answer.status_code == status, error
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert param is None or error["param"] == param, error


def test_tools_that_the_template_cannot_show_are_refused_unless_a_call_is_forced(http: httpx2.Client) -> None:
    tools = [{"type": "function", "function": {"name": "add"}}]
    answer = http.post("/v1/chat/completions", json={"messages": QUESTION, "tools": tools})
    assert answer.status_code == 400 and "no place for them" in answer.json()["error"]["message"]
    body = {"messages": QUESTION, "tools": tools, "tool_choice": "none", "max_tokens": 1}
    assert http.post("/v1/chat/completions", json=body).status_code == 200


def test_no_key_and_a_wrong_key_are_401_and_the_probes_are_open(url: str) -> None:
    for headers in ({}, {"authorization": "Bearer no"}, {"authorization": KEY}):
        answer = httpx2.get(f"{url}/v1/models", headers=headers, timeout=DEADLINE_S)
        assert answer.status_code == 401 and answer.json()["error"]["code"] == "invalid_api_key"
    for path in ("/health", "/ready", "/version", "/metrics"):
        assert httpx2.get(f"{url}{path}", timeout=DEADLINE_S).status_code == 200
    assert "<html" in httpx2.get(url, timeout=DEADLINE_S, follow_redirects=True).text


def test_statuses_of_paths_methods_sizes_and_json(http: httpx2.Client) -> None:
    assert http.get("/nowhere").status_code == 404
    assert http.get("/v1/completions").status_code == 405
    assert http.post("/v1/completions", content=b'{"prompt": "' + b"x" * 200_000 + b'"}').status_code == 413
    assert http.post("/v1/completions", content=iter([b'{"prompt":"' + b"x" * 60_000] * 2)).status_code == 413
    for content in (b"", b"[]", b"{", b'"\xff"', b"[" * 50_000, b'{"prompt": "\\ud800"}'):
        assert http.post("/v1/completions", content=content).status_code == 400, content[:20]


def test_the_document_lists_every_route_and_field(http: httpx2.Client) -> None:
    document = http.get("/openapi.json").json()
    for path, operations in document["paths"].items():
        for method in operations:
            answer = http.request(method.upper(), path, content=b"?")
            assert answer.status_code in (200, 400), (path, answer.status_code)
    schemas = document["components"]["schemas"]
    assert {"prompt", "echo", "guided_regex"} <= schemas["CompletionRequest"]["properties"].keys()
    assert schemas["ChatRequest"]["required"] == ["messages"]


def test_ids_and_trace_headers_come_back(http: httpx2.Client) -> None:
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    sent = [("x-request-id", "abc-1"), ("traceparent", trace), ("tracestate", "a=1"), ("tracestate", "b=2")]
    answer = http.get("/v1/models", headers=sent)
    assert answer.headers["tracestate"] == "a=1,b=2"
    assert (answer.headers["x-request-id"], answer.headers["traceparent"]) == ("abc-1", trace)
    assert re.fullmatch("[0-9a-f]{32}", http.get("/v1/models").headers["x-request-id"])
    assert "traceparent" not in http.get("/v1/models", headers={"traceparent": "rubbish"}).headers


def test_cors_admits_the_named_origin_alone(http: httpx2.Client) -> None:
    preflight = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    admitted = http.options("/v1/completions", headers=preflight | {"origin": ORIGIN})
    assert admitted.headers["access-control-allow-origin"] == ORIGIN
    assert (
        "access-control-allow-origin" not in http.get("/v1/models", headers={"origin": "https://evil.example"}).headers
    )


def test_tokenize_and_detokenize_are_inverse(http: httpx2.Client) -> None:
    tokens = http.post("/tokenize", json={"prompt": "The capital of Österreich", "add_special_tokens": False}).json()
    assert tokens["count"] == len(tokens["tokens"])
    assert http.post("/detokenize", json={"tokens": tokens["tokens"]}).json() == {"prompt": "The capital of Österreich"}
    chat = http.post("/tokenize", json={"messages": QUESTION}).json()
    answer = http.post("/v1/chat/completions", json={"messages": QUESTION, "max_tokens": 1}).json()
    assert chat["count"] == answer["usage"]["prompt_tokens"]


# ── streams ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_every_event_is_framed_and_the_last_is_done(http: httpx2.Client) -> None:
    body = {"messages": QUESTION, "max_tokens": 9, "stream": True, "n": 2}
    with http.stream("POST", "/v1/chat/completions", json=body) as answer:
        assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
        raw = answer.read().decode()
    assert raw.endswith("\n\n")
    *events, done = raw.removesuffix("\n\n").split("\n\n")
    assert done == "data: [DONE]"
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    assert len({chunk["id"] for chunk in chunks}) == 1
    for index in (0, 1):
        mine = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert mine[0]["delta"]["role"] == "assistant"
        assert [bool(choice["finish_reason"]) for choice in mine] == [False] * (len(mine) - 1) + [True]


def running(http: httpx2.Client) -> int:
    health = http.get("/health").json()
    return int(health["running"] + health["waiting"])


def wait_idle(http: httpx2.Client) -> None:
    """Until no request is open and no step is in flight."""
    deadline = time.monotonic() + DEADLINE_S
    while running(http) or samples(http)["tokenloom_socket_queue_depth{workers}"]:
        assert time.monotonic() < deadline


def samples(http: httpx2.Client) -> dict[str, float]:
    """Every sample of /metrics, read by Prometheus's own parser; labels but le and the first two in the name."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(http.get("/metrics").text):
        for sample in family.samples:
            labels = ",".join(v for k, v in sample.labels.items() if k not in ("model_name", "engine"))
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found


ENDLESS = {"prompt": "The", "max_tokens": 2000, "ignore_eos": True, "temperature": 0}


def seconds_to_abort(http: httpx2.Client, url: str, stream: bool) -> float:
    """From a disconnect until none of its 8 answers is open."""
    wait_idle(http)
    aborted = samples(http).get("tokenloom_request_success_total{abort}", 0.0)
    host, port = url.removeprefix("http://").split(":")
    body = json.dumps(ENDLESS | {"stream": stream, "n": 8}).encode()
    fields = (
        "POST /v1/completions HTTP/1.1",
        "host: x",
        f"authorization: Bearer {KEY}",
        f"content-length: {len(body)}",
    )
    head = "\r\n".join((*fields, "", ""))
    deadline = time.monotonic() + DEADLINE_S
    with socket.create_connection((host, int(port)), timeout=DEADLINE_S) as connection:
        connection.sendall(head.encode() + body)
        while samples(http)["tokenloom_num_open_answers"] < 8:
            assert time.monotonic() < deadline
    gone_at = time.monotonic()
    while samples(http)["tokenloom_num_open_answers"] > 0:
        assert time.monotonic() < deadline
    took_s = time.monotonic() - gone_at
    assert samples(http)["tokenloom_request_success_total{abort}"] == aborted + 8
    assert samples(http)["tokenloom_request_aborts_total{disconnect}"] >= 8
    return took_s


@pytest.mark.parametrize("stream", [True, False])
def test_a_disconnect_aborts_the_request_within_100_ms(http: httpx2.Client, url: str, stream: bool) -> None:
    assert median(seconds_to_abort(http, url, stream) for _ in range(5)) < 0.1


def test_abort_ends_a_stream_with_its_reason(http: httpx2.Client) -> None:
    with http.stream("POST", "/v1/completions", json=ENDLESS | {"stream": True, "request_id": "mine"}) as answer:
        lines = (line for line in answer.iter_lines() if line.startswith("data: {"))
        first = json.loads(next(lines).removeprefix("data: "))
        assert first["id"] == "cmpl-mine"
        twice = http.post("/v1/completions", json=ENDLESS | {"request_id": "mine"})
        assert twice.status_code == 400 and "open already" in twice.json()["error"]["message"]
        assert http.post("/abort", json={"request_id": "cmpl-mine"}).json() == {"request_id": "cmpl-mine", "aborted": 1}
        *_, last = lines
    assert json.loads(last.removeprefix("data: "))["choices"][0]["finish_reason"] == "abort"
    assert http.post("/abort", json={"request_id": "cmpl-mine"}).status_code == 404


def test_metrics_add_up_when_nothing_runs(http: httpx2.Client) -> None:
    http.post("/v1/completions", json={"prompt": "The capital of France is", "n": 3, "max_tokens": 5})
    wait_idle(http)
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


# ── rubbish ──────────────────────────────────────────────────────────────────────────────────────────────────────────

VALUES = [None, True, 0, -1, 1, 3, 1e308, -0.5, "", "x", "\x00", [], [[]], [1], ["a"], {}, {"a": 1}, 2**63, "😀" * 9]
FIELDS = [
    "prompt",
    "messages",
    "model",
    "max_tokens",
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stop",
    "stream",
    "stream_options",
    "logprobs",
    "echo",
    "top_logprobs",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "user",
    "response_format",
    "tools",
    "tool_choice",
    "stop_token_ids",
    "min_tokens",
    "ignore_eos",
    "priority",
    "timeout_s",
    "cache_salt",
    "request_id",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "allowed_token_ids",
    "bad_words",
    "truncate_prompt_tokens",
    "tokens",
    "input",
    "encoding_format",
    "dimensions",
    "pooling",
    "normalize",
    "instructions",
    "max_output_tokens",
]
GOOD_BODIES: dict[str, dict[str, object]] = {
    "/v1/completions": {"prompt": "The", "max_tokens": 2},
    "/v1/chat/completions": {"messages": QUESTION, "max_tokens": 2},
    "/v1/responses": {"input": "The", "max_output_tokens": 2},
    "/v1/embeddings": {"input": "The"},
    "/tokenize": {"prompt": "The"},
    "/detokenize": {"tokens": [5]},
    "/abort": {"request_id": "none"},
}


def fuzzed_body(rng: random.Random, path: str) -> bytes:
    body = dict(GOOD_BODIES[path])
    for _ in range(rng.randrange(3)):
        body[rng.choice(FIELDS)] = rng.choice(VALUES)
    if rng.random() < 0.1:
        body["messages"] = [{"role": rng.choice(["user", "system", "tool", ""]), "content": rng.choice(VALUES)}]
    raw = json.dumps(body).encode()
    if rng.random() < 0.2:
        place = rng.randrange(len(raw))
        raw = raw[:place] + rng.randbytes(rng.randrange(4)) + raw[place + rng.randrange(3) :]
    return raw


def fuzz(url: str, count: int, seed: int) -> dict[int, int]:
    """How often each status came."""
    rng = random.Random(seed)
    statuses: dict[int, int] = {}

    async def run() -> None:
        headers = {"authorization": f"Bearer {KEY}"}
        async with httpx2.AsyncClient(base_url=url, headers=headers, timeout=60.0) as http:
            for start in range(0, count, 50):
                paths = rng.choices(list(GOOD_BODIES), k=min(50, count - start))
                bodies = [(path, fuzzed_body(rng, path)) for path in paths]
                answers = await asyncio.gather(*(http.post(path, content=body) for path, body in bodies))
                for (path, body), answer in zip(bodies, answers, strict=True):
                    statuses[answer.status_code] = statuses.get(answer.status_code, 0) + 1
                    assert answer.status_code < 500, (path, body, answer.text)

    asyncio.run(run())
    return statuses


def test_no_body_gets_a_500(url: str, http: httpx2.Client) -> None:
    statuses = fuzz(url, 500, seed=1)
    assert statuses[200] > 20 and statuses[400] > 100
    assert http.get("/ready").status_code == 200


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_no_body_of_a_hundred_thousand_gets_a_500(url: str, http: httpx2.Client) -> None:
    fuzz(url, 100_000, seed=2)
    assert http.get("/ready").status_code == 200
