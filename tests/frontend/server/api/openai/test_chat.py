"""Chats show special tokens to the parsers that look for them and merge the deltas of calls."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from tokenloom.frontend.forms.answer_forms.form import AnswerForm
from tokenloom.frontend.forms.answer_forms.named import FORMS, HERMES, named_form
from tokenloom.frontend.forms.anthropic.blocks import BlockWriter
from tokenloom.frontend.forms.openai.items import ItemWriter
from tokenloom.frontend.forms.openai.schema import ChatRequest
from tokenloom.frontend.forms.openai.text import AnswerText
from tokenloom.frontend.forms.parsers.parts import Arguments, CallBegin, CallEnd, Part, Thought
from tokenloom.frontend.server.api.openai.chat import ChatChoice, ChatCompletion
from tokenloom.frontend.server.api.openai.run import Run
from tokenloom.frontend.server.api.response_warnings import collect_warnings
from tokenloom.frontend.server.bodies.body_parser import ParsedBody
from tokenloom.ipc.errors import RequestError
from tokenloom.ipc.messages.client import Delta, Submit, ThoughtTexts
from tokenloom.ipc.messages.intake import BodyInput
from tokenloom.ipc.params.calls_constraint import CallsConstraint
from tokenloom.tests.frontend.forms.parsers.cuts import new_style

TOOLS = [{"type": "function", "function": {"name": "f"}}]
OTHER = [{"type": "function", "function": {"name": "g"}}]
EMPTY = {"type": "object", "properties": {}}


def started(
    tool_parser: str, reasoning_parser: str, fields: dict[str, object], *, prompt: str = ""
) -> tuple[Submit, tuple[str, ...]]:
    """The Submit of a chat, and the markers for which it asked. `prompt`: the end of its prompt."""
    asked: list[tuple[str, ...]] = []

    def special_ids_of(markers: tuple[str, ...]) -> bytes:
        asked.append(markers)
        return b"ids."

    inputs: Any = SimpleNamespace(
        chat_template=None,
        limits=SimpleNamespace(cut_side=lambda num_tokens, side: None),
        thoughts=SimpleNamespace(
            of_form=lambda form: SimpleNamespace(
                are_open=lambda ids: form.begins_in_thought(ids.decode()),
                may_be_opened=lambda ids: form.may_open_thought(ids.decode()),
            )
        ),
        special_ids_of=special_ids_of,
        is_added_token=lambda text: text == "[TOOL_CALLS]",
    )

    async def chat_prompt(parsed: object, cut_side: str | None) -> BodyInput:
        return BodyInput(token_ids=prompt.encode(), is_of_chat=True)

    async def answer_form(template: str | None = None) -> AnswerForm:
        return named_form(tool_parser, reasoning_parser)

    engine: Any = SimpleNamespace(inputs=inputs, chat_prompt=chat_prompt, answer_form=answer_form)
    body = msgspec.convert({"messages": [{"role": "user", "content": "x"}]} | fields, ChatRequest)
    chat = asyncio.run(ChatCompletion.start(engine, ParsedBody(body, []), "m"))
    (submit,), (markers,) = chat._submits, asked
    return submit, markers


def test_a_template_that_is_not_taken_from_requests_is_not_rendered_to_learn_its_form() -> None:
    learned: list[str | None] = []

    async def chat_prompt(parsed: object, cut_side: str | None) -> BodyInput:
        raise RequestError("chat_template is not taken from requests")

    async def answer_form(template: str | None = None) -> AnswerForm:
        learned.append(template)
        return AnswerForm()

    inputs = SimpleNamespace(chat_template=None, limits=SimpleNamespace(cut_side=lambda num_tokens, side: None))
    engine: Any = SimpleNamespace(inputs=inputs, chat_prompt=chat_prompt, answer_form=answer_form)
    body = msgspec.convert({"messages": [{"role": "user", "content": "x"}], "chat_template": "{{ x }}"}, ChatRequest)
    with pytest.raises(RequestError, match="not taken from requests"):
        asyncio.run(ChatCompletion.start(engine, ParsedBody(body, []), "m"))
    assert learned == []


def test_a_template_of_a_request_gives_its_thoughts_too() -> None:
    submit, _ = started("hermes", "seed_oss", {"chat_template": "{{ x }}"})
    assert submit.thoughts == ThoughtTexts(opening="<seed:think>", closing="</seed:think>")
    assert started("hermes", "seed_oss", {})[0].thoughts is None
    assert started("hermes", "none", {"chat_template": "{{ x }}"})[0].thoughts == ThoughtTexts()


@pytest.mark.parametrize(
    ("tool_parser", "fields", "warning"),
    [
        ("llama", {}, "the form of this model's calls has no grammar"),
        ("none", {}, "the form of this model's calls has no grammar"),
        ("hermes", {"response_format": {"type": "json_object"}}, "beside response_format"),
        ("hermes", {}, ""),
        ("llama", {"tool_choice": "required"}, ""),
        ("llama", {"tool_choice": "none"}, ""),
        ("llama", {"tools": OTHER}, ""),
    ],
)
def test_strict_without_effect_is_a_warning_of_the_response(
    tool_parser: str, fields: dict[str, object], warning: str
) -> None:
    warnings = collect_warnings()
    started(tool_parser, "none", {"tools": [{"type": "function", "function": {"name": "f", "strict": True}}]} | fields)
    assert [warning in each for each in warnings] == [True] * bool(warning)


@pytest.mark.parametrize(
    ("tool_parser", "reasoning_parser", "fields", "expected"),
    [
        ("mistral", "none", {"tools": TOOLS}, ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")),
        ("mistral", "none", {}, ()),
        ("mistral", "none", {"tools": TOOLS, "tool_choice": "none"}, ()),
        ("mistral", "none", {"tools": TOOLS, "tool_choice": "required"}, ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")),
        ("llama", "none", {"tools": TOOLS, "tool_choice": "required"}, ()),
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


def constraint_of(
    tool_parser: str, reasoning_parser: str, **fields: object
) -> tuple[CallsConstraint | None, str, bool]:
    """The constraint on the calls of a chat's answers, with the token that begins it and whether it repeats."""
    submit, _ = started(tool_parser, reasoning_parser, {"tools": TOOLS} | fields)
    given = submit.params.structured_outputs
    if given is None or given.calls is None:
        return None, "", False
    return CallsConstraint.from_text(given.calls), given.begin, given.repeats


