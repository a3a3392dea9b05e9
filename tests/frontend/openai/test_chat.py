"""Chats keep special tokens for their parsers and merge the deltas of calls."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from tokenloom.frontend.intake.body_parser import ParsedBody
from tokenloom.frontend.openai.chat import ChatChoice, ChatCompletion
from tokenloom.frontend.openai.forms.schema import ChatRequest
from tokenloom.frontend.openai.local_engine import Run
from tokenloom.frontend.openai.parsers.parts import Arguments, CallBegin, CallEnd, Part
from tokenloom.ipc.messages.intake import BodyInput

TOOLS = [{"type": "function", "function": {"name": "f"}}]


class Engine:
    """The part of LocalEngine that a chat needs to start."""

    inputs = SimpleNamespace(chat_template=None, cut_side=lambda params: None, opens_thought=lambda ids: False)

    async def chat_prompt(self, parsed: object, cut_side: str | None) -> BodyInput:
        return BodyInput(token_ids=b"", is_of_chat=True)


@pytest.mark.parametrize(
    ("tool_parser", "reasoning_parser", "fields", "shows"),
    [
        ("mistral", "none", {"tools": TOOLS}, True),
        ("mistral", "none", {}, False),
        ("mistral", "none", {"tools": TOOLS, "tool_choice": "required"}, False),
        ("none", "gpt_oss", {}, True),
        ("none", "gpt_oss", {"skip_special_tokens": True}, True),
        ("hermes", "think", {"tools": TOOLS}, False),
    ],
)
def test_special_tokens_are_kept_for_parsers_that_need_them(
    tool_parser: str, reasoning_parser: str, fields: dict[str, object], shows: bool
) -> None:
    body = msgspec.convert({"messages": [{"role": "user", "content": "x"}]} | fields, ChatRequest)
    engine: Any = Engine()
    chat = asyncio.run(ChatCompletion.start(engine, ParsedBody(body, []), "m", tool_parser, reasoning_parser))
    (submit,) = chat._submits
    assert submit.params.skip_special_tokens is not shows


def test_a_chunk_has_one_entry_per_call() -> None:
    body = msgspec.convert({"messages": [{"role": "user", "content": "x"}]}, ChatRequest)
    style: Any = SimpleNamespace(is_forced=True, new_parsers=list, custom_names=(), is_text=False)
    choice = ChatChoice(0, body, style, "", Run(1, 1), lambda token_id: b"")
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
