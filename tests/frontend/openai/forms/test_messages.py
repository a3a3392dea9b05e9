"""Earlier answers that a client sends back reach the chat template."""

from __future__ import annotations

import msgspec
import pytest

from tokenloom.frontend.openai.forms.messages import chat_input
from tokenloom.frontend.openai.forms.response_body import ResponsesRequest, chat_request
from tokenloom.frontend.openai.forms.schema import ChatRequest

ARGUMENTS = [
    ('{"a": 1}', {"a": 1}),
    ({"a": 1}, {"a": 1}),
    ('{"a":', {}),
    ("", {}),
    (None, {}),
    ("[1]", {}),
    ("[" * 5000, {}),
]


@pytest.mark.parametrize(("given", "expected"), ARGUMENTS)
def test_arguments_are_text_or_objects_and_incomplete_ones_count_as_empty(given: object, expected: object) -> None:
    message = {"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": given}}]}
    chat = msgspec.convert({"messages": [message]}, ChatRequest)
    items = [{"type": "function_call", "call_id": "c", "name": "f", "arguments": given}]
    response = chat_request(msgspec.convert({"input": items}, ResponsesRequest))
    for body in (chat, response):
        (turn,) = chat_input(body).turns
        assert turn.more["tool_calls"] == [
            {"id": "c", "type": "function", "function": {"name": "f", "arguments": expected}}
        ]


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_thoughts_of_earlier_answers_have_either_name(name: str) -> None:
    chat = msgspec.convert({"messages": [{"role": "assistant", "content": "x", name: "why"}]}, ChatRequest)
    assert chat_input(chat).turns[0].more == {"reasoning_content": "why"}
