"""An answer that stops after any part of it goes on elsewhere as if it had not stopped, in every endpoint."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tokenloom.frontend.forms.answer_forms.named import named_form
from tokenloom.frontend.server.api.continuation import Continuation
from tokenloom.ipc.messages.client import Submit
from tokenloom.ipc.params.sampling_params import SamplingParams
from tokenloom.tests.frontend.server.api.cut_answers import CutApp, Part, continuation_of, some_turns, texts_of
from tokenloom.tests.frontend.server.http.served_app import serving
from tokenloom.tests.support.in_loop import in_loop
from tokenloom.tests.support.today import seeds, some

SCRIPTS = {
    "plain": "The café is open. 漢字 too.",
    "call": 'Let me see.<tool_call>\n{"name": "f", "arguments": {"x": "é"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "f", "arguments": {"x": "two"}}\n</tool_call>',
    "think": "<think>Hm, well.\nSo.</think>\n\nYes < no.",
    "schemed": '{"x": [1, "é"], "y": {"z": "two words"}}',
    "forced": '[{"name": "f", "parameters": {"x": "é"}}, {"name": "f", "parameters": {"x": "two"}}]',
    "named": '{"x": "é and more"}',
    "silent": "",
}
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"x": {"type": "array"}, "y": {"type": "object"}}}
FUNCTION: dict[str, Any] = {"name": "f", "parameters": {"type": "object", "properties": {"x": {}}}}
TOOLS = [{"type": "function", "function": FUNCTION}]
STRICT_TOOLS = [{"type": "function", "function": {**FUNCTION, "strict": True}}]
FORM = named_form("hermes", "think")


def _chat(key: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": f"{key} x"}], "max_tokens": 90, **fields}


USAGE: dict[str, Any] = {"stream_options": {"include_usage": True}}
COUNTED: dict[str, Any] = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
SCORED: dict[str, Any] = {"include": ["message.output_text.logprobs"]}
RESPONSE_TOOLS = [{"type": "function", **FUNCTION}]
MESSAGE_TOOLS = [{"name": "f", "input_schema": FUNCTION["parameters"]}]
ASKS: dict[str, tuple[str, dict[str, Any]]] = {
    "completion": ("/v1/completions", {"prompt": "plain", "max_tokens": 60, **USAGE}),
    "completion that echoes": ("/v1/completions", {"prompt": "plain", "max_tokens": 60, "echo": True}),
    "completions": ("/v1/completions", {"prompt": ["plain", "silent", "think"], "n": 2, "max_tokens": 60, **COUNTED}),
    "completion with logprobs": ("/v1/completions", {"prompt": "plain", "logprobs": 0, "max_tokens": 60}),
    "completion with all logprobs": (
        "/v1/completions",
        {"prompt": "plain", "logprobs": 0, "echo": True, "n": 2, "max_tokens": 60},
    ),
    "completion with a stop": ("/v1/completions", {"prompt": "plain", "stop": [" open", "zz"], "max_tokens": 60}),
    "completion with a length": ("/v1/completions", {"prompt": "plain", "max_tokens": 7, **USAGE}),
    "completion with ids": ("/v1/completions", {"prompt": "plain", "max_tokens": 9, "return_token_ids": True}),
    "chat": ("/v1/chat/completions", _chat("plain", **USAGE)),
    "chats": ("/v1/chat/completions", _chat("plain", n=3, seed=5, **USAGE)),
    "chat with calls": ("/v1/chat/completions", _chat("call", tools=TOOLS, **COUNTED)),
    "chats with calls": ("/v1/chat/completions", _chat("call", tools=TOOLS, n=2)),
    "chat with thoughts": ("/v1/chat/completions", _chat("think", **USAGE)),
    "chat with logprobs": ("/v1/chat/completions", _chat("think", logprobs=True)),
    "chats with logprobs": ("/v1/chat/completions", _chat("plain", logprobs=True, top_logprobs=2, n=2)),
    "chat without text": ("/v1/chat/completions", _chat("silent", n=2, **USAGE)),
    "response": ("/v1/responses", {"input": "plain"}),
    "response with calls": ("/v1/responses", {"input": "call", "tools": RESPONSE_TOOLS}),
    "response with thoughts": ("/v1/responses", {"input": "think"}),
    "response that is cut": ("/v1/responses", {"input": "think", "max_output_tokens": 4}),
    "response with logprobs": ("/v1/responses", {"input": "plain", "top_logprobs": 2, **SCORED}),
    "response with logprobs of calls": ("/v1/responses", {"input": "call", "tools": RESPONSE_TOOLS, **SCORED}),
    "response without text": ("/v1/responses", {"input": "silent"}),
    "message": ("/v1/messages", _chat("plain")),
    "message with calls": ("/v1/messages", _chat("call", tools=MESSAGE_TOOLS)),
    "message with thoughts": ("/v1/messages", _chat("think")),
    "completion with a choice": (
        "/v1/completions",
        {"prompt": "plain", "structured_outputs": {"regex": ".*"}, "max_tokens": 60, **USAGE},
    ),
    "chats with a schema": (
        "/v1/chat/completions",
        _chat("schemed", response_format={"type": "json_schema", "json_schema": {"name": "o", "schema": SCHEMA}}, n=2),
    ),
    "chat with any object": (
        "/v1/chat/completions",
        _chat("schemed", response_format={"type": "json_object"}, logprobs=True, **COUNTED),
    ),
    "chats with forced calls": ("/v1/chat/completions", _chat("forced", tools=TOOLS, tool_choice="required", n=2)),
    "chat with a named call": (
        "/v1/chat/completions",
        _chat("named", tools=TOOLS, tool_choice={"type": "function", "function": {"name": "f"}}, **COUNTED),
    ),
    "chat with strict calls": ("/v1/chat/completions", _chat("call", tools=STRICT_TOOLS, **USAGE)),
    "chat with a function": (
        "/v1/chat/completions",
        _chat("named", functions=[FUNCTION], function_call={"name": "f"}),
    ),
    "response with a schema": (
        "/v1/responses",
        {"input": "schemed", "text": {"format": {"type": "json_schema", "name": "o", "schema": SCHEMA}}},
    ),
    "response with forced calls": (
        "/v1/responses",
        {"input": "forced", "tools": RESPONSE_TOOLS, "tool_choice": "required"},
    ),
    "message with a forced call": (
        "/v1/messages",
        _chat("named", tools=MESSAGE_TOOLS, tool_choice={"type": "tool", "name": "f"}),
    ),
    "Ollama's chat with a schema": (
        "/api/chat",
        {"messages": [{"role": "user", "content": "schemed"}], "format": SCHEMA},
    ),
    "Ollama's chat": ("/api/chat", {"messages": [{"role": "user", "content": "call"}], "tools": TOOLS}),
    "Ollama's text": ("/api/generate", {"prompt": "plain", "raw": True}),
}
TIMES = ("created_at", "total_duration", "load_duration", "prompt_eval_duration", "eval_duration")


def _without_times(body: bytes) -> bytes:
    """Return the lines of Ollama's answers without the times of their making; any other body as it is."""
    if not body.startswith(b'{"model"'):
        return body
    lines = [json.loads(line) for line in body.splitlines()]
    return json.dumps([{name: each for name, each in line.items() if name not in TIMES} for line in lines]).encode()


