"""OpenAI's API, called with its official client."""

from __future__ import annotations

import json
from typing import Any

import httpx2
import openai
import pytest

from tokenloom.tests.system.http_engine import QUESTION, ask

FRANCE = "The capital of France is"
ANSWER = {"model": "tokenloom-demo", "temperature": 0}


def complete(client: openai.OpenAI, prompt: object = FRANCE, **fields: object) -> Any:
    return client.completions.create(**ANSWER | {"prompt": prompt} | fields)  # type: ignore[call-overload]


def chat(client: openai.OpenAI, **fields: object) -> Any:
    return client.chat.completions.create(**ANSWER | {"messages": QUESTION} | fields)  # type: ignore[call-overload]


def respond(client: openai.OpenAI, items: object = QUESTION[0]["content"], **fields: object) -> Any:
    return client.responses.create(**ANSWER | {"input": items} | fields)  # type: ignore[call-overload]


def takes_one_of(*values: int) -> dict[str, object]:
    """Return the schema of an object whose `a` is one of the values."""
    properties = {"a": {"enum": values}}
    return {"type": "object", "properties": properties, "required": ["a"], "additionalProperties": False}


def test_the_openai_client_lists_the_model(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert client.models.retrieve(model.id).id == model.id == "tokenloom-demo"


def test_a_completion_is_right_and_counts_its_tokens(client: openai.OpenAI) -> None:
    answer = complete(client)
    assert answer.choices[0].text == " Paris."
    assert answer.choices[0].finish_reason == "stop"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (7, 3, 10)
    assert answer.usage.prompt_tokens_details.cached_tokens == 0


def test_streamed_text_equals_the_unstreamed_text(client: openai.OpenAI) -> None:
    whole = chat(client)
    chunks = list(chat(client, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert "Lima" in text
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    ours = ("prompt_tokens_details", "completion_tokens_details")  # of the cache, and of guesses that were right
    assert chunks[-1].usage == whole.usage.model_copy(update={name: getattr(chunks[-1].usage, name) for name in ours})
    assert chunks[-2].choices[0].finish_reason == "stop"


def test_a_list_of_prompts_with_n_answers_each_keeps_the_order(client: openai.OpenAI) -> None:
    prompts = [FRANCE, "The capital of Peru is"]
    answer = complete(client, prompts, n=2, echo=True)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in answer.choices] == [f"{prompts[0]} Paris."] * 2 + [f"{prompts[1]} Lima."] * 2


def test_logprobs_of_chats_and_completions_agree(client: openai.OpenAI) -> None:
    columns = complete(client, logprobs=2).choices[0].logprobs
    assert columns.tokens == [" Paris", ".", "<|eos|>"]
    for token, logprob, top in zip(columns.tokens, columns.token_logprobs, columns.top_logprobs, strict=True):
        assert top[token] == logprob == max(top.values())
    content = chat(client, logprobs=True, top_logprobs=3).choices[0].logprobs.content
    assert {len(token.top_logprobs) for token in content} == {3}
    assert all(token.top_logprobs[0].logprob == pytest.approx(token.logprob) for token in content)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("stop", [None, "\N{BUTTERFLY}"])
def test_offsets_are_places_in_the_text_although_characters_have_several_tokens(
    client: openai.OpenAI, stream: bool, stop: str | None
) -> None:
    answer, prompt = "a 漢字 😀b👩‍👩‍👧 c\N{BUTTERFLY}d", "Olá 漢 "
    more = {"stop": stop, "stream": stream, "extra_body": {"structured_outputs": {"choice": [answer]}}}
    made = complete(client, prompt, n=2, echo=True, logprobs=0, max_tokens=60, **more)
    choices = [choice for chunk in (made if stream else [made]) for choice in chunk.choices]
    for index in range(2):
        mine = [choice for choice in choices if choice.index == index]
        text, shown = "".join(choice.text for choice in mine), ""
        assert text == prompt + (answer if stop is None else answer.partition(stop)[0])
        tokens = [token for choice in mine for token in choice.logprobs.tokens]
        offsets = [offset for choice in mine for offset in choice.logprobs.text_offset]
        assert offsets == sorted(offsets) and offsets[-1] == len(text) - (stop is None)
        for place, token in enumerate(tokens):
            if "\ufffd" not in token and not token.startswith("<|") and offsets[place] < len(text):
                assert text.startswith(token, offsets[place]), (place, token)
        parts = [offset for token, offset in zip(tokens, offsets, strict=True) if token == "\ufffd"]
        assert all(offset == len(text) or ord(text[offset]) > 127 for offset in parts) and len(set(parts)) < len(parts)
        for choice in mine:
            shown += choice.text
            assert max(choice.logprobs.text_offset, default=0) <= len(shown), "no token precedes its text"


def test_bytes_of_tokens_join_to_the_text_of_characters_in_several_tokens(
    client: openai.OpenAI, http: httpx2.Client
) -> None:
    text = "Olá 漢 😀"
    (choice,) = chat(client, logprobs=True, extra_body={"structured_outputs": {"choice": [text]}}).choices
    assert bytes(byte for token in choice.logprobs.content for byte in token.bytes).decode() == text
    body = {"input": "Hi", "structured_outputs": {"choice": [text]}, "include": ["message.output_text.logprobs"]}
    (item,) = http.post("/v1/responses", json=body).json()["output"]
    (part,) = item["content"]
    assert bytes(byte for token in part["logprobs"] for byte in token["bytes"]).decode() == text


def test_a_stop_string_ends_the_answer_and_is_named(client: openai.OpenAI) -> None:
    (choice,) = complete(client, stop=["ri"]).choices
    assert choice.text == " Pa"
    assert choice.finish_reason == "stop"
    assert choice.model_extra["stop_reason"] == "ri"


def test_response_format_yields_json_of_the_schema(client: openai.OpenAI) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "number", "schema": takes_one_of(*range(1, 10))}}
    value = json.loads(chat(client, max_tokens=40, response_format=form).choices[0].message.content)
    assert set(value) == {"a"} and 1 <= value["a"] <= 9
    text = {"format": {"type": "json_schema", "name": "number", "schema": takes_one_of(7)}}
    assert json.loads(respond(client, text=text).output_text) == {"a": 7}


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "add"}}])
@pytest.mark.parametrize("stream", [False, True])
def test_a_forced_tool_call_has_arguments_of_its_schema(client: openai.OpenAI, choice: object, stream: bool) -> None:
    tools = [{"type": "function", "function": {"name": "add", "parameters": takes_one_of(1, 2)}}]
    more = {"response_format": {"type": "json_object"}, "parallel_tool_calls": False}  # the call goes before the format
    answer = chat(client, tools=tools, tool_choice=choice, max_tokens=80, stream=stream, **more)
    choices = [chunk.choices[0] for chunk in (answer if stream else [answer])]
    calls = [call for each in choices for call in (each.delta if stream else each.message).tool_calls or []]
    assert [call.function.name for call in calls if call.function.name] == ["add"]
    assert json.loads("".join(call.function.arguments for call in calls))["a"] in (1, 2)
    assert choices[-1].finish_reason == ("tool_calls" if choice == "required" else "stop")


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_consists_of_items(client: openai.OpenAI, stream: bool) -> None:
    response = respond(client, stream=stream)
    if stream:
        events = list(response)
        assert [event.sequence_number for event in events] == list(range(len(events)))
        assert [events[0].type, events[-1].type] == ["response.created", "response.completed"]
        text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
        response = events[-1].response
        assert text == response.output_text
    assert response.output_text == "The capital of Peru is Lima."
    assert response.status == "completed"
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens == 22


