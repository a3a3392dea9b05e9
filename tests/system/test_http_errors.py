"""Invalid requests get an error in OpenAI's form that names the wrong field, at each endpoint."""

from __future__ import annotations

from itertools import product

import httpx2
import pytest

from tokenloom.tests.system.http_engine import MAX_WAITING_TOKENS, QUESTION, ask
from tokenloom.tests.system.test_http_custom_tools import ADD, CHAT, LARK, chosen, tool

COMPLETION, RESPONSE, COUNT = "/v1/completions", "/v1/responses", "/v1/responses/input_tokens"
BATCH, SCORING = "/v1/chat/completions/batch", "/generative_scoring"
EMBEDDING, COHERE_1, COHERE = "/v1/embeddings", "/v1/embed", "/v2/embed"
LONG = "The capital of Peru is Lima. " * 700
SERVED: dict[str, dict[str, object]] = {
    COMPLETION: {"prompt": "x"},
    CHAT: {"messages": QUESTION},
    BATCH: {"messages": [QUESTION]},
    RESPONSE: {"input": "x"},
    COUNT: {"input": "x"},
    EMBEDDING: {"input": "x"},
    SCORING: {"query": "x ", "items": ["y"], "label_token_ids": [5, 6]},
    COHERE_1: {"texts": ["x"]},
    COHERE: {"texts": ["x"]},
}
STREAMING = (COMPLETION, CHAT, RESPONSE)
BAD_SCHEMA = {"type": "texts"}
NO_SCHEMA = {"type": "json_schema", "name": "s"}
SCHEMA_FORM = {"type": "json_schema", "json_schema": {"name": "s", "schema": BAD_SCHEMA}}
F, G = ({"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in "fg")
ALLOWED = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [{"function": {"name": "mul"}}]}}
VIDEO = {"type": "video_url", "video_url": {"url": "http://x/y"}}
IMAGE = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{'A' * (1 << 20)}"}}  # of any size
Fields = dict[str, object]  # None: without the field
FAULTS: dict[tuple[str, ...], list[Fields | tuple[Fields, str, str]]] = {  # fields; param and words, if not of the only
    (COMPLETION,): [
        {"temperature": -1},
        {"max_tokens": "many"},
        ({"max_tokens": -1}, "max_tokens", "max_tokens must be"),
        {"prompt": "", "add_special_tokens": False},
        {"prompt": [5000]},
        {"guided_regex": "(["},
        {"structured_outputs": {"json": {"type": "x"}}},
        {"n": 1000},
        {"model": "gpt-7"},
        ({"logprobs": 25}, "logprobs", "logprobs is 25"),
        ({"logit_bias": {"9000": 1, "5": 1, "9001": 1}}, "logit_bias", "9000, 9001"),
        ({"logit_bias": {"a": 1, "5": 1, "b": 1}}, "logit_bias", "'a', 'b'"),
        ({"response_format": SCHEMA_FORM}, "response_format", "json_schema.schema: Invalid type"),
    ],
    (CHAT,): [
        {"max_completion_tokens": 0},
        ({"max_tokens": 0}, "max_tokens", "max_tokens must be"),
        ({"messages": [{"role": "user", "content": [{}]}]}, "messages[0].content[0].type", ""),
        ({"logprobs": True, "top_logprobs": 25}, "top_logprobs", "top_logprobs is 25"),
        ({"logprobs": True, "top_logprobs": -2}, "top_logprobs", "top_logprobs must be"),
        ({"tool_choice": "required"}, "tool_choice", "tool_choice forces a call"),
        ({"response_format": SCHEMA_FORM}, "response_format", "json_schema.schema: Invalid type"),
        ({"functions": [{"name": "f"}], "tools": [G]}, "functions", "functions is the older form of tools"),
        (
            {"functions": [{"name": "f"}], "function_call": {"name": "g"}},
            "function_call",
            "function_call names 'g', functions has f",
        ),
        ({"functions": [{"name": ""}]}, "functions", "functions[0].name is empty"),
        (
            {"tools": [tool("go", LARK), ADD], "tool_choice": "required"},
            "tools",
            "'go' has a lark grammar, which a list cannot hold",
        ),
        (
            {
                "tools": [{"type": "custom", "custom": {"name": "go", "format": {"type": "grammar"}}}],
                "tool_choice": "required",
            },
            "tools",
            "'go' needs",
        ),
        ({"tools": [{"type": "custom"}]}, "tools", "tools: type custom must have custom.name"),
        ({"tools": [tool("go", None)], "tool_choice": chosen("come")}, "tool_choice", "'come'"),
        (
            {"tools": [tool("go", LARK | {"definition": "start: nothing"})], "tool_choice": chosen("go")},
            "tools",
            "tools: ",
        ),
        ({"chat_template": "x"}, "chat_template", "--trust-request-chat-template"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "use the fields"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message", "begins a turn"),
        ({"tools": [F], "tool_choice": ALLOWED}, "tool_choice", "tool_choice allows mul; tools has f"),
        (
            {"messages": [{"role": "user", "content": [VIDEO]}]},
            "messages",
            "[0].content[0] is a part of type 'video_url'",
        ),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages", "[0].content[0]: the model "),
    ],
    (BATCH,): [
        {"stream": True},
        {"tools": [F]},
        {"messages": [[]]},
        {"messages": [QUESTION] * 2049},
        {"messages": [QUESTION, [{"role": "user", "content": "hi " * 3000}]]},
    ],
    (RESPONSE,): [
        {"model": "other"},
        ({"top_logprobs": 25}, "top_logprobs", "top_logprobs is 25"),
        ({"response_format": SCHEMA_FORM}, "response_format", "json_schema.schema: Invalid type"),
        ({"text": {"format": NO_SCHEMA | {"schema": BAD_SCHEMA}}}, "text", "text.format.schema: Invalid type"),
        ({"text": {"format": NO_SCHEMA}}, "text", "text.format.schema is missing"),
        ({"input": [{"type": "reasoning", "summary": []}]}, "input", "input is empty"),
    ],
    (RESPONSE, COUNT): [
        {"temperature": -1},
        {"top_p": 0},
        {"max_output_tokens": 0},
        {"tool_choice": {"type": "function", "name": "f"}},
    ],
    (EMBEDDING,): [
        {"input": None},
        ({"messages": [{"role": "user", "content": "x"}]}, "input", ""),
        ({"input": None, "messages": []}, "messages", ""),
        ({"input": ["x"] * 513, "encoding_format": "bytes"}, "encoding_format", ""),
        {"embed_dtype": "float8"},
        {"endianness": "middle"},
        {"input": []},
        {"input": [1, "x"]},
        {"input": ["x"] * 2049},
        ({"input": [999999]}, "input", "out of vocabulary"),
        {"dimensions": 257},
        {"encoding_format": "int8"},
        {"pooling": "median"},
        {"model": "other"},
        ({"timeout_s": 1e-9}, "input", ""),
    ],
    (SCORING,): [
        {"query": None},
        ({"query": [[1]]}, "query[0]", ""),
        {"query": LONG * 30},
        {"items": None},
        {"items": ["x", LONG]},
        {"items": [[5] * 2000] * (MAX_WAITING_TOKENS // 4 // 2000 + 1)},
        ({"query": [5] * 2000, "items": ["x"] * 30}, "items", ""),
        {"items": [[999_999]]},
        {"items": ["x"], "timeout_s": 1e-9},
        {"label_token_ids": None},
        {"label_token_ids": [9_999_999_999]},
        {"label_token_ids": [5] * 5000},
        ({"label_token_ids": ["x"]}, "label_token_ids[0]", ""),
        {"model": "other"},
    ],
    (COHERE, COHERE_1): [
        {"texts": None},
        {"texts": [LONG], "truncate": "NONE"},
        {"texts": ["one two three"], "truncate": "NONE", "max_tokens": 2},
        {"images": ["data:"]},
        ({"input_type": "nonexistent_type"}, "input_type", "Unsupported input_type"),
        ({"embedding_types": ["int4"]}, "embedding_types[0]", ""),
        {"embedding_types": ["binary"], "output_dimension": 12},
        {"output_dimension": 257},
        {"truncate": "MIDDLE"},
    ],
}
CASES = [
    (paths, *(fault if isinstance(fault, tuple) else (fault, next(iter(fault)), "")))
    for paths, faults in FAULTS.items()
    for fault in faults
]


@pytest.mark.parametrize(
    ("paths", "fields", "param", "words"), CASES, ids=[f"{paths[-1]} {list(fields)}" for paths, fields, *_ in CASES]
)
def test_a_bad_body_is_answered_in_openais_form(
    http: httpx2.Client, paths: tuple[str, ...], fields: Fields, param: str, words: str
) -> None:
    for each, stream in product(paths, (False, True)):
        if stream and each not in STREAMING:
            continue
        body = SERVED[each] | ({"stream": True} if stream else {}) | fields
        answer = http.post(each, json={name: value for name, value in body.items() if value is not None})
        error = answer.json()["error"]
        assert answer.status_code == (404 if param == "model" else 400), error
        assert set(error) == {"message", "type", "param", "code"} and error["type"] == "invalid_request_error"
        assert error["param"] == param and words in error["message"], error


@pytest.mark.parametrize("content", [b"[]", b'{"prompt": "x"'])
def test_an_error_without_a_field_has_no_param(http: httpx2.Client, content: bytes) -> None:
    assert http.post("/v1/completions", content=content).json()["error"]["param"] is None


def test_tools_are_shown_to_a_model_whose_template_has_no_place_for_them(http: httpx2.Client) -> None:
    tools = [{"type": "function", "function": {"name": "add"}}]
    body = {"messages": QUESTION, "tools": tools, "max_tokens": 1}
    counts = [
        ask(http, "/v1/chat/completions", body, **more)["usage"]["prompt_tokens"]
        for more in ({}, {"tool_choice": "none"})
    ]
    assert counts[0] > counts[1] + 50


@pytest.mark.parametrize(
    ("path", "field", "prompt"),
    [
        ("completions", "prompt", [5] * 3000),
        ("chat/completions", "messages", [{"role": "user", "content": "hi " * 30_000}]),
        ("responses", "input", "hi " * 3000),
        ("embeddings", "messages", [{"role": "user", "content": "hi " * 3000}]),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_too_long_prompt_gets_the_messages_that_clients_match(
    http: httpx2.Client, path: str, field: str, prompt: object, stream: bool
) -> None:
    answer = http.post(f"/v1/{path}", json={field: prompt, "stream": stream})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", field)
    assert "maximum context length is 2048 tokens" in error["message"]
    assert "prompt is too long" in error["message"]  # the phrase that LangChain matches


@pytest.mark.parametrize(
    "media_type", ["text/plain; charset=utf-8", "text/json", None, "Application/JSON", "application/a+json"]
)
def test_a_body_of_another_type_or_compressed_is_refused_with_advice(
    http: httpx2.Client, media_type: str | None
) -> None:
    headers = {} if media_type is None else {"content-type": media_type}
    answer = http.post("/tokenize", content=b'{"prompt": "x"}', headers=headers)
    assert answer.status_code == (415 if media_type and media_type.startswith("text") else 200)
    assert answer.status_code == 200 or "content-type application/json" in answer.json()["error"]["message"]
    answer = http.post("/tokenize", content=b"x", headers=headers | {"content-encoding": "gzip"})
    assert answer.status_code == 415 and "content-encoding gzip" in answer.json()["error"]["message"]
