"""OpenAI's Python client in tool loops: chats and responses, whole and streamed."""

import json
from typing import Any

import openai
from weather import MODEL, QUESTION, SCHEMA, URL, found, loop, run

client = openai.OpenAI(base_url=URL, api_key="none", max_retries=0, timeout=60)
FUNCTION: dict[str, Any] = {"name": "weather", "description": "Tells the weather", "parameters": SCHEMA}
FIRST: dict[str, Any] = {"auto": {}, "required": {"tool_choice": "required"}, "strict": {}}


def asked_chat(mode: str) -> dict[str, Any]:
    """Return the fields of both requests of a mode."""
    function = FUNCTION | ({"strict": True} if mode == "strict" else {})
    return {"model": MODEL, "max_tokens": 400, "tools": [{"type": "function", "function": function}]}


def asked_response(mode: str) -> dict[str, Any]:
    tool = FUNCTION | {"type": "function", "strict": mode == "strict"}
    return {"model": MODEL, "max_output_tokens": 400, "tools": [tool]}


def results(message: Any) -> list[Any]:
    """Run the calls of a message and return the turns that answer them."""
    return [
        {"role": "tool", "tool_call_id": call.id, "content": run(call.function.name, call.function.arguments)}
        for call in message.tool_calls
    ]


def outputs(response: Any) -> list[Any]:
    """Run the calls of a response and return the items that answer them."""
    return [
        {"type": "function_call_output", "call_id": each.call_id, "output": run(each.name, each.arguments)}
        for each in response.output
        if each.type == "function_call"
    ]


def told(message: Any, finish_reason: str, answer: Any) -> dict[str, Any]:
    """Return the visible parts of both turns of a chat: the first one, and the text of the second."""
    return {
        "thought": (message.model_extra or {}).get("reasoning_content"),
        "said": message.content or "",
        "ids": [call.id for call in message.tool_calls],
        "end": finish_reason,
        "answer": answer.content,
    }


def told_response(first: Any, second: Any) -> dict[str, Any]:
    """Return the visible parts of both responses, as `told`."""
    thought = "".join(part.text for item in first.output if item.type == "reasoning" for part in item.content or ())
    return {
        "thought": thought or None,
        "said": first.output_text,
        "ids": [item.call_id for item in first.output if item.type == "function_call"],
        "end": first.status,
        "answer": second.output_text,
    }


@loop
def chat(mode: str) -> object:
    asked: list[Any] = [{"role": "user", "content": QUESTION}]
    first = client.chat.completions.create(**asked_chat(mode), **FIRST[mode], messages=asked).choices[0]
    asked += [first.message, *results(first.message)]
    second = client.chat.completions.create(**asked_chat(mode), messages=asked)
    return told(first.message, first.finish_reason, second.choices[0].message)


@loop
def chat_stream(mode: str) -> object:
    asked: list[Any] = [{"role": "user", "content": QUESTION}]
    with client.chat.completions.stream(**asked_chat(mode), **FIRST[mode], messages=asked) as events:
        first = events.get_final_completion().choices[0]
    asked += [first.message, *results(first.message)]
    with client.chat.completions.stream(**asked_chat(mode), messages=asked) as events:
        second = events.get_final_completion().choices[0]
    return told(first.message, first.finish_reason, second.message)


@loop
def responses(mode: str) -> object:
    asked: list[Any] = [{"role": "user", "content": QUESTION}]
    first = client.responses.create(**asked_response(mode), **FIRST[mode], input=asked)
    return told_response(
        first, client.responses.create(**asked_response(mode), input=[*asked, *first.output, *outputs(first)])
    )


@loop
def responses_stream(mode: str) -> object:
    asked: list[Any] = [{"role": "user", "content": QUESTION}]
    with client.responses.stream(**asked_response(mode), **FIRST[mode], input=asked) as stream:
        first = stream.get_final_response()
    with client.responses.stream(**asked_response(mode), input=[*asked, *first.output, *outputs(first)]) as stream:
        return told_response(first, stream.get_final_response())


print(json.dumps(found))
