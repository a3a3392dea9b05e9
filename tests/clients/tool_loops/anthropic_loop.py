"""Anthropic's Python client in tool loops: whole and streamed."""

import json
from typing import Any

import anthropic
from weather import MODEL, QUESTION, SCHEMA, SERVER, found, loop, run

client = anthropic.Anthropic(base_url=SERVER, api_key="none", max_retries=0, timeout=60)
TOOL: Any = {"name": "weather", "description": "Tells the weather", "input_schema": SCHEMA}
FIRST: dict[str, Any] = {"auto": {}, "required": {"tool_choice": {"type": "any"}}, "strict": {}}
ASKED: list[Any] = [{"role": "user", "content": QUESTION}]


def ask(mode: str) -> dict[str, Any]:
    """Return the fields of both requests of a mode."""
    return {"model": MODEL, "max_tokens": 400, "tools": [TOOL | ({"strict": True} if mode == "strict" else {})]}


def results(message: Any) -> list[Any]:
    """Run the calls of a message and return the turns that follow: the message as it came, and their results."""
    answered = [
        {"type": "tool_result", "tool_use_id": block.id, "content": run(block.name, block.input)}
        for block in message.content
        if block.type == "tool_use"
    ]
    return [{"role": "assistant", "content": message.content}, {"role": "user", "content": answered}]


def told(first: Any, second: Any) -> dict[str, Any]:
    """Return the visible parts of both messages: the first one, and the text of the second."""

    def joined(message: Any, kind: str) -> str:
        return "".join(getattr(block, kind) for block in message.content if block.type == kind)

    return {
        "thought": joined(first, "thinking") or None,
        "said": joined(first, "text"),
        "ids": [block.id for block in first.content if block.type == "tool_use"],
        "end": first.stop_reason,
        "answer": joined(second, "text"),
    }


@loop
def messages(mode: str) -> object:
    first = client.messages.create(**ask(mode), **FIRST[mode], messages=ASKED)
    return told(first, client.messages.create(**ask(mode), messages=[*ASKED, *results(first)]))


@loop
def messages_stream(mode: str) -> object:
    with client.messages.stream(**ask(mode), **FIRST[mode], messages=ASKED) as stream:
        first = stream.get_final_message()
    with client.messages.stream(**ask(mode), messages=[*ASKED, *results(first)]) as stream:
        return told(first, stream.get_final_message())


print(json.dumps(found))
