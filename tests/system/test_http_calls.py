"""Function calls over HTTP: forced calls have arguments of their schema, and cut calls can be sent back."""

from __future__ import annotations

import json
from typing import Any

import httpx2
import openai
import pydantic
import pytest

from tokenloom.tests.system.http_engine import QUESTION

NODE = {
    "type": "object",
    "properties": {"leaf": {"const": 1}, "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
    "required": ["leaf", "next"],
}
RECURSIVE = {
    "type": "object",
    "properties": {"a": {"$ref": "#/$defs/node"}},
    "required": ["a"],
    "$defs": {"node": NODE},
}
OTHER = RECURSIVE | {"$defs": {"node": {"const": "another"}}}
ITSELF = {"type": "object", "properties": {"again": {"anyOf": [{"$ref": "#"}, {"const": 0}]}}, "required": ["again"]}


def function(name: str, parameters: object) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def ask(http: httpx2.Client, **fields: object) -> dict[str, Any]:
    body = {"messages": QUESTION, "temperature": 0, "max_tokens": 120} | fields
    answer = http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]


def is_node(value: Any) -> bool:
    return value is None or (set(value) == {"leaf", "next"} and value["leaf"] == 1 and is_node(value["next"]))


@pytest.mark.parametrize(
    ("tools", "checks"),
    [
        ([function("f", RECURSIVE)], {"f": lambda a: is_node(a["a"])}),
        ([function("f", OTHER), function("g", OTHER)], dict.fromkeys("fg", lambda a: a == {"a": "another"})),
        (
            [function("f", RECURSIVE), function("g", OTHER)],
            {"f": lambda a: is_node(a["a"]), "g": lambda a: a == {"a": "another"}},
        ),
        ([function("f", ITSELF)], {"f": lambda a: a["again"] == 0 or "again" in a["again"]}),
    ],
    ids=["recursive", "same definitions", "same names of definitions", "the root itself"],
)
def test_required_calls_may_refer_to_definitions(http: httpx2.Client, tools: Any, checks: Any) -> None:
    for seed in range(2):
        more = {"temperature": 1, "seed": seed, "parallel_tool_calls": False}
        choice = ask(http, tools=tools, tool_choice="required", **more)
        if choice["finish_reason"] != "length":  # recursion may be cut by the limit
            (call,) = choice["message"]["tool_calls"]
            assert checks[call["function"]["name"]](json.loads(call["function"]["arguments"]))


class Place(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=4)


class Journey(pydantic.BaseModel):
    """A nested model, whose schema has $defs."""

    start: Place
    end: Place


def test_a_nested_pydantic_model_is_a_required_function_of_responses(client: openai.OpenAI) -> None:
    tool = {"type": "function", "name": "go", "parameters": Journey.model_json_schema()}
    fields: Any = {"tools": [tool], "tool_choice": "required", "parallel_tool_calls": False, "max_output_tokens": 200}
    (call,) = client.responses.create(model="tokenloom-demo", input="Hi", **fields).output
    assert call.type == "function_call"
    Journey.model_validate_json(call.arguments)


def test_a_forced_call_overrides_a_response_format(http: httpx2.Client, client: openai.OpenAI) -> None:
    tools = [function("f", {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]})]
    fields: Any = {"tools": tools, "tool_choice": "required", "response_format": {"type": "json_object"}}
    (call,) = ask(http, **fields, parallel_tool_calls=False)["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"])["a"] == 1
    schema = {"type": "json_schema", "name": "f", "schema": {"type": "object"}}
    more: Any = {
        "tools": [{"type": "function", **tools[0]["function"]}],
        "tool_choice": {"type": "function", "name": "f"},
    }
    (item,) = client.responses.create(
        model="tokenloom-demo",
        input="Hi",
        text={"format": schema},  # type: ignore[typeddict-item]
        **more,
    ).output
    assert item.type == "function_call"
    body = {"messages": QUESTION, "structured_outputs": {"choice": ["a"]}, "tools": tools, "tool_choice": "required"}
    assert http.post("/v1/chat/completions", json=body).status_code == 400


WORDS = {"type": "object", "properties": {"w": {"type": "string", "minLength": 300}}, "required": ["w"]}
ONE = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}


