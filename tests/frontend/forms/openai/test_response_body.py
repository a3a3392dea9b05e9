"""Input items of /v1/responses become messages of a chat."""

from __future__ import annotations

import msgspec
import pytest

from tokenloom.frontend.forms.media_limits import MediaLimits
from tokenloom.frontend.forms.openai.messages import ChatInput, with_allowed_tools
from tokenloom.frontend.forms.openai.messages import chat_input as input_of
from tokenloom.frontend.forms.openai.response_body import ResponsesRequest, chat_request, tool_names, without_input
from tokenloom.frontend.forms.openai.schema import ChatRequest, TokenizeRequest
from tokenloom.ipc.errors import RequestError
from tokenloom.tests.support.engine_specs import new_spec


def chat_input(body: ChatRequest | TokenizeRequest) -> ChatInput:
    return input_of(body, MediaLimits.of(new_spec()))


def contents(*items: object) -> list[str]:
    body = msgspec.convert({"input": items}, ResponsesRequest)
    return [turn.text for turn in chat_input(chat_request(body)).turns]


def test_a_function_output_may_have_parts() -> None:
    call = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c1", "output": "two\nparts"}
    in_parts = output | {"output": [{"type": "input_text", "text": text} for text in ("two", "parts")]}
    assert contents(call, output) == contents(call, in_parts) == ["", "two\nparts"]
    image = output | {"output": [{"type": "input_image", "image_url": "data:x"}]}
    with pytest.raises(RequestError, match=r"^input\[0\].output\[0\]: the model 'sample' does not see images"):
        contents(image)


def test_the_items_of_an_answer_are_the_turn_that_a_chat_sends_back() -> None:
    def call(call_id: str) -> dict[str, object]:
        return {"id": call_id, "type": "function", "function": {"name": "f", "arguments": f'{{"id": "{call_id}"}}'}}

    said = {"role": "assistant", "content": [{"type": "output_text", "text": "Let me see."}]}
    calls = [
        {"type": "function_call", "call_id": each, "name": "f", "arguments": f'{{"id": "{each}"}}'} for each in "abc"
    ]
    outputs = [{"type": "function_call_output", "call_id": each, "output": f"output of {each}"} for each in "abc"]
    thoughts = [
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": f"thought {number}"}]}
        for number in range(4)
    ]
    question, thanks = {"role": "user", "content": "Hi"}, {"role": "user", "content": "Thanks"}
    items = [question, thoughts[0], said, *calls[:2], *outputs[:2], thoughts[1], calls[2], outputs[2]]
    items += [thoughts[2], said | {"content": "Done."}, thanks, thoughts[3]]
    messages = [
        question,
        said | {"reasoning": "thought 0", "tool_calls": [call("a"), call("b")]},
        {"role": "tool", "tool_call_id": "a", "content": "output of a"},
        {"role": "tool", "tool_call_id": "b", "content": "output of b"},
        {"role": "assistant", "reasoning": "thought 1", "tool_calls": [call("c")]},
        {"role": "tool", "tool_call_id": "c", "content": "output of c"},
        {"role": "assistant", "reasoning": "thought 2", "content": "Done."},
        thanks,
    ]
    response = chat_request(msgspec.convert({"input": items}, ResponsesRequest))
    assert chat_input(response).turns == chat_input(msgspec.convert({"messages": messages}, ChatRequest)).turns


SCHEMA = {"type": "object", "properties": {"q": {"type": "string"}}}


def namespace(name: str, *tools: str) -> dict[str, object]:
    listed = [{"type": "function", "name": each, "description": f"does {each}", "parameters": SCHEMA} for each in tools]
    return {"type": "namespace", "name": name, "description": "d", "tools": listed}


def request(**fields: object) -> ResponsesRequest:
    return msgspec.convert({"input": "hi"} | fields, ResponsesRequest)


def test_the_tools_of_a_namespace_are_functions_whose_names_begin_with_it() -> None:
    plain = {"type": "function", "name": "find", "parameters": SCHEMA}
    spaces = [namespace("mcp__shop", "find", "buy"), namespace("mcp__bank__", "pay"), namespace("functions", "exec")]
    body = request(tools=[plain, *spaces])
    tools = chat_request(body).tools or []
    names = ["find", "mcp__shop__find", "mcp__shop__buy", "mcp__bank__pay", "exec"]
    assert [tool.called.name for tool in tools] == names
    assert (tools[1].called.description, tools[1].called.schema) == ("does find", SCHEMA)
    assert tool_names(body)["mcp__bank__pay"] == {"name": "pay", "namespace": "mcp__bank__"}
    assert tool_names(body).keys() >= {"mcp__shop__find", "mcp__shop__buy"} and "find" not in tool_names(body)


def test_calls_and_choices_name_tools_of_a_namespace_as_clients_do() -> None:
    call = {"type": "function_call", "call_id": "c1", "name": "find", "namespace": "mcp__shop", "arguments": "{}"}
    choice = {"type": "function", "name": "find", "namespace": "mcp__shop"}
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [choice]}
    tools = [namespace("mcp__shop", "find", "buy")]
    body = chat_request(request(input=[{"role": "user", "content": "hi"}, call], tools=tools, tool_choice=choice))
    (asked,) = body.messages[1].tool_calls or ()
    assert asked.called.name == body.tool_choice.called.name == "mcp__shop__find"
    kept = with_allowed_tools(chat_request(request(tools=tools, tool_choice=allowed))).tools or []
    assert [tool.called.name for tool in kept] == ["mcp__shop__find"]


@pytest.mark.parametrize(
    ("tools", "words"),
    [
        ([namespace("a", "b"), namespace("a", "b")], "'b' in 'a' is 'a__b' to the model, as another tool is"),
        ([{"type": "function", "name": "a__b"}, namespace("a", "b")], "'b' in 'a' is 'a__b' to the model"),
        ([{"type": "namespace", "name": "a", "tools": [namespace("b", "c")]}], "'b' in 'a' is a namespace"),
    ],
)
def test_names_that_would_be_mixed_up_are_refused(tools: list[object], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        chat_request(request(tools=tools))


def test_tools_in_the_input_are_tools_and_replace_earlier_ones_of_their_name() -> None:
    def further(*tools: object) -> dict[str, object]:
        return {"type": "additional_tools", "role": "developer", "tools": tools}

    exec_ = {"type": "custom", "name": "exec", "format": {"type": "grammar", "syntax": "regex", "definition": "x"}}
    plain = {"type": "function", "name": "find", "parameters": SCHEMA}
    items = [further({"type": "namespace", "name": "functions", "tools": [exec_]}, namespace("shop", "buy"))]
    items += [{"role": "user", "content": "hi"}, further(namespace("shop", "sell"))]
    body = request(input=items, tools=[plain, namespace("shop", "find")])
    chat = chat_request(body)
    assert [tool.called.name for tool in chat.tools or []] == ["find", "exec", "shop__sell"]
    assert [(each.role, each.content) for each in chat.messages] == [("user", "hi")]
    assert tool_names(body)["exec"] == {"name": "exec", "namespace": "functions"}
    bare = without_input(body)
    assert bare.input == "" and tool_names(bare) == tool_names(body)
    assert without_input(request()).tools is None