def _serving(folder: Path) -> Any:
    return serving(lambda: CutApp(folder, SCRIPTS, FORM))


def _shown_of(parts: Sequence[Part]) -> object:
    answers = continuation_of(parts).answers
    return {
        choice: (each.token_ids, each.finish_reason, [msgspec.msgpack.decode(logprobs) for logprobs in each.logprobs])
        for choice, each in answers.items()
    }


def _num_tokens(parts: Sequence[Part]) -> int:
    return sum(len(answer.token_ids) for answer in continuation_of(parts).answers.values())


@pytest.mark.parametrize("name", some([*ASKS], 10))
@in_loop(_serving)
async def test_a_stream_that_is_cut_anywhere_goes_on_as_the_whole_would(served: CutApp, name: str) -> None:
    path, fields = ASKS[name]
    body = json.dumps({**fields, "stream": True}).encode()
    parts = await served.parts(path, body, continuation_of([]))
    whole = _without_times(b"".join(part.body for part in parts))
    served.num_cached = 32  # which the usage must not show
    for num_sent in range(1, len(parts)):
        sent, before = parts[:num_sent], served.num_given
        rest = await served.parts(path, body, continuation_of(sent))
        assert _without_times(b"".join(part.body for part in [*sent, *rest])) == whole, f"cut after {num_sent} parts"
        assert continuation_of([*sent, *rest]) == continuation_of(parts)
        num_new = _num_tokens(parts) - _num_tokens(sent)
        assert "stop" in fields or served.num_given - before == num_new, "no token is generated again"
    assert served.frontend.num_open_requests == 0