def test_a_response_continues_items_and_calls_functions(client: openai.OpenAI) -> None:
    tools = [{"type": "function", "name": "add", "parameters": takes_one_of(1)}]
    history = [
        {"role": "user", "content": [{"type": "input_text", "text": "What is the capital of Peru?"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Lima."}]},
        {"role": "user", "content": "Hi"},
    ]
    (call,) = respond(client, history, tools=tools, tool_choice={"type": "function", "name": "add"}).output
    assert call.type == "function_call" and call.name == "add" and json.loads(call.arguments) == {"a": 1}


@pytest.mark.parametrize("choice", ["required", "any", {"function": {"name": "f"}}])
def test_a_token_limit_cuts_a_forced_call_and_makes_it_content(http: httpx2.Client, choice: object) -> None:
    words = {"type": "object", "properties": {"w": {"type": "string", "minLength": 300}}, "required": ["w"]}
    tools = [{"type": "function", "function": {"name": "f", "parameters": words}}]
    body = {"messages": QUESTION, "tools": tools, "tool_choice": choice, "max_tokens": 60, "temperature": 0}
    (cut,) = ask(http, "/v1/chat/completions", body)["choices"]
    assert "tool_calls" not in cut["message"] and cut["finish_reason"] == "length"
    assert '{"w"' in cut["message"]["content"]
