"""Earlier answers that a client sends back reach the chat template."""

from __future__ import annotations

import msgspec
import pytest

from tokenloom.frontend.forms.anthropic.request_body import MessagesRequest
from tokenloom.frontend.forms.anthropic.request_body import chat_request as chat_of_messages
from tokenloom.frontend.forms.media_limits import MediaLimits
from tokenloom.frontend.forms.openai.messages import ChatInput
from tokenloom.frontend.forms.openai.messages import chat_input as input_of
from tokenloom.frontend.forms.openai.response_body import ResponsesRequest, chat_request
from tokenloom.frontend.forms.openai.schema import ChatRequest, TokenizeRequest
from tokenloom.frontend.server.text.chat_template import ChatTemplate
from tokenloom.ipc.errors import RequestError
from tokenloom.ipc.messages.client import TextPart
from tokenloom.tests.support.engine_specs import new_spec

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
    call = {"id": "c", "type": None, "function": {"name": "f", "arguments": given}}
    message = {"role": "assistant", "tool_calls": [call]}
    chat = msgspec.convert({"messages": [message]}, ChatRequest)
    items = [{"type": "function_call", "call_id": "c", "name": "f", "arguments": given}]
    response = chat_request(msgspec.convert({"input": items}, ResponsesRequest))
    template = ChatTemplate("{{ messages[0].tool_calls | tojson }}", {})
    for body in (chat, response):
        (turn,) = chat_input(body).turns
        assert turn.content is None
        shown = msgspec.json.decode(template.render([turn]))
        assert shown == [{"id": "c", "type": "function", "function": {"name": "f", "arguments": expected}}]


R1 = (
    "{% for m in messages %}{% if m['role'] == 'assistant' and m['content'] is none %}{% for t in m['tool_calls'] %}"
    "{{ '<CALL>' + t['function']['name'] + t['function']['arguments'] }}{% endfor %}"
    "{% elif m['content'] is not none %}{{ '<' + m['role'] + '>' + m['content'] }}{% endif %}{% endfor %}"
)


def test_calls_of_all_apis_reach_a_template_that_shows_them_beside_null_alone() -> None:
    """huggingface/transformers#45419: DeepSeek-R1's template."""
    call = {"id": "c", "type": "function", "function": {"name": "get", "arguments": '{"a": 1}'}}
    result = {"role": "tool", "tool_call_id": "c", "content": "20"}
    user = {"role": "user", "content": "W?"}
    called = {"type": "function_call", "call_id": "c", "name": "get", "arguments": '{"a": 1}'}
    output = {"type": "function_call_output", "call_id": "c", "output": "20"}
    use = {"type": "tool_use", "id": "c", "name": "get", "input": {"a": 1}}
    returned = {"type": "tool_result", "tool_use_id": "c", "content": "20"}
    blocks = [user, {"role": "assistant", "content": [use]}, {"role": "user", "content": [returned]}]
    chats: list[ChatRequest] = [
        *(
            msgspec.convert(
                {"messages": [user, {"role": "assistant", **content, "tool_calls": [call]}, result]}, ChatRequest
            )
            for content in ({}, {"content": None}, {"content": ""}, {"content": []})
        ),
        chat_request(msgspec.convert({"input": [user, called, output]}, ResponsesRequest)),
        chat_of_messages(msgspec.convert({"messages": blocks, "max_tokens": 9}, MessagesRequest)),
    ]
    rendered = [ChatTemplate(R1, {}).render(chat_input(chat).turns) for chat in chats]
    assert rendered == ['<user>W?<CALL>get{"a": 1}<tool>20'] * len(chats)


