"""Custom tools over HTTP: their calls have an input that is text, of a grammar if they have one."""

from __future__ import annotations

import re
from typing import Any

import httpx2
import openai
import pytest

from tokenloom.tests.system.http_engine import QUESTION

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
LARK = {"type": "grammar", "syntax": "lark", "definition": 'start: "go " ("north" | "south")'}
REGEX = {"type": "grammar", "syntax": "regex", "definition": "[a-c]{3}-[0-9]{2}"}
DEFINED = {"lark": (LARK, r"go (north|south)"), "regex": (REGEX, r"[a-c]{3}-[0-9]{2}")}
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


def tool(name: str, form: dict[str, str] | None, path: str = CHAT) -> dict[str, Any]:
    """In a response all fields stand beside the type."""
    if form is None or path == RESPONSES:
        given = {"name": name} if form is None else {"name": name, "format": form}
        return {"type": "custom"} | (given if path == RESPONSES else {"custom": given})
    grammar = {"syntax": form["syntax"], "definition": form["definition"]}
    return {"type": "custom", "custom": {"name": name, "format": {"type": "grammar", "grammar": grammar}}}


def chosen(name: str, path: str = CHAT) -> dict[str, Any]:
    return {"type": "custom"} | ({"name": name} if path == RESPONSES else {"custom": {"name": name}})


def asked(path: str, **fields: Any) -> dict[str, Any]:
    own = {"messages": QUESTION, "max_tokens": 60} if path == CHAT else {"input": QUESTION, "max_output_tokens": 60}
    return own | {"temperature": 0} | fields


@pytest.mark.parametrize("syntax", DEFINED)
def test_a_forced_custom_tool_of_a_chat_is_bound_by_its_grammar(client: openai.OpenAI, syntax: str) -> None:
    form, pattern = DEFINED[syntax]
    asking: Any = asked(CHAT, model="", tools=[ADD, tool("go", form)], tool_choice=chosen("go"))
    (call,) = client.chat.completions.create(**asking).choices[0].message.tool_calls or []
    assert call.type == "custom" and call.custom.name == "go" and re.fullmatch(pattern, call.custom.input)
    chunks = [chunk.choices[0].delta.tool_calls for chunk in client.chat.completions.create(**asking, stream=True)]
    deltas = [delta.model_dump() for calls in chunks if calls for delta in calls]
    assert (deltas[0]["index"], deltas[0]["type"], deltas[0]["custom"]["name"]) == (0, "custom", "go")
    assert "".join(delta["custom"]["input"] for delta in deltas) == call.custom.input


@pytest.mark.parametrize("choice", ["required", "allowed", "named"])
def test_an_input_stands_in_a_list_of_calls_as_text(http: httpx2.Client, choice: str) -> None:
    """Of any text where the tool has no grammar, of the regex where it has one."""
    form = None if choice == "named" else REGEX
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [chosen("go")]}}
    given = {"required": "required", "allowed": allowed, "named": chosen("go")}[choice]
    body = asked(CHAT, tools=[tool("go", form)] + [ADD] * (choice == "allowed"), parallel_tool_calls=False)
    found = http.post(CHAT, json=body | {"tool_choice": given}).json()["choices"][0]["message"]
    (call,) = found["tool_calls"]
    assert call["type"] == "custom" and call["custom"]["name"] == "go" and found["content"] is None
    assert form is None or re.fullmatch(REGEX["definition"], call["custom"]["input"])
    assert not call["custom"]["input"].startswith("{")
