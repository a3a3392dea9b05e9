"""Ollama's API of an engine: the answers of the other endpoints, in the forms that Ollama's clients read."""

from __future__ import annotations

import json
from typing import Any

import httpx2
import pytest

from tokenloom.tests.system.http_engine import QUESTION, ask

CHAT, GENERATE = "/api/chat", "/api/generate"
GREEDY = {"temperature": 0, "num_predict": 12}
BODY: dict[str, Any] = {"model": "tokenloom-demo", "messages": QUESTION, "options": GREEDY}


def lines(answer: httpx2.Response) -> list[dict[str, Any]]:
    assert answer.status_code == 200 and answer.headers["content-type"] == "application/x-ndjson", answer.text
    return [json.loads(line) for line in answer.text.splitlines()]


def text_of(http: httpx2.Client) -> str:
    """Return the answer to the question by OpenAI's API."""
    body = ask(http, "/v1/chat/completions", messages=QUESTION, temperature=0, max_tokens=12)
    text: str = body["choices"][0]["message"]["content"]
    return text


def test_a_chat_is_streamed_by_default_and_ends_with_counts(http: httpx2.Client) -> None:
    *parts, last = lines(http.post(CHAT, json=BODY))
    assert "".join(each["message"]["content"] for each in parts) == text_of(http)
    assert not any(each["done"] for each in parts) and last["done"] and last["done_reason"] == "stop"
    assert last["eval_count"] > 0 and last["prompt_eval_count"] > 0 and last["total_duration"] > 0


def test_whole_answers_are_equal_to_streams_in_every_form(http: httpx2.Client) -> None:
    text = text_of(http)
    chat = ask(http, CHAT, BODY, stream=False)
    assert chat["message"] == {"role": "assistant", "content": text} and chat["done"]
    prompt = QUESTION[0]["content"]
    turn = {"model": "tokenloom-demo", "prompt": prompt, "options": GREEDY}
    assert ask(http, GENERATE, turn, stream=False)["response"] == text
    assert "".join(each["response"] for each in lines(http.post(GENERATE, json=turn))) == text


def test_a_raw_prompt_is_continued_without_a_template(http: httpx2.Client) -> None:
    body = {"prompt": "The capital of France is", "raw": True, "options": GREEDY | {"num_predict": 2}}
    expected = ask(http, "/v1/completions", prompt=body["prompt"], temperature=0, max_tokens=2)["choices"][0]["text"]
    found = ask(http, GENERATE, body, stream=False)
    assert found["response"] == expected and found["done_reason"] == "length"


def test_a_schema_is_met(http: httpx2.Client) -> None:
    schema = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"], "additionalProperties": False}
    found = ask(http, CHAT, BODY | {"options": {"num_predict": 100}}, stream=False, format=schema)
    assert json.loads(found["message"]["content"]) == {"a": 1}


def test_texts_are_embedded_one_or_many(http: httpx2.Client) -> None:
    expected = [each["embedding"] for each in ask(http, "/v1/embeddings", input=["Lima", "Oslo"])["data"]]
    both = ask(http, "/api/embed", model="tokenloom-demo", input=["Lima", "Oslo"])
    for found, wanted in zip(both["embeddings"], expected, strict=True):
        assert found == pytest.approx(wanted, abs=1e-3)
    assert ask(http, "/api/embed", input="Lima")["embeddings"][0] == pytest.approx(expected[0], abs=1e-3)
    assert ask(http, "/api/embeddings", prompt="Oslo")["embedding"] == pytest.approx(expected[1], abs=1e-3)
    assert ask(http, "/api/embed", input=[])["embeddings"] == []
    long = "Lima " * 5000
    assert len(ask(http, "/api/embed", input=long)["embeddings"]) == 1, "a long text is cut"
    assert "error" in http.post("/api/embed", json={"input": long, "truncate": False}).json()


