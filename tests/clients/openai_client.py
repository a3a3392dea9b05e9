"""OpenAI's Python client, unpatched, against the server at argv[1]; prints its results as JSON."""

import json
from typing import Any

import openai
from wanted import MODEL, QUESTION, RESULT, URL, Address, Seen, is_wanted

client = openai.OpenAI(base_url=URL, api_key="none", max_retries=0, timeout=60)
MESSAGES: list[Any] = [{"role": "user", "content": QUESTION}]
TOOL = openai.pydantic_function_tool(Address)
FUNCTION = {"type": "function", **TOOL["function"]}
CHAT: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "temperature": 0, "max_tokens": 300}
FORCED = CHAT | {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}
RESPOND: dict[str, Any] = {"model": MODEL, "input": MESSAGES, "temperature": 0, "max_output_tokens": 300}
CALLING = RESPOND | {"tools": [FUNCTION], "tool_choice": "required", "parallel_tool_calls": False}
seen = Seen()


def answered(message: Any) -> str:
    """Send `message` and the results of its calls back unchanged; return the finish reason of the next turn."""
    results = [{"role": "tool", "tool_call_id": call.id, "content": RESULT} for call in message.tool_calls or []]
    again = [*MESSAGES, message, *results, *MESSAGES]
    asked = CHAT | {"messages": again, "tools": [TOOL], "max_tokens": 5}
    return str(client.chat.completions.create(**asked).choices[0].finish_reason)


def calls_of(response: Any) -> list[bool]:
    return [is_wanted(each.arguments) for each in response.output if each.type == "function_call"]


def code_of(call: Any) -> object:
    try:
        return call()
    except openai.BadRequestError as error:
        return error.code


@seen
def required() -> object:
    choice = client.chat.completions.parse(**FORCED).choices[0]
    calls = [is_wanted(call.function.parsed_arguments) for call in choice.message.tool_calls or []]
    return [calls, choice.finish_reason, choice.message.content or None, answered(choice.message)]


@seen
def streamed() -> object:
    with client.chat.completions.stream(**FORCED) as events:
        kinds = {event.type for event in events}
        message = events.get_final_completion().choices[0].message
    calls = [is_wanted(call.function.parsed_arguments) for call in message.tool_calls or []]
    return [calls, "tool_calls.function.arguments.delta" in kinds, answered(message)]


@seen
def parsed() -> object:
    message = client.chat.completions.parse(**CHAT, response_format=Address).choices[0].message
    return [is_wanted(message.parsed), answered(message)]


@seen
def parsed_stream() -> object:
    with client.chat.completions.stream(**CHAT, response_format=Address) as events:
        return is_wanted(events.get_final_completion().choices[0].message.parsed)


@seen
def response_stream() -> object:
    with client.responses.stream(**CALLING) as stream:
        types = [event.type for event in stream]
        return [calls_of(stream.get_final_response()), "response.function_call_arguments.delta" in types]


@seen
def response_parsed() -> object:
    return is_wanted(client.responses.parse(**RESPOND, text_format=Address).output_parsed)


@seen
def response_stored() -> object:
    first = client.responses.create(**CALLING)
    results = [{"type": "function_call_output", "call_id": each.call_id, "output": RESULT} for each in first.output]
    asked = RESPOND | {"input": results, "tools": [FUNCTION], "max_output_tokens": 16}
    second = client.responses.create(**asked, previous_response_id=first.id)
    by_hand = client.responses.create(**asked | {"input": [*MESSAGES, *first.output, *results]})
    listed = [item.type for item in client.responses.input_items.list(second.id, order="asc")]
    is_same = client.responses.retrieve(second.id) == second
    client.responses.delete(second.id)
    gone = code_of(lambda: client.responses.create(**asked, previous_response_id=second.id))
    return [second.usage.input_tokens == by_hand.usage.input_tokens, listed[-2:], is_same, gone]


print(json.dumps(seen))
