"""Invalid bodies get an error in OpenAI's form that names the wrong field."""

from __future__ import annotations

import gzip

import httpx2
import pytest

from tokenloom.tests.system.http_engine import QUESTION

BAD_SCHEMA = {"type": "texts"}
NO_SCHEMA = {"type": "json_schema", "name": "s"}
SCHEMA_FORM = {"type": "json_schema", "json_schema": {"name": "s", "schema": BAD_SCHEMA}}
BAD_BODIES: list[tuple[str, dict[str, object], int, str | None]] = [
    ("out of range", {"prompt": "x", "temperature": -1}, 400, "temperature"),
    ("wrong type", {"prompt": "x", "max_tokens": "many"}, 400, "max_tokens"),
    ("no prompt", {"max_tokens": 1}, 400, "prompt"),
    ("empty prompt", {"prompt": "", "add_special_tokens": False}, 400, "prompt"),
    ("unknown token", {"prompt": [5000]}, 400, "prompt"),
    ("negative token", {"prompt": [-1]}, 400, "prompt"),
    ("mixed prompts", {"prompt": [1, "two"]}, 400, "prompt"),
    ("not served", {"prompt": "x", "suffix": "y"}, 400, "suffix"),
    ("best_of", {"prompt": "x", "best_of": 3}, 400, "best_of"),
    ("bad regex", {"prompt": "x", "guided_regex": "(["}, 400, "guided_regex"),
    ("bad schema", {"prompt": "x", "structured_outputs": {"json": {"type": "x"}}}, 400, "structured_outputs"),
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


@pytest.mark.parametrize(
    ("path", "content", "param"),
    [
        (
            "chat/completions",
            b'{"messages": [{"role": "user", "content": "x"}], "max_completion_tokens": 0}',
            "max_completion_tokens",
        ),
        ("responses", b'{"input": "x", "max_output_tokens": 0}', "max_output_tokens"),
        ("responses/input_tokens", b'{"input": "x", "text": {"format": {"type": "json_schema"}}}', "text"),
        ("chat/completions", b'{"messages": [{"role": "user", "content": [{}]}]}', "messages[0].content[0].type"),
        ("completions", b"[]", None),
        ("completions", b'{"prompt": "x"', None),
    ],
)
def test_an_error_names_the_callers_field(http: httpx2.Client, path: str, content: bytes, param: str | None) -> None:
    error = http.post(f"/v1/{path}", content=content).json()["error"]
    assert error["param"] == param, error


def test_a_compressed_body_is_refused_with_advice(http: httpx2.Client) -> None:
    answer = http.post(
        "/v1/completions", content=gzip.compress(b'{"prompt": "x"}'), headers={"content-encoding": "gzip"}
    )
    assert answer.status_code == 415 and "content-encoding gzip" in answer.json()["error"]["message"]


@pytest.mark.parametrize("media_type", ["application/x-www-form-urlencoded", "text/plain; charset=utf-8", "text/json"])
@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize"])
def test_a_body_with_another_content_type_is_refused(http: httpx2.Client, path: str, media_type: str) -> None:
    answer = http.post(path, content=b'{"prompt": "x"}', headers={"content-type": media_type})
    assert answer.status_code == 415 and "content-type application/json" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "media_type", [None, "application/json; charset=utf-8", "Application/JSON", "application/a+json"]
)
def test_json_is_accepted_with_or_without_its_content_type(http: httpx2.Client, media_type: str | None) -> None:
    headers = {} if media_type is None else {"content-type": media_type}
    answer = http.post("/tokenize", content=b'{"prompt": "x"}', headers=headers)
    assert answer.status_code == 200 and answer.json()["token_strs"] is None


def test_tools_need_a_template_that_shows_them_unless_tool_choice_is_none(http: httpx2.Client) -> None:
    tools = [{"type": "function", "function": {"name": "add"}}]
    answer = http.post("/v1/chat/completions", json={"messages": QUESTION, "tools": tools})
    assert answer.status_code == 400 and "no place for them" in answer.json()["error"]["message"]
    body = {"messages": QUESTION, "tools": tools, "tool_choice": "none", "max_tokens": 1}
    assert http.post("/v1/chat/completions", json=body).status_code == 200


@pytest.mark.parametrize(
    ("path", "field", "prompt"),
    [
        ("completions", "prompt", [5] * 3000),
        ("completions", "prompt", "hi " * 20_000),
        ("chat/completions", "messages", [{"role": "user", "content": "hi " * 3000}]),
        ("chat/completions", "messages", [{"role": "user", "content": "hi " * 30_000}]),
        ("responses", "input", "hi " * 3000),
        ("embeddings", "input", [5] * 2049),
        ("embeddings", "messages", [{"role": "user", "content": "hi " * 3000}]),
        ("embeddings", "messages", [{"role": "user", "content": "hi " * 30_000}]),
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
    ("path", "more", "param", "words"),
    [
        ("chat/completions", {"logprobs": True, "top_logprobs": 25}, "top_logprobs", "top_logprobs is 25"),
        ("chat/completions", {"logprobs": True, "top_logprobs": -2}, "top_logprobs", "top_logprobs must be"),
        ("responses", {"top_logprobs": 25}, "top_logprobs", "top_logprobs is 25"),
        ("completions", {"logprobs": 25}, "logprobs", "logprobs is 25"),
        ("completions", {"logit_bias": {"9000": 1, "5": 1, "9001": 1}}, "logit_bias", "9000, 9001"),
        ("completions", {"logit_bias": {"a": 1, "5": 1, "b": 1}}, "logit_bias", "'a', 'b'"),
        ("chat/completions", {"max_tokens": 0}, "max_tokens", "max_tokens must be"),
        ("completions", {"max_tokens": -1}, "max_tokens", "max_tokens must be"),
        ("chat/completions", {"tool_choice": "required"}, "tool_choice", "tool_choice forces a call"),
        ("chat/completions", {"response_format": SCHEMA_FORM}, "response_format", "json_schema.schema: Invalid type"),
        ("completions", {"response_format": SCHEMA_FORM}, "response_format", "json_schema.schema: Invalid type"),
        ("responses", {"response_format": SCHEMA_FORM}, "response_format", "json_schema.schema: Invalid type"),
        (
            "responses",
            {"text": {"format": NO_SCHEMA | {"schema": BAD_SCHEMA}}},
            "text",
            "text.format.schema: Invalid type",
        ),
        ("responses", {"text": {"format": NO_SCHEMA}}, "text", "text.format.schema is missing"),
        ("responses", {"input": [{"type": "reasoning", "summary": []}]}, "input", "input is empty"),
    ],
)
def test_an_error_lists_every_fault_with_the_callers_field_names(
    http: httpx2.Client, path: str, more: dict[str, object], param: str, words: str
) -> None:
    field = {"chat/completions": "messages", "responses": "input", "completions": "prompt"}[path]
    for stream in (False, True):
        body = {field: QUESTION if field != "prompt" else "x", "stream": stream}
        answer = http.post(f"/v1/{path}", json=body | more)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, param) and words in error["message"], error
