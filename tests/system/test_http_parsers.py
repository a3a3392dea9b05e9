"""Reasoning and unforced calls over HTTP, in a real model's format, which a grammar makes the demo model write."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tokenloom.tests.system.equipped_engine import NAMES, EquippedEngine
from tokenloom.tests.system.http_engine import QUESTION, open_openai

TOOLS: Any = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
ARGUMENTS = {"city": "Lima, the capital of Peru", "days": [1, 2, 3]}
TEXT = (
    "<think>The capital of Peru is Lima.</think>\n\nLet me see."
    f'<tool_call>\n{{"name": "f", "arguments": {json.dumps(ARGUMENTS)}}}\n</tool_call>'
)
BODY: Any = {
    "model": NAMES[0],
    "tools": TOOLS,
    "max_tokens": 200,
    "extra_body": {"structured_outputs": {"choice": [TEXT], "includes_thought": True}},
}


@pytest.fixture
def client(equipped: EquippedEngine) -> Iterator[openai.OpenAI]:
    with open_openai(equipped.url) as client:
        yield client


def test_reasoning_content_and_a_call_are_parsed_and_can_be_sent_back(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(messages=QUESTION, **BODY)
    choice = answer.choices[0]
    assert choice.message.content == "Let me see."
    extra = choice.message.model_extra
    assert extra is not None and extra["reasoning"] == extra["reasoning_content"] == "The capital of Peru is Lima."
    (call,) = choice.message.tool_calls or ()
    assert call.type == "function" and call.function.name == "f"
    assert json.loads(call.function.arguments) == ARGUMENTS
    assert choice.finish_reason == "tool_calls"
    assert answer.usage is not None and answer.usage.completion_tokens_details is not None
    assert 5 < (answer.usage.completion_tokens_details.reasoning_tokens or 0) < answer.usage.completion_tokens - 20
    turns: Any = [*QUESTION, choice.message, {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
    assert client.chat.completions.create(messages=turns, **BODY).choices[0].message.tool_calls


def test_a_stream_delivers_the_same_parts_piece_by_piece(client: openai.OpenAI) -> None:
    chunks = client.chat.completions.create(messages=QUESTION, stream=True, **BODY)
    deltas = [choice.delta for chunk in chunks for choice in chunk.choices]
    assert "".join((delta.model_extra or {}).get("reasoning", "") for delta in deltas) == "The capital of Peru is Lima."
    assert "".join(delta.content or "" for delta in deltas) == "Let me see."
    calls = [call for delta in deltas for call in delta.tool_calls or ()]
    assert [call.function.name for call in calls if call.function.name] == ["f"]
    assert json.loads("".join(call.function.arguments for call in calls)) == ARGUMENTS


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_within_a_thought_ends_the_answer(client: openai.OpenAI, stream: bool) -> None:
    """vllm-project/vllm#14399 and #14170: as in vLLM."""
    sent = client.chat.completions.create(messages=QUESTION, stop=["capital"], stream=stream, **BODY)
    choices: Any = [choice for each in (sent if stream else [sent]) for choice in each.choices]
    said = [choice.delta if stream else choice.message for choice in choices]
    assert "".join(each.model_extra.get("reasoning") or "" for each in said) == "The "
    assert not any(each.content or each.tool_calls for each in said)
    assert (choices[-1].finish_reason, choices[-1].model_extra["stop_reason"]) == ("stop", "capital")
