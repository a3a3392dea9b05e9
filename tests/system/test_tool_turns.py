"""Two turns with calls, with a model of each form: each API returns both calls, and the next turn continues it.

The clients of test_tool_loops.py play the same turns each night.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

from tokenloom.tests.support.today import some
from tokenloom.tests.system.http_engine import ask, open_http
from tokenloom.tests.system.scripted_engine import ScriptedEngine
from tokenloom.tests.system.tool_forms import ANSWER, CALLS, CUSCO, FORMS, LIMA, QUESTION, RESULT, SCHEMA, ToolForm

BLOCK = 16  # tokens of a KV block
FUNCTION: Any = {"name": "weather", "parameters": SCHEMA}
CHAT: Any = {"tools": [{"type": "function", "function": FUNCTION}], "max_tokens": 400}
RESPONSE: Any = {"tools": [{"type": "function", **FUNCTION}], "max_output_tokens": 400}
MESSAGE: Any = {"tools": [{"name": "weather", "input_schema": SCHEMA}], "max_tokens": 400}
ASKED: Any = [{"role": "user", "content": QUESTION}]


def asked(where: str) -> list[Any]:
    """Return a question that no other test has put into the cache."""
    return [{"role": "user", "content": f"In {where}: {QUESTION}"}]


@pytest.fixture(scope="module", params=some([*FORMS], num_today=1))
def form(request: pytest.FixtureRequest) -> ToolForm:
    return FORMS[request.param]


@pytest.fixture(scope="module")
def engine(form: ToolForm, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedEngine]:
    with form.start(tmp_path_factory.mktemp("run"), "--speculation", "off") as engine:
        engine.wait_ready()
        yield engine
        engine.end()


@pytest.fixture
def http(engine: ScriptedEngine) -> Iterator[httpx2.Client]:
    with open_http(engine.url) as http:
        yield http


def calls_of(message: Any) -> list[Any]:
    return [[call["function"]["name"], json.loads(call["function"]["arguments"])] for call in message["tool_calls"]]


def results(message: Any) -> list[Any]:
    return [{"role": "tool", "tool_call_id": each["id"], "content": RESULT} for each in message["tool_calls"]]


def check_ids(form: ToolForm, ids: list[str]) -> None:
    assert ids == form.ids if form.ids else len(set(ids)) == len(CALLS)


def check_found(num_found: int, num_generated: int) -> None:
    """Fail unless the cache has all full blocks of a prompt and its answer. The last token may have no KV yet."""
    assert num_found in ((num_generated - 1) // BLOCK * BLOCK, num_generated // BLOCK * BLOCK)


def test_chat_returns_both_calls_and_finds_them_in_the_cache(http: httpx2.Client, form: ToolForm) -> None:
    question = asked("a chat")
    answer = ask(http, "/v1/chat/completions", CHAT, messages=question)
    (choice,) = answer["choices"]
    message = choice["message"]
    assert calls_of(message) == CALLS
    assert (message["content"] or "", message["reasoning"]) == (form.said, form.thought)
    assert choice["finish_reason"] == "tool_calls"
    check_ids(form, [call["id"] for call in message["tool_calls"]])
    second = ask(http, "/v1/chat/completions", CHAT, messages=[*question, message, *results(message)])
    assert second["choices"][0]["message"]["content"].strip() == ANSWER
    num_generated = answer["usage"]["prompt_tokens"] + answer["usage"]["completion_tokens"]
    check_found(second["usage"]["prompt_tokens_details"]["cached_tokens"], num_generated)


def test_stream_has_the_calls_of_the_whole_answer_and_finds_them_in_the_cache(
    http: httpx2.Client, form: ToolForm
) -> None:
    question, usage = asked("a stream"), {"include_usage": True}
    message: Any = {"role": "assistant", "content": "", "reasoning": ""}
    calls: dict[int, Any] = {}
    body = CHAT | {"messages": question, "stream": True, "stream_options": usage}
    with http.stream("POST", "/v1/chat/completions", json=body) as answer:
        chunks = [json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: {")]
    for delta in (choice["delta"] for chunk in chunks for choice in chunk["choices"]):
        for name in ("content", "reasoning"):
            message[name] += delta.get(name) or ""
        for call in delta.get("tool_calls") or ():
            known = calls.setdefault(call["index"], call)
            if known is not call:
                known["function"]["arguments"] += call["function"]["arguments"]
    message["tool_calls"] = list(calls.values())
    assert calls_of(message) == CALLS
    assert (message["content"], message["reasoning"] or None) == (form.said, form.thought)
    second = ask(http, "/v1/chat/completions", CHAT, messages=[*question, message, *results(message)])
    generated = chunks[-1]["usage"]
    num_generated = generated["prompt_tokens"] + generated["completion_tokens"]
    check_found(second["usage"]["prompt_tokens_details"]["cached_tokens"], num_generated)


def test_response_returns_both_calls_and_finds_them_in_the_cache(http: httpx2.Client, form: ToolForm) -> None:
    question = asked("a response")
    first = ask(http, "/v1/responses", RESPONSE, input=question)
    found = [each for each in first["output"] if each["type"] == "function_call"]
    assert [[each["name"], json.loads(each["arguments"])] for each in found] == CALLS
    check_ids(form, [each["call_id"] for each in found])
    outputs = [{"type": "function_call_output", "call_id": each["call_id"], "output": RESULT} for each in found]
    second = ask(http, "/v1/responses", RESPONSE, input=[*question, *first["output"], *outputs])
    assert second["output"][-1]["content"][0]["text"].strip() == ANSWER
    check_found(second["usage"]["input_tokens_details"]["cached_tokens"], first["usage"]["total_tokens"])


def test_message_returns_both_calls_and_finds_them_in_the_cache(http: httpx2.Client) -> None:
    question = asked("a message")
    first = ask(http, "/v1/messages", MESSAGE, messages=question)
    found = [each for each in first["content"] if each["type"] == "tool_use"]
    assert [[each["name"], each["input"]] for each in found] == CALLS
    blocks = [{"type": "tool_result", "tool_use_id": each["id"], "content": RESULT} for each in found]
    turns = [
        *question,
        {"role": "assistant", "content": first["content"]},
        {"role": "user", "content": blocks},
    ]
    second = ask(http, "/v1/messages", MESSAGE, messages=turns)
    assert second["content"][-1]["text"].strip() == ANSWER
    counts = [first["usage"][f"{kind}input_tokens"] for kind in ("", "cache_creation_", "cache_read_")]
    check_found(second["usage"]["cache_read_input_tokens"], sum(counts) + first["usage"]["output_tokens"])


@pytest.mark.parametrize("mode", ["required", "named", "strict"])
def test_constrained_calls_are_written_in_the_models_own_form(http: httpx2.Client, form: ToolForm, mode: str) -> None:
    """The script goes on behind a mask, which allows no prose before a forced call."""
    choices: Any = {"required": "required", "named": {"type": "function", "function": {"name": "weather"}}}
    function = FUNCTION | {"strict": mode == "strict"}
    tools = [{"type": "function", "function": function}]
    body = CHAT | {"tools": tools} | ({"tool_choice": choices[mode]} if mode in choices else {})
    message = ask(http, "/v1/chat/completions", body, messages=ASKED)["choices"][0]["message"]
    assert calls_of(message) == (CALLS[:1] if mode == "named" else CALLS)
    is_thinking = mode == "strict" or form.first.startswith("<think>")  # a forced call begins at white space, too
    assert message["reasoning"] == (form.thought if is_thinking else None)
    if mode != "named":
        check_ids(form, [call["id"] for call in message["tool_calls"]])
    second = ask(http, "/v1/chat/completions", CHAT, messages=[*ASKED, message, *results(message)])
    assert second["choices"][0]["message"]["content"].strip() == ANSWER


def test_one_call_ends_an_answer_without_parallel_calls(http: httpx2.Client) -> None:
    body = CHAT | {"tool_choice": "required", "parallel_tool_calls": False}
    answer = ask(http, "/v1/chat/completions", body, messages=ASKED)
    assert calls_of(answer["choices"][0]["message"]) == [["weather", LIMA]]
    whole = ask(http, "/v1/chat/completions", CHAT | {"tool_choice": "required"}, messages=ASKED)
    assert answer["usage"]["completion_tokens"] < whole["usage"]["completion_tokens"]


def test_arguments_of_a_strict_tool_conform_though_the_model_writes_others(http: httpx2.Client) -> None:
    """The script's second call has a unit that this schema does not allow."""
    schema = SCHEMA | {"properties": SCHEMA["properties"] | {"unit": {"const": "celsius"}}}
    tools = [{"type": "function", "function": {"name": "weather", "parameters": schema, "strict": True}}]
    message = ask(http, "/v1/chat/completions", CHAT | {"tools": tools}, messages=ASKED)["choices"][0]["message"]
    first, *others = calls_of(message)
    assert first == CALLS[0] and [call[1]["unit"] for call in others] == ["celsius"] * len(others)
    free = ask(http, "/v1/chat/completions", CHAT, messages=ASKED)["choices"][0]["message"]
    assert calls_of(free)[1][1]["unit"] == CUSCO["unit"] == "fahrenheit"
