"""OpenAI's Python client, unpatched, against the server at argv[1]; prints its results as JSON."""

import json
from typing import Any

import openai
from wanted import CUT_AT, MODEL, QUESTION, RESULT, TOO_LONG, URL, Address, Seen, is_wanted

client = openai.OpenAI(base_url=URL, api_key="none", max_retries=0, timeout=60)
MESSAGES: list[Any] = [{"role": "user", "content": QUESTION}]
LONG: list[Any] = [{"role": "user", "content": TOO_LONG}]
TOOL = openai.pydantic_function_tool(Address)
FUNCTION = {"type": "function", **TOOL["function"]}
NAMED = {"type": "function", "function": {"name": "Address"}}
CHAT: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "temperature": 0, "max_tokens": 300}
FORCED = CHAT | {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}
CUT = FORCED | {"max_tokens": CUT_AT}
SMALL = {"type": "object", "properties": {"city": {"enum": ["Lima"]}}, "required": ["city"]}
CAPITAL = {"type": "function", "function": {"name": "cap", "parameters": SMALL}}
RESPOND: dict[str, Any] = {"model": MODEL, "input": MESSAGES, "temperature": 0, "max_output_tokens": 300}
CALLING = RESPOND | {"tools": [FUNCTION], "tool_choice": "required", "parallel_tool_calls": False}
seen = Seen()


def create(**asked: Any) -> Any:
    return client.chat.completions.create(**asked).choices[0]


def answered(message: Any) -> str:
    """Send `message` and the results of its calls back unchanged; return the finish reason of the next turn."""
    results = [{"role": "tool", "tool_call_id": call.id, "content": RESULT} for call in message.tool_calls or []]
    again = [*MESSAGES, message, *results, *MESSAGES]
    return str(create(**CHAT | {"messages": again, "tools": [TOOL], "max_tokens": 5}).finish_reason)


def continued(output: Any) -> Any:
    """Send all of `output` and the results of its calls back; return the next response."""
    found = [{"type": "input_text", "text": RESULT}]
    results = [
        {"type": "function_call_output", "call_id": each.call_id, "output": found}
        for each in output
        if each.type == "function_call"
    ]
    given = [*MESSAGES, *output, *results, *MESSAGES]
    return client.responses.create(**RESPOND | {"input": given, "tools": [FUNCTION], "max_output_tokens": 16})


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
def named() -> object:
    choice = create(**FORCED | {"tool_choice": NAMED})
    return [is_wanted(call.function.arguments) for call in choice.message.tool_calls]


@seen
def allowed() -> object:
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED]}}
    choice = create(**FORCED | {"tool_choice": allowed})
    return [is_wanted(call.function.arguments) for call in choice.message.tool_calls]


@seen
def streamed() -> object:
    with client.chat.completions.stream(**FORCED) as events:
        kinds = {event.type for event in events}
        message = events.get_final_completion().choices[0].message
    calls = [is_wanted(call.function.parsed_arguments) for call in message.tool_calls or []]
    return [calls, "tool_calls.function.arguments.delta" in kinds, answered(message)]


@seen
def free() -> object:
    return create(**CHAT | {"tools": [TOOL], "max_tokens": 5}).finish_reason


@seen
def tools_but_none() -> object:
    message = create(**CHAT, tools=[TOOL], tool_choice="none").message
    return [bool(message.content), message.tool_calls]


@seen
def parsed() -> object:
    message = client.chat.completions.parse(**CHAT, response_format=Address).choices[0].message
    return [is_wanted(message.parsed), answered(message)]


@seen
def parsed_stream() -> object:
    with client.chat.completions.stream(**CHAT, response_format=Address) as events:
        return is_wanted(events.get_final_completion().choices[0].message.parsed)


@seen
def cut() -> object:
    choice = create(**CUT)
    return [choice.finish_reason, bool(choice.message.content), bool(answered(choice.message))]


@seen
def cut_named() -> object:
    choice = create(**CUT | {"tool_choice": NAMED})
    return [choice.finish_reason, bool(choice.message.content), bool(answered(choice.message))]


@seen
def cut_stream() -> object:
    choices = [chunk.choices[0] for chunk in client.chat.completions.create(**CUT, stream=True)]
    return [choices[-1].finish_reason, any(choice.delta.content for choice in choices)]


@seen
def cut_after_a_call() -> object:
    asked = CHAT | {"tools": [CAPITAL], "tool_choice": "required", "max_tokens": 60}
    message = create(**asked).message
    found = [json.loads(call.function.arguments) for call in message.tool_calls]
    return [all(each == {"city": "Lima"} for each in found), bool(message.content)]


@seen
def too_long() -> object:
    return [
        code_of(lambda: client.chat.completions.create(model=MODEL, messages=LONG)),
        code_of(lambda: client.completions.create(model=MODEL, prompt=TOO_LONG)),
        code_of(lambda: client.responses.create(model=MODEL, input=TOO_LONG)),
    ]


@seen
def response_call() -> object:
    response = client.responses.create(**CALLING)
    second = continued(response.output)
    return [calls_of(response), bool(second.output), bool(continued(second.output).output)]


@seen
def response_stream() -> object:
    with client.responses.stream(**CALLING) as stream:
        types = [event.type for event in stream]
        return [calls_of(stream.get_final_response()), "response.function_call_arguments.delta" in types]


@seen
def response_parsed() -> object:
    return is_wanted(client.responses.parse(**RESPOND, text_format=Address).output_parsed)


@seen
def response_cut() -> object:
    response = client.responses.create(**CALLING | {"max_output_tokens": 16})
    return [response.status, response.incomplete_details and response.incomplete_details.reason]


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


@seen
def response_in_the_background() -> object:
    asked = RESPOND | {"max_output_tokens": 200, "background": True, "extra_body": {"ignore_eos": True}}
    with client.responses.create(**asked, stream=True) as stream:
        seen_first = [event for _, event in zip(range(5), stream, strict=False)]
    response_id = seen_first[0].response.id
    rest = list(client.responses.retrieve(response_id, stream=True, starting_after=seen_first[-1].sequence_number))
    numbers = [event.sequence_number for event in (*seen_first, *rest)]
    running = client.responses.create(**asked | {"max_output_tokens": 1500})
    cancelled = client.responses.cancel(running.id).status
    return [numbers == list(range(len(numbers))), rest[-1].type, running.status, cancelled]


print(json.dumps(seen))
