"""Requests in Anthropic's form become chats; unsupported values are refused by name."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from tokenloom.frontend.forms.anthropic.request_body import (
    CountTokensRequest,
    MessagesRequest,
    chat_request,
    tokenize_request,
)
from tokenloom.frontend.forms.media_limits import MediaLimits
from tokenloom.frontend.forms.openai.messages import ChatInput
from tokenloom.frontend.forms.openai.messages import chat_input as input_of
from tokenloom.frontend.forms.openai.params import structured_outputs
from tokenloom.frontend.forms.openai.schema import ChatRequest, TokenizeRequest
from tokenloom.frontend.forms.openai.tools import NamedTool
from tokenloom.ipc.errors import RequestError
from tokenloom.ipc.messages.client import ChatMessage
from tokenloom.tests.support.engine_specs import new_spec

QUESTION = {"role": "user", "content": "Hi"}
TOOL = {"name": "f", "description": "d", "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}}}}
USE = {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {"a": 1}}
RESULT = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "found"}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
SCHEMA = {"type": "object", "properties": {"a": {"const": 1}}}
PDF = {"type": "base64", "media_type": "application/pdf", "data": "AAAA"}


def chat_input(body: ChatRequest | TokenizeRequest) -> ChatInput:
    return input_of(body, MediaLimits.of(new_spec()))


def chat(*messages: object, **fields: Any) -> ChatRequest:
    body = {"max_tokens": 9, "messages": list(messages) or [QUESTION]} | fields
    return chat_request(msgspec.convert(body, MessagesRequest))


def turns(*messages: object, **fields: Any) -> list[tuple[str, str]]:
    return [(turn.role, turn.text) for turn in chat_input(chat(*messages, **fields)).turns]


def said(role: str, *blocks: object) -> dict[str, object]:
    return {"role": role, "content": list(blocks)}


def text(words: str) -> dict[str, object]:
    return {"type": "text", "text": words, "cache_control": {"type": "ephemeral"}}


def test_a_document_that_is_text_is_read_with_its_title_and_context() -> None:
    plain = {"type": "text", "media_type": "text/plain", "data": "Peru's capital is Lima."}
    blocks = {"type": "content", "content": [text("One."), text("Two.")]}
    document = {"type": "document", "source": plain, "title": "Peru", "context": "From a book.", "citations": {}}
    assert turns(said("user", document, text("Which?"))) == [
        ("user", "Peru\nFrom a book.\n\nPeru's capital is Lima.\nWhich?")
    ]
    assert turns(said("user", {"type": "document", "source": blocks})) == [("user", "One.\nTwo.")]
    assert turns(said("user", {"type": "document", "source": {"type": "content", "content": "x"}})) == [("user", "x")]
    found = {"type": "search_result", "source": "https://a.example", "title": "A", "content": [text("x")]}
    assert turns(said("user", found)) == [("user", "A\nhttps://a.example\n\nx")]
    assert turns(said("user", RESULT | {"content": [document]}))[0][1].endswith("Lima.")


def test_system_becomes_the_first_turn() -> None:
    assert turns(system="Be brief.") == [("system", "Be brief."), ("user", "Hi")]
    assert turns(system=[text("Be"), text("brief.")]) == [("system", "Be\nbrief."), ("user", "Hi")]
    assert turns() == turns(system=[]) == turns(system="") == [("user", "Hi")]


def test_the_billing_block_of_claude_code_is_dropped() -> None:
    billing = text("x-anthropic-billing-header: cc_version=2.1; cch=1a2b3;")
    assert turns(system=[billing, text("Be brief.")]) == [("system", "Be brief."), ("user", "Hi")]
    assert turns(system=[billing]) == [("user", "Hi")]


def test_calls_and_results_become_separate_turns() -> None:
    called = said("assistant", text("I look."), USE, USE | {"id": "toolu_2"})
    failed = {"type": "tool_result", "tool_use_id": "toolu_2", "content": [text("no"), text("way")], "is_error": True}
    listed: list[ChatMessage] = chat_input(chat(QUESTION, called, said("user", RESULT, failed, text("And?")))).turns
    assert [(turn.role, turn.text) for turn in listed] == [
        ("user", "Hi"),
        ("assistant", "I look."),
        ("tool", "found"),
        ("tool", "Error: no\nway"),
        ("user", "And?"),
    ]
    calls: Any = listed[1].more["tool_calls"]
    assert [(call["id"], call["function"]) for call in calls] == [
        (name, {"name": "f", "arguments": {"a": 1}}) for name in ("toolu_1", "toolu_2")
    ]
    assert [turn.more.get("tool_call_id") for turn in listed[2:]] == ["toolu_1", "toolu_2", None]
    assert turns(said("assistant", USE), said("user", {"type": "tool_result", "tool_use_id": "toolu_1"})) == [
        ("assistant", ""),
        ("tool", ""),
    ]


def test_thoughts_of_earlier_answers_reach_the_template() -> None:
    thought = {"type": "thinking", "thinking": "why", "signature": "unsigned"}
    hidden = {"type": "redacted_thinking", "data": "AAAA"}
    turn = chat_input(chat(QUESTION, said("assistant", thought, hidden, text("x")), QUESTION)).turns[1]
    assert (turn.text, turn.more) == ("x", {"reasoning_content": "why"})


def test_answers_continue_a_last_turn_of_the_assistant() -> None:
    begun = {"role": "assistant", "content": "{"}
    assert chat(QUESTION, begun).continue_final_message and not chat(QUESTION).continue_final_message
    assert not chat(QUESTION, said("assistant", USE)).continue_final_message
    assert tokenize_request(msgspec.convert({"messages": [QUESTION, begun]}, CountTokensRequest)).continue_final_message


@pytest.mark.parametrize(
    ("choice", "expected"), [({"type": "auto"}, "auto"), ({"type": "any"}, "required"), ({"type": "none"}, "none")]
)
def test_tool_choices_become_openais(choice: dict[str, str], expected: str) -> None:
    body = chat(tools=[TOOL], tool_choice=choice)
    assert (body.tool_choice, body.parallel_tool_calls) == (expected, True)
    assert bool(body.tools) == (expected != "none")


def test_a_tool_can_be_forced_and_parallel_calls_disabled() -> None:
    body = chat(tools=[TOOL], tool_choice={"type": "tool", "name": "f", "disable_parallel_tool_use": True})
    assert isinstance(body.tool_choice, NamedTool) and body.tool_choice.function.name == "f"
    assert body.parallel_tool_calls is False
    (tool,) = body.tools or ()
    assert (tool.function.name, tool.function.description, tool.function.schema) == ("f", "d", TOOL["input_schema"])


@pytest.mark.parametrize(
    ("thinking", "variables", "budget"),
    [
        (None, {}, None),
        ({"type": "enabled", "budget_tokens": 2048}, {"enable_thinking": True, "thinking": True}, 2048),
        ({"type": "adaptive", "display": "omitted"}, {"enable_thinking": True, "thinking": True}, None),
        ({"type": "disabled"}, {"enable_thinking": False, "thinking": False}, None),
    ],
)
def test_thinking_sets_template_variables_and_a_budget(
    thinking: object, variables: dict[str, bool], budget: int | None
) -> None:
    body = chat(thinking=thinking)
    assert (body.chat_template_kwargs, body.thinking_token_budget) == (variables, budget)
    given = chat(thinking=thinking, chat_template_kwargs={"enable_thinking": "mine"}).chat_template_kwargs or {}
    assert given["enable_thinking"] == "mine"


def test_output_formats_constrain_and_efforts_reach_the_template() -> None:
    form = {"type": "json_schema", "schema": SCHEMA}
    for fields in ({"output_config": {"format": form, "effort": "low"}}, {"output_format": form, "output_config": {}}):
        found = structured_outputs(chat(**fields))
        assert found is not None and json.loads(found.json or "") == SCHEMA
    assert (chat(output_config={"effort": "low"}).chat_template_kwargs or {})["reasoning_effort"] == "low"


def test_sampling_fields_become_openais() -> None:
    body = chat(temperature=0.5, top_p=0.9, top_k=7, stop_sequences=["x"], stream=True, timeout_s=3, cache_salt="s")
    assert (body.max_tokens, body.temperature, body.top_p, body.top_k, body.stop) == (9, 0.5, 0.9, 7, ["x"])
    assert (body.stream, body.timeout_s, body.cache_salt) == (True, 3, "s")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"messages": [QUESTION, said("user", RESULT, IMAGE)]},
            r"messages\[1\].content\[1\]: the model 'sample' does not see images",
        ),
        (
            {"messages": [said("user", {"type": "document", "source": PDF})]},
            r"messages\[0\].content\[0\] is a document of type 'application/pdf', .* give its text",
        ),
        (
            {"messages": [said("user", {"type": "document", "source": {"type": "url", "url": "https://a.example"}})]},
            r"messages\[0\].content\[0\] is a document of type 'url', .* give its text",
        ),
        ({"messages": [said("user", {"type": "document"})]}, r"messages\[0\].content\[0\] is a document"),
        (
            {"messages": [said("user", {"type": "hologram"})]},
            r"content\[0\] is a part of type 'hologram', which is not",
        ),
        ({"messages": [said("user", {"type": "image", "source": "x"})]}, r"content\[0\].source is a text: it must be"),
        (
            {"messages": [said("user", RESULT | {"content": [text("x"), IMAGE]})]},
            r"\[0\].content\[0\].content\[1\]: the model",
        ),
        ({"system": [IMAGE]}, r"system\[0\]: the model 'sample' does not see images"),
        (
            {"messages": [said("assistant", {"type": "tool_use", "id": "t"})]},
            r"messages\[0\].content\[0\] .* without a name",
        ),
        ({"messages": [], "system": "Be brief."}, "messages is empty"),
    ],
)
def test_unsupported_values_are_refused_by_name(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        chat_input(chat(**fields))
    with pytest.raises(RequestError, match=message):
        chat_input(tokenize_request(msgspec.convert({"messages": [QUESTION]} | fields, CountTokensRequest)))