def test_a_function_without_parameters_gets_empty_arguments(http: httpx2.Client) -> None:
    for function_ in ({"name": "now"}, {"name": "now", "parameters": {"type": "object", "properties": {}}}):
        tools = [{"type": "function", "function": function_}]
        choice = ask(http, tools=tools, tool_choice={"type": "function", "function": {"name": "now"}})
        (call,) = choice["message"]["tool_calls"]
        assert json.loads(call["function"]["arguments"]) == {}
        assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize(
    "choice", ["required", "any", {"type": "function", "function": {"name": "f"}}, {"function": {"name": "f"}}]
)
def test_forced_calls_stream_in_pieces_and_a_token_limit_cuts_them(client: openai.OpenAI, choice: Any) -> None:
    fields: Any = {
        "tools": [function("f", WORDS)],
        "tool_choice": choice,
        "max_tokens": 60,
        "temperature": 1,
        "seed": 3,
    }
    chunks: Any = list(
        client.chat.completions.create(model="tokenloom-demo", messages=QUESTION, stream=True, **fields)  # type: ignore[call-overload]
    )
    calls = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
    assert [(calls[0].index, calls[0].type, calls[0].function.name)] == [(0, "function", "f")]
    assert calls[0].id and not any(call.id or call.function.name for call in calls[1:])
    assert len(calls) > 5, "they come piece by piece"
    assert "".join(call.function.arguments for call in calls).lstrip().startswith('{"w"')
    assert not any(chunk.choices[0].delta.content for chunk in chunks)
    assert chunks[-1].choices[0].finish_reason == "length"
    whole = client.chat.completions.create(model="tokenloom-demo", messages=QUESTION, **fields).choices[0]  # type: ignore[call-overload]
    assert (whole.message.tool_calls, whole.finish_reason) == (None, "length")
    assert '{"w"' in whole.message.content, "the cut call is content"


def test_an_answer_cut_by_a_limit_keeps_its_complete_calls(http: httpx2.Client) -> None:
    tools = [function("f", ONE)]
    choice = ask(http, tools=tools, tool_choice="required", max_tokens=70, ignore_eos=True, logit_bias={})
    calls = choice["message"]["tool_calls"]
    assert calls and all(json.loads(call["function"]["arguments"]) == {"a": 1} for call in calls)
    assert choice["message"]["content"] is None


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_streams_its_calls_and_marks_a_cut_one_incomplete(client: openai.OpenAI, stream: bool) -> None:
    tools: Any = [{"type": "function", "name": "f", "parameters": WORDS}]
    fields: Any = {"tools": tools, "tool_choice": "required", "max_output_tokens": 60, "stream": stream}
    response: Any = client.responses.create(model="tokenloom-demo", input="Hi", **fields)
    if stream:
        events = list(response)
        deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
        assert len(deltas) > 5
        (done,) = [event for event in events if event.type == "response.function_call_arguments.done"]
        assert done.arguments == "".join(deltas)
        response = events[-1].response
    (call,) = response.output
    assert (response.status, call.status, call.name) == ("incomplete", "incomplete", "f")
    assert "".join(call.arguments.split()).startswith('{"w":"')


def test_usage_counts_reasoning_tokens(client: openai.OpenAI) -> None:
    usage = client.chat.completions.create(model="tokenloom-demo", messages=QUESTION, max_tokens=4).usage  # type: ignore[arg-type]
    assert usage is not None and usage.completion_tokens_details is not None
    assert usage.completion_tokens_details.reasoning_tokens == 0


def test_functions_are_answered_in_their_older_form(http: httpx2.Client) -> None:
    fields = {"functions": [{"name": "f", "parameters": OTHER}], "function_call": {"name": "f"}}
    message = ask(http, **fields)["message"]
    assert message["function_call"]["name"] == "f" and "tool_calls" not in message
    assert json.loads(message["function_call"]["arguments"]) == {"a": "another"}
    body = {"messages": QUESTION, "temperature": 0, "max_tokens": 120, "stream": True} | fields
    with http.stream("POST", "/v1/chat/completions", json=body) as answer:
        chunks = [json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: {")]
    pieces = [chunk["choices"][0]["delta"].get("function_call") or {} for chunk in chunks]
    assert "".join(piece.get("name", "") for piece in pieces) == "f"
    assert "".join(piece.get("arguments", "") for piece in pieces) == message["function_call"]["arguments"]
    assert ask(http, **fields | {"function_call": "none"})["message"]["function_call"] is None
