"""Chats show special tokens to the parsers that look for them and merge the deltas of calls."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from tokenloom.frontend.forms.answer_forms.form import AnswerForm
from tokenloom.frontend.forms.answer_forms.named import named_form
from tokenloom.frontend.forms.openai.schema import ChatRequest
from tokenloom.frontend.forms.openai.text import AnswerText
from tokenloom.frontend.forms.parsers.parts import Arguments, CallBegin, CallEnd, Part
from tokenloom.frontend.server.api.openai.chat import ChatChoice, ChatCompletion
from tokenloom.frontend.server.api.openai.local_engine import Run
from tokenloom.frontend.server.bodies.body_parser import ParsedBody
from tokenloom.ipc.messages.client import Delta, Submit
from tokenloom.ipc.messages.intake import BodyInput
from tokenloom.tests.frontend.forms.parsers.cuts import new_style

TOOLS = [{"type": "function", "function": {"name": "f"}}]


def started(tool_parser: str, reasoning_parser: str, fields: dict[str, object]) -> tuple[Submit, tuple[str, ...]]:
    """The Submit of a chat, and the markers for which it asked."""
    asked: list[tuple[str, ...]] = []

    def special_ids_of(markers: tuple[str, ...]) -> bytes:
        asked.append(markers)
        return b"ids."

    inputs: Any = SimpleNamespace(
        chat_template=None,
        cut_side=lambda params: None,
        thoughts=SimpleNamespace(are_open=lambda ids: False),
        special_ids_of=special_ids_of,
    )

    async def chat_prompt(parsed: object, cut_side: str | None) -> BodyInput:
        return BodyInput(token_ids=b"", is_of_chat=True)

    async def answer_form(template: str | None = None) -> AnswerForm:
        return named_form(tool_parser, reasoning_parser)

    engine: Any = SimpleNamespace(inputs=inputs, chat_prompt=chat_prompt, answer_form=answer_form)
    body = msgspec.convert({"messages": [{"role": "user", "content": "x"}]} | fields, ChatRequest)
    chat = asyncio.run(ChatCompletion.start(engine, ParsedBody(body, []), "m"))
    (submit,), (markers,) = chat._submits, asked
    return submit, markers


@pytest.mark.parametrize(
    ("tool_parser", "reasoning_parser", "fields", "expected"),
    [
        ("mistral", "none", {"tools": TOOLS}, ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")),
        ("mistral", "none", {}, ()),
        ("mistral", "none", {"tools": TOOLS, "tool_choice": "none"}, ()),
        ("mistral", "none", {"tools": TOOLS, "tool_choice": "required"}, ()),
        ("hermes", "think", {"tools": TOOLS}, ("<think>", "</think>", "<tool_call>", "</tool_call>")),
        ("hermes", "deepseek_r1", {}, ("<think>", "</think>")),
        ("llama", "none", {"tools": TOOLS}, ("<|python_tag|>",)),
        ("pythonic", "none", {"tools": TOOLS}, ("<|python_start|>", "<|python_end|>")),
    ],
)
@pytest.mark.parametrize("skip", [None, True, False])
def test_special_tokens_are_shown_to_the_parsers_that_look_for_them(
    tool_parser: str, reasoning_parser: str, fields: dict[str, object], expected: tuple[str, ...], skip: bool | None
) -> None:
    submit, markers = started(tool_parser, reasoning_parser, fields | {"skip_special_tokens": skip})
    assert (markers, submit.shown_token_ids) == (expected, b"ids.")
    assert submit.params.skip_special_tokens is (skip is not False), "the caller decides about the others"


def test_all_markers_of_a_form_are_asked_for() -> None:
    for tool_parser, reasoning_parser in (("openai", "gpt_oss"), ("none", "gpt_oss")):
        _, markers = started(tool_parser, reasoning_parser, {"tools": TOOLS})
        assert {"<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>"} <= set(markers)
    _, markers = started("qwen3_coder", "none", {"tools": TOOLS})
    assert {"<tool_call>", "</tool_call>", "<function=", "</function>", "<parameter=", "</parameter>"} == set(markers)


def test_a_chunk_has_one_entry_per_call() -> None:
    body = msgspec.convert({"messages": [{"role": "user", "content": "x"}]}, ChatRequest)
    style: Any = SimpleNamespace(is_forced=True, new_parsers=list, custom_names=(), is_text=False, call_marker="")
    choice = ChatChoice(0, body, AnswerText(style), "", Run(1, 1), lambda token_id: b"")
    first: list[Part] = [CallBegin("f", "a"), Arguments("{"), Arguments('"x": 1}'), CallEnd(""), CallBegin("g", "b")]
    choice._text.num_calls = 2
    f, g = choice._call_deltas([*first, Arguments("[")])
    assert (f["index"], f["function"]) == (0, {"name": "f", "arguments": '{"x": 1}'})
    assert (g["index"], g["function"]) == (1, {"name": "g", "arguments": "["})
    choice._text.num_calls = 3
    more: list[Part] = [Arguments("1"), Arguments("]"), CallEnd(""), CallBegin("h", "c"), Arguments("{}")]
    g, h = choice._call_deltas(more)
    assert g == {"index": 1, "function": {"arguments": "1]"}}
    assert (h["index"], h["function"]) == (2, {"name": "h", "arguments": "{}"})


@pytest.mark.parametrize(
    ("fields", "name", "reason"),
    [
        ({"tools": TOOLS}, "tool_calls", "tool_calls"),
        ({"functions": [{"name": "f"}]}, "function_call", "function_call"),
    ],
)
def test_a_call_has_the_form_in_which_its_function_was_given(fields: Any, name: str, reason: str) -> None:
    body = msgspec.convert({"messages": [{"role": "user", "content": "x"}]} | fields, ChatRequest)
    style = new_style(reasoning_parser="none", schemas={"f": {}}, max_calls=1)
    text = '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>'
    delta = Delta(request_id="r", text=text, finish_reason="stop")
    choice = ChatChoice(0, body, AnswerText(style), "", Run(1, 1), lambda token_id: b"")
    choice.add(delta)
    whole = choice.build()
    assert (whole["finish_reason"], whole["message"]["content"]) == (reason, None)
    called = whole["message"][name]
    function = called if name == "function_call" else called[0]["function"]
    assert function == {"name": "f", "arguments": '{"x": 1}'}
    chunk = ChatChoice(0, body, AnswerText(style), "", Run(1, 1), lambda token_id: b"").chunk(delta)
    assert chunk is not None and chunk["finish_reason"] == reason and name in chunk["delta"]


def test_functions_are_shown_to_parsers_as_tools_are() -> None:
    _, markers = started("hermes", "none", {"functions": [{"name": "f"}]})
    assert markers == ("<tool_call>", "</tool_call>")
    assert started("hermes", "none", {"functions": [{"name": "f"}], "function_call": "none"})[1] == ()
