"""OpenAI's API, called with its official client."""

from __future__ import annotations

import json
from typing import Any

import httpx2
import openai
import pytest

from tokenloom.tests.system.http_engine import QUESTION

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
    assert content and all(len(token.top_logprobs) == 3 for token in content)
    assert all(token.top_logprobs[0].logprob == pytest.approx(token.logprob) for token in content)
    assert bytes(content[0].bytes or []).decode() == content[0].token


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
def test_an_echoed_prompt_has_logprobs_too(client: openai.OpenAI, n: int, stream: bool) -> None:
    answer = complete(client, echo=True, logprobs=1, max_tokens=1, n=n, stream=stream)
    choices = [choice for chunk in (answer if stream else [answer]) for choice in chunk.choices]
    assert {choice.index for choice in choices} == set(range(n))
    for index in range(n):
        logprobs = [choice.logprobs for choice in choices if choice.index == index]
        tokens = [token for each in logprobs for token in each.tokens]
        values = [value for each in logprobs for value in each.token_logprobs]
        offsets = [offset for each in logprobs for offset in each.text_offset]
        assert tokens == ["<|bos|>", "The", " capital", " of", " F", "rance", " is", " Paris"]
        assert values[0] is None and all(value <= 0 for value in values[1:]) and len(values) == len(tokens)
        assert offsets == [sum(map(len, tokens[1:place])) for place in range(len(tokens))], "the text has no <|bos|>"


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


@pytest.mark.parametrize("stream", [None, False])
def test_options_of_a_stream_have_no_effect_on_a_whole_answer(http: httpx2.Client, stream: bool | None) -> None:
    options = {"stream": stream, "stream_options": {"include_usage": True}, "temperature": 0}
    for path, body in (
        ("/v1/completions", {"prompt": FRANCE}),
        ("/v1/chat/completions", {"messages": QUESTION}),
        ("/v1/responses", {"input": "Hi"}),
    ):
        answer = http.post(path, json=body | options)
        assert answer.status_code == 200 and "warning" not in answer.headers and answer.json()["usage"]


def test_an_empty_prompt_is_the_token_before_every_text(http: httpx2.Client) -> None:
    answer = http.post("/v1/completions", json={"prompt": "", "max_tokens": 1, "echo": True, "return_token_ids": True})
    (choice,) = answer.json()["choices"]
    assert choice["prompt_token_ids"] == http.post("/tokenize", json={"prompt": ""}).json()["tokens"] != []
    assert http.post("/v1/embeddings", json={"input": ["", "x"]}).status_code == 200


def test_a_stop_string_ends_the_answer_and_is_named(client: openai.OpenAI) -> None:
    (choice,) = complete(client, stop=["ri"]).choices
    assert choice.text == " Pa"
    assert choice.finish_reason == "stop"
    assert choice.model_extra["stop_reason"] == "ri"


def test_a_seed_reproduces_the_answer(client: openai.OpenAI) -> None:
    def ask(seed: int) -> str:
        more = {"temperature": 1.5, "max_tokens": 24, "extra_body": {"ignore_eos": True}}
        return str(complete(client, "The", seed=seed, **more).choices[0].text)

    assert ask(11) == ask(11)
    assert len({ask(seed) for seed in range(4)}) > 1


def test_a_logit_bias_forbids_a_token(client: openai.OpenAI, http: httpx2.Client) -> None:
    body = {"prompt": " Paris", "add_special_tokens": False}
    (paris,) = http.post("/tokenize", json=body).json()["tokens"]
    assert not complete(client, logit_bias={str(paris): -100}).choices[0].text.startswith(" Paris")


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
    answer = chat(client, tools=tools, tool_choice=choice, max_tokens=80, parallel_tool_calls=False, stream=stream)
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


def test_a_response_calls_functions_and_reports_a_cut(client: openai.OpenAI) -> None:
    tools = [{"type": "function", "name": "add", "parameters": takes_one_of(1)}]
    history = [
        {"role": "user", "content": [{"type": "input_text", "text": "What is the capital of Peru?"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Lima."}]},
        {"role": "user", "content": "Hi"},
    ]
    (call,) = respond(client, history, tools=tools, tool_choice={"type": "function", "name": "add"}).output
    assert call.type == "function_call" and call.name == "add" and json.loads(call.arguments) == {"a": 1}
    cut = respond(client, "Hi", max_output_tokens=1)
    assert cut.status == "incomplete" and cut.incomplete_details.reason == "max_output_tokens"