def test_forced_calls_are_constrained_in_the_form_of_the_model() -> None:
    found, begin, repeats = constraint_of("hermes", "think", tool_choice="required")
    assert found is not None and (found.form, begin, repeats) == (HERMES, "", False)
    assert (found.tools, found.has_text, found.has_one_call) == ({"f": EMPTY}, False, False)
    assert found.thought == ("<think>", "</think>")
    named, _, _ = constraint_of("hermes", "none", tool_choice={"type": "function", "function": {"name": "f"}})
    assert named is not None and named.has_one_call and named.thought is None
    single, _, _ = constraint_of("hermes", "none", tool_choice="required", parallel_tool_calls=False)
    assert single is not None and single.has_one_call


def test_a_form_that_is_unknown_forces_calls_as_a_list() -> None:
    submit, _ = started("llama", "none", {"tools": TOOLS, "tool_choice": "required"})
    assert submit.params.structured_outputs is not None and submit.params.structured_outputs.json


@pytest.mark.parametrize(
    ("prompt", "fields", "may_think"),
    [
        ("<|assistant|>", {}, True),
        ("<|assistant|><think>\n", {}, False),  # the constraint begins behind this thought
        ("<|assistant|><think>\n\n</think>\n\n", {}, False),  # thinking is off
        ("<|assistant|>So", {"continue_final_message": True, "add_generation_prompt": False}, False),
    ],
)
def test_a_model_may_open_a_thought_before_constrained_text(
    prompt: str, fields: dict[str, object], may_think: bool
) -> None:
    fields = {"response_format": {"type": "json_object"}} | fields
    given = started("hermes", "think", fields, prompt=prompt)[0].params.structured_outputs
    assert given is not None and (given.thought == ("<think>", "</think>")) == may_think
    unthinking = started("hermes", "none", fields, prompt=prompt)[0].params.structured_outputs
    assert unthinking is not None and unthinking.thought is None


