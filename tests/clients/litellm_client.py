"""litellm by the provider at argv[2], unpatched, against the server at argv[1]; prints its results as JSON."""

import json
import sys
from typing import Any

import litellm
from wanted import CUT_AT, MODEL, QUESTION, RESULT, TOO_LONG, URL, Address, Seen, error_of, is_wanted

litellm.suppress_debug_info = True
PARAMETERS = Address.model_json_schema()
TOOL = {"type": "function", "function": {"name": "find", "description": "finds", "parameters": PARAMETERS}}
MESSAGES: list[Any] = [{"role": "user", "content": QUESTION}]
SERVER: dict[str, Any] = {"model": f"{sys.argv[2]}/{MODEL}", "api_base": URL, "api_key": "none", "max_retries": 0}
COMMON: dict[str, Any] = SERVER | {"temperature": 0, "timeout": 60, "max_tokens": 300}
FORCED = COMMON | {"messages": MESSAGES, "tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}
seen = Seen()


def answered(message: Any) -> str:
    """Send `message` and the results of its calls back unchanged; return the finish reason of the next turn."""
    results = [{"role": "tool", "tool_call_id": each.id, "content": RESULT} for each in message.tool_calls or []]
    again = [*MESSAGES, message, *results, *MESSAGES]
    asked = COMMON | {"messages": again, "tools": [TOOL], "max_tokens": 5}
    return str(litellm.completion(**asked).choices[0].finish_reason)


def calls_of(message: Any) -> list[bool]:
    return [is_wanted(each.function.arguments) for each in message.tool_calls or []]


@seen
def plain() -> object:
    return answered(litellm.completion(**COMMON, messages=MESSAGES).choices[0].message)


@seen
def required() -> object:
    choice = litellm.completion(**FORCED).choices[0]
    return [calls_of(choice.message), choice.finish_reason, answered(choice.message)]


@seen
def streamed() -> object:
    chunks = list(litellm.completion(**FORCED, stream=True))
    message = litellm.stream_chunk_builder(chunks, messages=MESSAGES).choices[0].message
    return [calls_of(message), answered(message)]


@seen
def structured() -> object:
    return is_wanted(
        litellm.completion(**COMMON, messages=MESSAGES, response_format=Address).choices[0].message.content
    )


@seen
def cut() -> object:
    choice = litellm.completion(**FORCED | {"max_tokens": CUT_AT}).choices[0]
    return [choice.finish_reason, answered(choice.message)]


@seen
def too_long() -> object:
    long = [{"role": "user", "content": TOO_LONG}]
    return [
        error_of(lambda: litellm.completion(**COMMON, messages=long)),
        error_of(lambda: litellm.text_completion(**COMMON, prompt=TOO_LONG)),
    ]


print(json.dumps(seen))