@pytest.mark.parametrize("name", some([*ASKS], 5))
@in_loop(_serving)
async def test_a_whole_answer_that_is_cut_anywhere_is_that_of_a_calm_run(served: CutApp, name: str) -> None:
    path, fields = ASKS[name]
    body = json.dumps({**fields, "stream": False, "stream_options": None}).encode()
    *parts, last = await served.parts(path, body, continuation_of([]))
    served.num_cached = 32
    for num_sent in range(1, len(parts) + 1):
        before = served.num_given
        *_, again = await served.parts(path, body, continuation_of(parts[:num_sent]))
        assert _without_times(again.body) == _without_times(last.body), f"cut after {num_sent} parts"
        num_new = _num_tokens(parts) - _num_tokens(parts[:num_sent])
        assert "stop" in fields or served.num_given - before == num_new
    has_prompt_logprobs = "logprobs" in fields and "echo" in fields
    assert bool(parts) != has_prompt_logprobs, "a prompt's logprobs come only with its computation"


@pytest.mark.parametrize(
    "name",
    ["completions", "chats with calls", "response with thoughts", "response with logprobs", "message with calls"],
)
@pytest.mark.parametrize("seed", seeds(1, 40))
@in_loop(_serving)
async def test_a_stream_that_is_cut_often_shows_each_token_once(served: CutApp, name: str, seed: int) -> None:
    path, fields = ASKS[name]
    body = json.dumps({**fields, "stream": True, "seed": 3}).encode()
    whole = await served.parts(path, body, continuation_of([]))
    served.tokens_per_turn = some_turns(seed)
    draw = random.Random(seed)
    sent = (await served.parts(path, body, continuation_of([])))[:1]
    is_over = False
    while not is_over:
        parts = await served.parts(path, body, continuation_of(sent))
        num_sent = draw.randint(1, 3)
        sent += parts[:num_sent]
        is_over = num_sent >= len(parts)
    assert _shown_of(sent) == _shown_of(whole)
    assert texts_of(b"".join(part.body for part in sent)) == texts_of(b"".join(part.body for part in whole))


def test_a_request_of_a_lost_frontend_is_no_first_attempt() -> None:
    submit = Submit(request_id="a", prompt="x", params=SamplingParams())
    for num_losses in (0, 2):
        continuation = Continuation(nonce=bytes(16), created=7.0, is_kept=True, num_losses=num_losses)
        (found,) = continuation.submits([submit], lambda: 5)
        assert found.attempt == num_losses  # an engine that drains refuses first attempts
        (found,) = continuation.since_first_byte([submit])
        assert found.arrival_time == (7.0 if num_losses else 0.0)  # its place in the queue; 0: it comes now
