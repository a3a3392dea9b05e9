"""Tools of a template without a place for them: what the model reads, and that its calls are read back."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tokenloom.frontend.forms.parsers.parts import whole_calls
from tokenloom.frontend.server.text.chat_template import ChatTemplate
from tokenloom.frontend.server.text.generic_tools import HEAD, TAIL, calls_as_text, with_tools
from tokenloom.ipc.messages.client import ChatForm, ChatMessage, MediaPart, TextPart
from tokenloom.tests.frontend.forms.parsers.cuts import call_parser

TOOL: dict[str, Any] = {"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}
SHOWN = HEAD + json.dumps(TOOL) + TAIL
CALL = {"id": "c", "type": "function", "function": {"name": "find", "arguments": '{"a": 1}'}}
CALLED = '<tool_call>\n{"name": "find", "arguments": {"a": 1}}\n</tool_call>'
PLAIN = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + PLAIN
USER = ChatMessage("user", "Where?")


def render(template: str, *messages: ChatMessage, tools: list[Any] | None = None) -> str:
    form = ChatForm(variables={"tools": tools} if tools else {})
    return ChatTemplate(template, {}).render(messages, form)


def test_tools_stand_in_a_system_message() -> None:
    assert render(PLAIN, USER, tools=[TOOL]) == f"[system] {SHOWN}\n[user] Where?\n"
    system = ChatMessage("system", "Be brief.")
    assert render(PLAIN, system, USER, tools=[TOOL]) == f"[system] Be brief.\n\n{SHOWN}\n[user] Where?\n"


def test_a_template_that_refuses_system_messages_gets_them_in_the_first_turn() -> None:
    assert render(NO_SYSTEM, USER, tools=[TOOL]) == f"[user] {SHOWN}\n\nWhere?\n"


def test_a_template_with_a_place_for_tools_and_a_chat_without_any_are_not_changed() -> None:
    own = "{{ tools | tojson }}" + PLAIN
    assert render(own, USER, tools=[TOOL]) == json.dumps([TOOL]) + "[user] Where?\n"
    calls = PLAIN.replace("{{ m.content }}", "{{ m.content }}{{ m.tool_calls }}")
    assert "<tool_call>" not in render(calls, ChatMessage("assistant", "x", {"tool_calls": [CALL]}))
    assert render(PLAIN, USER) == "[user] Where?\n"


def test_calls_and_results_become_text_and_turns_alternate() -> None:
    chat = [
        USER,
        ChatMessage("assistant", "I look.", {"tool_calls": [CALL, CALL]}),
        ChatMessage("tool", "here", {"tool_call_id": "c"}),
        ChatMessage("tool", "there", {"tool_call_id": "d"}),
        ChatMessage("user", "And?"),
    ]
    responses = [f"<tool_response>\n{each}\n</tool_response>" for each in ("here", "there")]
    assert render(PLAIN, *chat) == (
        f"[user] Where?\n[assistant] I look.\n{CALLED}\n{CALLED}\n[user] {responses[0]}\n{responses[1]}\nAnd?\n"
    )


@pytest.mark.parametrize("arguments", ["", "{}", '{"a":' * 5000, '{"a": ', None, {"b": [2]}])
def test_a_call_of_any_form_is_shown(arguments: object) -> None:
    call = {"function": {"name": "find", "arguments": arguments}}
    (turn,) = calls_as_text([ChatMessage("assistant", None, {"tool_calls": [call]})], PLAIN)
    assert turn.text.startswith('<tool_call>\n{"name": "find", "arguments": {') and turn.text.endswith("</tool_call>")


def test_media_of_a_first_turn_stay_there() -> None:
    turn = ChatMessage("user", [MediaPart(0), TextPart("What?")])
    (shown,) = with_tools([turn], [TOOL], PLAIN, lambda: False)
    assert shown.content == [TextPart(f"{SHOWN}\n\n"), MediaPart(0), TextPart("What?")]


def test_an_answer_in_the_form_that_is_shown_is_read_as_a_call() -> None:
    parser = call_parser("hermes")
    _, (call,) = whole_calls([*parser.append(CALLED), *parser.finish()])
    assert (call.name, json.loads(call.arguments)) == ("find", {"a": 1})
