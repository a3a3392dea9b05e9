"""Anthropic's Python client, unpatched, against the server at argv[1] with the key argv[2]; prints JSON."""

import json
import sys
from typing import Any

import anthropic
from wanted import CUT_AT, MODEL, QUESTION, RESULT, TOO_LONG, Address, Seen, Street, is_wanted

URL, KEY = sys.argv[1:3]
client = anthropic.Anthropic(base_url=URL, api_key=KEY, max_retries=0, timeout=60)
MESSAGES: list[Any] = [{"role": "user", "content": QUESTION}]
TOOL: Any = {"name": "Address", "description": "Tell the place", "input_schema": Address.model_json_schema()}
ASK: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "max_tokens": 300, "extra_body": {"temperature": 0}}
FORCED = ASK | {"tools": [TOOL], "tool_choice": {"type": "any", "disable_parallel_tool_use": True}}
NAMED = FORCED | {"tool_choice": {"type": "tool", "name": "Address"}}
SCHEMA = {"type": "json_schema", "schema": Address.model_json_schema()}
seen = Seen()


def text_of(message: Any) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def calls_of(message: Any) -> list[bool]:
    return [is_wanted(block.input) for block in message.content if block.type == "tool_use"]


def streamed_message(**asked: Any) -> tuple[Any, list[str]]:
    """Return the message that the stream helper assembles, and the event types in order, each once."""
    with client.messages.stream(**asked) as stream:
        kinds = list(dict.fromkeys(event.type for event in stream))
        return stream.get_final_message(), kinds


def told(message: Any) -> Any:
    """Return the fields of a message that are equal in every answer."""
    found = message.to_dict()
    for block in found["content"]:
        block.pop("id", None)
        block.pop("parsed_output", None)
    return [found["content"], found["stop_reason"], found["stop_sequence"], found["usage"]["output_tokens"]]


def continued(message: Any) -> str | None:
    """Send `message` and the results of its calls back unchanged; return the stop reason of the next turn."""
    results = [
        {"type": "tool_result", "tool_use_id": block.id, "content": [{"type": "text", "text": RESULT}]}
        for block in message.content
        if block.type == "tool_use"
    ]
    question = {"type": "text", "text": QUESTION, "cache_control": {"type": "ephemeral"}}
    again = [
        *MESSAGES,
        {"role": "assistant", "content": message.content},
        {"role": "user", "content": [*results, question]},
    ]
    return client.messages.create(**ASK | {"messages": again, "tools": [TOOL], "max_tokens": 5}).stop_reason


def error_of(call: Any) -> Any:
    try:
        return f"none, but {call()!r:.300}"
    except anthropic.APIStatusError as error:
        assert isinstance(error.body, dict)
        return [type(error).__name__, error.body["error"]["type"], bool(error.request_id)]


@seen
def plain() -> object:
    message = client.messages.create(**ASK | {"system": [{"type": "text", "text": "Be brief."}]})
    usage = message.usage
    return [message.type, message.role, message.stop_reason, usage.input_tokens > 0, usage.output_tokens > 0]


@seen
def streamed() -> object:
    whole, (message, kinds) = client.messages.create(**ASK), streamed_message(**ASK)
    return [told(message) == told(whole), kinds]


@seen
def required() -> object:
    whole, (message, kinds) = client.messages.create(**FORCED), streamed_message(**FORCED)
    return [calls_of(whole), whole.stop_reason, told(message) == told(whole), "input_json" in kinds, continued(message)]


@seen
def named() -> object:
    message = client.messages.create(**NAMED)
    return [calls_of(message), message.stop_reason, continued(message)]


@seen
def free() -> object:
    message, _ = streamed_message(**ASK | {"tools": [TOOL], "max_tokens": 5})
    return [message.stop_reason, continued(message)]


@seen
def tools_but_none() -> object:
    message = client.messages.create(**FORCED | {"tool_choice": {"type": "none"}})
    return [bool(text_of(message)), calls_of(message)]


@seen
def failed_result() -> object:
    message = client.messages.create(**FORCED)
    (call,) = message.content
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "no such place", "is_error": True}
    turns = [*MESSAGES, {"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
    return client.messages.create(**ASK | {"messages": turns, "tools": [TOOL], "max_tokens": 2}).stop_reason


@seen
def structured() -> object:
    whole = client.messages.create(**ASK | {"output_config": {"format": SCHEMA}})
    parsed = client.messages.parse(**ASK, output_format=Street)  # of a list it would leave the length out
    streamed, _ = streamed_message(**ASK | {"output_config": {"format": SCHEMA}})
    return [
        is_wanted(text_of(whole)),
        parsed.parsed_output == Street(name="Union", number=7),
        is_wanted(text_of(streamed)),
    ]


@seen
def stopped() -> object:
    message = client.messages.create(**ASK | {"stop_sequences": ["Peru"]})
    return [text_of(message), message.stop_reason, message.stop_sequence]


@seen
def prefilled() -> object:
    turns = [*MESSAGES, {"role": "assistant", "content": "The capital of Peru is"}]
    return text_of(client.messages.create(**ASK | {"messages": turns}))


@seen
def thinking() -> object:
    message = client.messages.create(**ASK | {"thinking": {"type": "enabled", "budget_tokens": 1024}})
    return message.stop_reason


@seen
def cut() -> object:
    whole, (message, _) = (
        client.messages.create(**FORCED | {"max_tokens": CUT_AT}),
        streamed_message(**FORCED | {"max_tokens": CUT_AT}),
    )
    return [whole.stop_reason, told(message) == told(whole), continued(message)]


@seen
def left() -> object:
    with client.messages.stream(**ASK) as stream:
        first = next(iter(stream)).type
    return [first, client.messages.create(**ASK).stop_reason]


@seen
def counted() -> object:
    asked: Any = {"model": MODEL, "messages": MESSAGES, "tools": [TOOL], "system": "Be brief."}
    usage = client.messages.create(**asked, max_tokens=1).usage
    num_prompt = usage.input_tokens + (usage.cache_read_input_tokens or 0) + (usage.cache_creation_input_tokens or 0)
    return client.messages.count_tokens(**asked).input_tokens == num_prompt


@seen
def beta() -> object:
    return client.beta.messages.create(**ASK | {"betas": ["context-management-2025-06-27"]}).stop_reason


@seen
def models() -> object:
    return [each.id for each in client.models.list()]


@seen
def refused() -> object:
    picture = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
    long = [{"role": "user", "content": TOO_LONG}]
    other = client.with_options(api_key="wrong")
    return {
        "too_long": error_of(lambda: client.messages.create(**ASK | {"messages": long})),
        "too_long_stream": error_of(lambda: streamed_message(**ASK | {"messages": long})),
        "wrong_key": error_of(lambda: other.messages.create(**ASK)),
        "no_model": error_of(lambda: client.messages.create(**ASK | {"model": "claude-none"})),
        "picture": error_of(
            lambda: client.messages.create(**ASK | {"messages": [{"role": "user", "content": [picture]}]})
        ),
        "server_tool": error_of(
            lambda: client.messages.create(
                **ASK,
                tools=[{"type": "web_search_20250305", "name": "web_search"}],
                tool_choice={"type": "tool", "name": "web_search"},
            )
        ),
    }


print(json.dumps(seen))