def test_a_large_body_is_read_in_another_process_with_the_same_answer(http: httpx2.Client) -> None:
    pad = " " * 200_000
    chat = ask(http, CHAT, BODY, stream=False, options=GREEDY | {"stop": ["unheard"]}, keep_alive=pad)
    assert chat["message"]["content"] == text_of(http)
    raw = {"prompt": "The capital of France is", "raw": True, "options": GREEDY, "keep_alive": pad}
    assert ask(http, GENERATE, raw, stream=False)["response"].startswith(" Paris")
    assert len(ask(http, "/api/embed", input=["Lima"], keep_alive=pad)["embeddings"]) == 1


def test_the_model_is_listed_shown_and_found_with_the_tag_that_clients_add(http: httpx2.Client) -> None:
    (model,) = ask_get(http, "/api/tags")["models"]
    assert model["name"] == model["model"] == "tokenloom-demo" and len(model["digest"]) == 64 and model["size"] > 0
    assert ask_get(http, "/api/ps")["models"][0]["context_length"] > 0
    assert ask_get(http, "/api/version")["version"].count(".") == 2
    shown = ask(http, "/api/show", model="tokenloom-demo:latest")
    assert shown["capabilities"][0] == "completion" and shown["details"]["format"] == "safetensors"
    length = ask_get(http, "/api/ps")["models"][0]["context_length"]
    assert f"num_ctx {length}" in shown["parameters"].splitlines(), "Continue reads its context there"
    assert ask(http, CHAT, BODY | {"model": "tokenloom-demo:latest"}, stream=False)["done"]


def ask_get(http: httpx2.Client, path: str) -> Any:
    answer = http.get(path)
    assert answer.status_code == 200
    return answer.json()


def test_an_empty_request_finds_the_model_loaded(http: httpx2.Client) -> None:
    for path, shown in ((CHAT, "message"), (GENERATE, "response")):
        found = ask(http, path, model="tokenloom-demo", keep_alive="5m")
        assert found["done_reason"] == "load" and shown in found
    assert ask(http, "/api/pull", model="tokenloom-demo")["status"] == "success"


@pytest.mark.parametrize(
    "path, body, status, message",
    [
        (CHAT, BODY | {"model": "llama3"}, 404, "'llama3' is not served"),
        (CHAT, BODY | {"options": {"temperature": -1}}, 400, "temperature must be in"),
        (CHAT, BODY | {"options": {"repeat_penalty": -1}}, 400, "options.repeat_penalty"),
        (CHAT, BODY | {"format": {"type": "nonsense"}}, 400, "format"),
        (CHAT, {"messages": [{"role": "user", "content": "x", "images": ["QUJD"]}]}, 400, "does not see images"),
        (CHAT, {"messages": "x"}, 400, "messages"),
        (GENERATE, {"prompt": "x", "suffix": "y"}, 400, "suffix is not served"),
        ("/api/pull", {"model": "llama3"}, 404, "'llama3' is not served"),
        ("/api/create", {"model": "x"}, 501, "one engine serves one model"),
    ],
)
def test_every_error_has_ollamas_form(
    http: httpx2.Client, path: str, body: dict[str, Any], status: int, message: str
) -> None:
    answer = http.post(path, json=body)
    assert answer.status_code == status and answer.json().keys() == {"error"}, answer.text
    assert message in answer.json()["error"]


def test_bodies_of_any_content_type_are_read_and_strangers_are_refused(
    http: httpx2.Client, stranger: httpx2.Client
) -> None:
    form = {"content-type": "application/x-www-form-urlencoded"}  # of curl -d
    assert http.post(CHAT, content=json.dumps(BODY), headers=form).status_code == 200
    assert stranger.post(CHAT, json=BODY).status_code == 401
    assert stranger.post(CHAT, json=BODY).json().keys() == {"error"}
    assert http.request("DELETE", "/api/delete", json={"model": "x"}).status_code == 501
    assert "temprature" in http.post(CHAT, json=BODY | {"options": GREEDY | {"temprature": 1}}).headers["warning"]
