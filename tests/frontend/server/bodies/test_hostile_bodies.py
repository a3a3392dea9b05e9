"""A body with a wrong value in one field is refused by the field's name, or served."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest

from tokenloom.frontend.forms.anthropic.request_body import MessagesRequest
from tokenloom.frontend.forms.anthropic.request_body import chat_request as chat_of_messages
from tokenloom.frontend.forms.media_limits import MediaLimits
from tokenloom.frontend.forms.openai.messages import chat_input, with_allowed_tools
from tokenloom.frontend.forms.openai.params import errors_about, sampling_params
from tokenloom.frontend.forms.openai.response_body import ResponsesRequest
from tokenloom.frontend.forms.openai.response_body import chat_request as chat_of_response
from tokenloom.frontend.forms.openai.schema import ChatRequest, CompletionRequest
from tokenloom.frontend.forms.prompt_limits import PromptLimits
from tokenloom.frontend.server.api.openai.chat import chat_params
from tokenloom.frontend.server.bodies.body_parser import parse_body
from tokenloom.tests.support.engine_specs import new_spec
from tokenloom.tests.support.hostile_fields import Hostile, faults, hostile_changes
from tokenloom.tests.support.today import some

LIMITS = PromptLimits(4096, 64, 1 << 20, None)
MEDIA = MediaLimits.of(new_spec())
SCHEMAS = {"parameters", "input_schema", "schema"}
SHARED: dict[str, Any] = json.loads("""{
  "temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "n": 1, "seed": 1, "stop": ["x"],
  "presence_penalty": 0.1, "frequency_penalty": 0.1, "repetition_penalty": 1.1, "logit_bias": {"5": 1.0},
  "min_tokens": 1, "stop_token_ids": [3], "ignore_eos": false, "allowed_token_ids": [1, 2],
  "bad_words": ["y"], "timeout_s": 5.0, "queue_timeout_s": 5.0, "priority": 1, "truncate_prompt_tokens": 5,
  "truncation_side": "left", "cache_salt": "s", "request_id": "r", "stream": false, "logprob_token_ids": null
}""")
BODIES: dict[str, tuple[Any, dict[str, Any]]] = {
    "completion": (
        CompletionRequest,
        SHARED | json.loads("""{"prompt": ["a"], "max_tokens": 5, "logprobs": 1, "echo": false}"""),
    ),
    "chat": (
        ChatRequest,
        SHARED
        | json.loads("""{
  "messages": [
    {"role": "user", "content": [{"type": "text", "text": "a"}]},
    {
      "role": "assistant", "content": null,
      "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    },
    {"role": "tool", "tool_call_id": "c", "content": "b"}
  ],
  "max_completion_tokens": 5, "logprobs": true, "top_logprobs": 1,
  "tools": [
    {
      "type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}
    }
  ],
  "tool_choice": {"type": "function", "function": {"name": "f"}}, "parallel_tool_calls": false,
  "chat_template_kwargs": {"a": 1}, "reasoning_effort": "low"
}"""),
    ),
    "old chat": (
        ChatRequest,
        json.loads("""{
  "messages": [{"role": "user", "content": "a"}],
  "functions": [{"name": "f", "description": "d", "parameters": {"type": "object"}}],
  "function_call": {"name": "f"}
}"""),
    ),
    "response": (
        ResponsesRequest,
        json.loads("""{
  "input": [
    {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
    {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c", "output": "b"}
  ],
  "instructions": "i", "max_output_tokens": 5, "temperature": 0.5,
  "tools": [{"type": "function", "name": "f", "description": "d", "parameters": {"type": "object"}}],
  "tool_choice": "auto",
  "text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}}
}"""),
    ),
    "messages": (
        MessagesRequest,
        json.loads("""{
  "model": "m", "max_tokens": 5, "system": [{"type": "text", "text": "s"}],
  "messages": [
    {"role": "user", "content": [{"type": "text", "text": "a"}]},
    {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {}}]},
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "b"}]}
  ],
  "stop_sequences": ["x"], "temperature": 0.5, "top_p": 0.9, "top_k": 5,
  "tools": [{"name": "f", "description": "d", "input_schema": {"type": "object"}}],
  "tool_choice": {"type": "auto"}, "thinking": {"type": "enabled", "budget_tokens": 1024}
}"""),
    ),
}


def serve(body: Any) -> None:
    """Check a decoded body as its endpoint does."""
    if isinstance(body, CompletionRequest):
        sampling_params(body, max_tokens=body.max_tokens, logprobs=body.logprobs)
        return
    if isinstance(body, ResponsesRequest):
        body = chat_of_response(body)
    if isinstance(body, MessagesRequest):
        body = chat_of_messages(body)
    chat_params(with_allowed_tools(body))
    chat_input(body, MEDIA)


@pytest.mark.parametrize("name", some([*BODIES], 2))
def test_hostile_values_are_refused_by_their_fields(name: str) -> None:
    body_type, body = BODIES[name]

    def read(change: Hostile) -> None:
        raw = json.dumps(change.of(body)).encode()
        is_renamed = name == "messages"  # by its endpoint
        with errors_about("stop_sequences", r"stop\b") if is_renamed else contextlib.nullcontext():
            serve(parse_body(raw, body_type, LIMITS).body)

    changes = [each for each in hostile_changes(body) if SCHEMAS.isdisjoint(each.path[:-1])]  # schemas have other tests
    found = faults(changes, read)
    assert not found, found