@pytest.mark.parametrize("absent", [{}, {"id": None, "type": None, "index": None}])
def test_a_call_that_comes_back_needs_no_id(absent: dict[str, None]) -> None:
    """sigoden/aichat#1296."""
    call = {"function": {"name": "get", "arguments": "{}"}, **absent}
    messages = [{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": None, "content": "20"}]
    called, result = chat_input(msgspec.convert({"messages": messages}, ChatRequest)).turns
    assert called.more["tool_calls"] == [{"id": None, "type": "function", "function": call["function"]}]
    assert (result.content, result.more) == ("20", {})


def test_a_refusal_is_the_text_of_its_turn() -> None:
    refused = {"role": "assistant", "content": None, "refusal": "I cannot.", "tool_calls": []}
    (turn,) = chat_input(msgspec.convert({"messages": [refused]}, ChatRequest)).turns
    assert (turn.content, turn.more) == ("I cannot.", {})


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content", "thinking"])
def test_thoughts_of_earlier_answers_have_either_name(name: str) -> None:
    chat = msgspec.convert({"messages": [{"role": "assistant", "content": "x", name: "why"}]}, ChatRequest)
    assert chat_input(chat).turns[0].more == {"reasoning_content": "why"}


def chat_input(body: ChatRequest | TokenizeRequest) -> ChatInput:
    return input_of(body, MediaLimits.of(new_spec()))


def test_calls_of_functions_reach_the_template_as_those_of_tools() -> None:
    call = {"name": "get", "arguments": '{"a": 1}'}
    messages = [
        {"role": "user", "content": "W?"},
        {"role": "assistant", "content": None, "function_call": call},
        {"role": "function", "name": "get", "content": "20"},
    ]
    given = {"messages": messages, "functions": [{"name": "get", "parameters": {"type": "object"}}]}
    found = chat_input(msgspec.convert(given, ChatRequest))
    _, called, result = found.turns
    assert called.content is None
    assert called.more["tool_calls"] == [{"id": "call00001", "type": "function", "function": call}]
    assert (result.role, result.text, result.more) == ("tool", "20", {"name": "get", "tool_call_id": "call00001"})
    function = {"name": "get", "parameters": {"type": "object"}}
    assert found.form.variables["tools"] == [{"type": "function", "function": function}]


def test_text_parts_reach_the_template_as_parts() -> None:
    listed = [{"type": "text", "text": "a"}, {"type": "refusal", "refusal": "b"}, {"type": "output_text", "text": "c"}]
    said = {"role": "user", "content": listed}
    result = {"type": "function_call_output", "call_id": "c", "output": listed}
    blocks = [{"type": "tool_result", "content": listed, "is_error": True}, *listed]
    chats = [
        msgspec.convert({"messages": [said]}, ChatRequest),
        chat_request(msgspec.convert({"input": [said, result]}, ResponsesRequest)),
        chat_of_messages(
            msgspec.convert({"messages": [{**said, "content": blocks}], "max_tokens": 9}, MessagesRequest)
        ),
    ]
    parts = [TextPart("a"), TextPart("b"), TextPart("c")]
    assert [[turn.content for turn in chat_input(chat).turns] for chat in chats] == [
        [parts],
        [parts, parts],
        [[TextPart("Error: a"), *parts[1:]], parts],
    ]
    image = {"role": "user", "content": [listed[0], {"type": "image_url", "image_url": {"url": "x"}}]}
    with pytest.raises(RequestError, match=r"^messages\[0\].content\[1\]: the model 'sample' does not see images"):
        chat_input(msgspec.convert({"messages": [image]}, ChatRequest))


def test_a_custom_tool_and_its_calls_are_a_function_of_one_text_to_a_template() -> None:
    call = {"id": "c", "type": "custom", "custom": {"name": "go", "input": "north"}}
    messages = [{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "c", "content": "a wall"}]
    form = {"syntax": "regex", "definition": "[a-z]+"}
    tool = {"type": "custom", "custom": {"name": "go", "format": {"type": "grammar", "grammar": form}}}
    chat = msgspec.convert({"messages": messages, "tools": [tool]}, ChatRequest)
    items = [
        {"type": "custom_tool_call", "call_id": "c", "name": "go", "input": "north"},
        {"type": "custom_tool_call_output", "call_id": "c", "output": "a wall"},
    ]
    flat = {"type": "custom", "name": "go", "format": {"type": "grammar", **form}}
    response = chat_request(msgspec.convert({"input": items, "tools": [flat]}, ResponsesRequest))
    sent = msgspec.convert(msgspec.json.decode(msgspec.json.encode(chat)), ChatRequest)
    for body in (chat, response, sent):
        found = chat_input(body)
        assert [turn.content for turn in found.turns] == [None, "a wall"]
        (called,) = found.turns[0].more["tool_calls"]  # type: ignore[misc]
        assert called == {"id": "c", "type": "function", "function": {"name": "go", "arguments": {"input": "north"}}}
        (shown,) = found.form.variables["tools"]  # type: ignore[misc]
        text = shown["function"]["parameters"]["properties"]["input"]
        assert text["pattern"] == "^(?:[a-z]+)$" and "[a-z]+" in text["description"]