def test_a_constraint_that_includes_the_thought_has_none_before_it() -> None:
    fields = {"structured_outputs": {"choice": ["<think>So.</think>Yes"], "includes_thought": True}}
    given = started("hermes", "think", fields, prompt="<|assistant|>")[0].params.structured_outputs
    assert given is not None and given.includes_thought and given.thought is None


def test_a_call_as_a_list_may_come_behind_a_thought_of_the_model() -> None:
    fields = {"tools": TOOLS, "tool_choice": "required"}
    given = started("llama", "think", fields)[0].params.structured_outputs
    assert given is not None and given.json and given.thought == ("<think>", "</think>")
    text = AnswerText(new_style(tool_parser="llama", is_forced=True, may_think=True))
    said = '<think>\nHm.\n</think>\n\n[{"name": "f", "parameters": {}}]'
    parts = text.read(Delta(request_id="r", text=said, finish_reason="stop"))
    assert [type(part) for part in parts] == [Thought, CallBegin, Arguments, CallEnd]


def test_strict_tools_are_constrained_where_their_calls_begin() -> None:
    tools = [{"type": "function", "function": {"name": "f", "strict": True}}, *OTHER]
    found, begin, repeats = constraint_of("hermes", "none", tools=tools)
    assert found is not None and (found.has_text, begin, repeats) == (True, "", False)
    assert found.tools == {"f": EMPTY, "g": None}
    found, begin, repeats = constraint_of("mistral", "none", tools=tools)
    assert found is not None and (found.has_text, begin, repeats) == (False, "[TOOL_CALLS]", True)
    for fields in ({"tool_choice": "none"}, {"response_format": {"type": "json_object"}}, {"tools": OTHER}):
        assert constraint_of("hermes", "none", **{"tools": tools} | fields)[0] is None, fields
    assert constraint_of("none", "none", tools=tools)[0] is None
    found, begin, repeats = constraint_of("qwen3_coder", "none", tools=tools)
    assert found is not None and (found.has_text, begin, repeats) == (True, "", False), "<function= begins calls, too"
    assert found.others == FORMS["qwen3_coder"].calls[1:] and {"</function>", "<parameter="} < {*found.value_ends}


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


@pytest.mark.parametrize("tool_parser", ["hermes", "qwen3_coder"])
def test_each_api_streams_the_end_of_a_call_with_its_closing_tag(tool_parser: str) -> None:
    body = msgspec.convert({"messages": [{"role": "user", "content": "x"}], "tools": TOOLS}, ChatRequest)
    call = {
        "hermes": '<tool_call>\n{"name": "f", "arguments": {"x": 1}}',
        "qwen3_coder": "<tool_call>\n<function=f>\n<parameter=x>\n1\n</parameter>\n</function>",
    }[tool_parser]
    schemas = {"f": {"type": "object", "properties": {"x": {"type": "integer"}}}}
    style = new_style(tool_parser=tool_parser, reasoning_parser="none", schemas=schemas)
    deltas = [Delta(request_id="r", text=letter) for letter in call]
    chat = ChatChoice(0, body, AnswerText(style), "", Run(1, 1), lambda token_id: b"")
    chunks: Any = filter(None, map(chat.chunk, deltas))
    calls = [each["function"]["arguments"] for chunk in chunks for each in chunk["delta"].get("tool_calls", ())]
    assert "".join(calls) == '{"x": 1}'
    text, items, blocks = AnswerText(style), ItemWriter("r"), BlockWriter()
    parts = [part for delta in deltas for part in text.read(delta)]
    assert [kind for kind, _ in items.write(parts)][-1] == "response.output_item.done"
    assert [kind for kind, _ in blocks.write(parts)][-1] == "content_block_stop" and blocks.has_calls


def test_functions_are_shown_to_parsers_as_tools_are() -> None:
    _, markers = started("hermes", "none", {"functions": [{"name": "f"}]})
    assert markers == ("<tool_call>", "</tool_call>")
    assert started("hermes", "none", {"functions": [{"name": "f"}], "function_call": "none"})[1] == ()
