"""Bodies of Ollama's API as the chats, completions and embeddings that answer them."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tokenloom.frontend.forms.ollama.request_body import (
    OllamaChatRequest,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
)
from tokenloom.frontend.forms.openai.generation import ResponseFormat
from tokenloom.ipc.errors import RequestError


def chat(**fields: Any) -> OllamaChatRequest:
    return msgspec.convert({"model": "m", "messages": [{"role": "user", "content": "x"}]} | fields, OllamaChatRequest)


def generate(**fields: Any) -> OllamaGenerateRequest:
    return msgspec.convert({"model": "m", "prompt": "x"} | fields, OllamaGenerateRequest)


def test_options_are_the_fields_of_a_chat_and_settings_of_a_runner_have_no_effect() -> None:
    options = {"num_predict": 5, "repeat_penalty": 1.1, "temperature": 0.5, "top_k": 3, "stop": ["a"], "num_ctx": 4096}
    found = chat(options=options).chat
    assert (found.max_tokens, found.repetition_penalty, found.temperature, found.top_k) == (5, 1.1, 0.5, 3)
    assert found.stop == ["a"]


@pytest.mark.parametrize("num_predict", [-1, -2, 0, None])
def test_an_answer_without_a_limit_is_as_long_as_fits(num_predict: int | None) -> None:
    assert chat(options={"num_predict": num_predict}).chat.max_tokens is None


@pytest.mark.parametrize(
    "given, expected",
    [
        (None, None),
        ("", None),
        ("json", ResponseFormat(type="json_object")),
        ({"type": "object"}, ResponseFormat(type="json_schema", json_schema={"schema": {"type": "object"}})),
    ],
)
def test_a_format_is_json_or_a_schema(given: object, expected: ResponseFormat | None) -> None:
    assert chat(format=given).chat.response_format == expected == generate(format=given).chat.response_format


@pytest.mark.parametrize(
    "think, expected",
    [
        (None, {}),
        (True, {"enable_thinking": True, "thinking": True}),
        (False, {"enable_thinking": False, "thinking": False}),
        ("low", {"enable_thinking": True, "thinking": True, "reasoning_effort": "low"}),
    ],
)
def test_thinking_is_switched_in_the_template(think: object, expected: dict[str, object]) -> None:
    assert chat(think=think).chat.chat_template_kwargs == expected


def test_images_calls_and_results_keep_their_places() -> None:
    call = {"function": {"name": "f", "arguments": {"a": 1}}}
    turns = [
        {"role": "user", "content": "x", "images": ["QUJD", "data:image/png;base64,QUJD"]},
        {"role": "assistant", "content": "", "thinking": "hm", "tool_calls": [call]},
        {"role": "tool", "content": "1", "tool_name": "f"},
    ]
    user, assistant, tool = chat(messages=turns).chat.messages
    assert isinstance(user.content, list)
    assert [each.image_url or each.text for each in user.content] == [
        "data:image/*;base64,QUJD",
        "data:image/png;base64,QUJD",
        "x",
    ]
    assert assistant.reasoning == "hm" and assistant.tool_calls is not None
    assert (assistant.tool_calls[0].function.name, assistant.tool_calls[0].function.arguments) == ("f", {"a": 1})
    assert (tool.role, tool.content, tool.name) == ("tool", "1", "f")


def test_a_prompt_is_a_turn_after_the_system_message_or_raw_text() -> None:
    body = generate(system="s", images=["QUJD"])
    assert [each.role for each in body.chat.messages] == ["system", "user"]
    assert generate(raw=True, options={"num_predict": 3}).completion.max_tokens == 3


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"suffix": "y"}, "suffix is not served"),
        ({"template": "{{ .Prompt }}"}, "template is in Go's form"),
        ({"context": [1]}, "context is not served"),
        ({"raw": True, "images": ["QUJD"]}, "leave raw out"),
    ],
)
def test_what_would_change_the_answer_and_is_not_served_is_refused(fields: dict[str, object], message: str) -> None:
    body = generate(**fields)
    with pytest.raises(RequestError, match=message):
        _ = body.completion if body.raw else body.chat


def test_an_answer_is_streamed_unless_that_is_refused() -> None:
    assert [chat(stream=each).is_streamed for each in (None, True, False)] == [True, True, False]


@pytest.mark.parametrize("truncate, cut", [(None, -1), (True, -1), (False, None)])
def test_texts_to_embed_are_cut_unless_that_is_refused(truncate: bool | None, cut: int | None) -> None:
    body = msgspec.convert({"input": ["a", "b"], "truncate": truncate}, OllamaEmbedRequest)
    assert body.embedding.input == ["a", "b"] and body.embedding.truncate_prompt_tokens == cut
    assert msgspec.convert({"input": "a"}, OllamaEmbedRequest).texts == ["a"]
    assert msgspec.convert({}, OllamaEmbedRequest).texts == []
