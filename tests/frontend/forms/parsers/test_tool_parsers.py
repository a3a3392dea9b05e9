"""Parsers find the same calls wherever the text is cut, stream them, and lose no text."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import get_args, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenloom.frontend.forms.answer_forms.named import FORMS, THOUGHTS
from tokenloom.frontend.forms.parsers.families.harmony import HarmonyParser
from tokenloom.frontend.forms.parsers.families.llama import LlamaParser
from tokenloom.frontend.forms.parsers.names import find_reasoning_parser, find_tool_parser
from tokenloom.frontend.forms.parsers.parts import Arguments, CallBegin, Parser
from tokenloom.frontend.launcher.options.synonyms import REASONING_PARSERS as REASONING_SYNONYMS
from tokenloom.frontend.launcher.options.synonyms import TOOL_PARSERS as TOOL_SYNONYMS
from tokenloom.ipc.codec import JsonObject
from tokenloom.ipc.spec.config.engine_config import EngineConfig
from tokenloom.tests.frontend.forms.parsers.cuts import call_parser, parse

SCHEMAS: dict[str, JsonObject] = {
    "add": {"properties": {"a": {"type": "integer"}, "s": {"type": "string"}, "l": {"type": "array"}}}
}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
CODER = (
    "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n"
    "<parameter=s>\n2\nx\n</parameter>\n</function>\n</tool_call>"
)
TWO = '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]'
TO_F = "<|start|>assistant to=functions.f<|channel|>commentary json<|message|>{}<|call|>"
HARMONY = (
    "<|channel|>analysis<|message|>Let me see.<|end|><|start|>assistant<|channel|>commentary to=functions.add "
    '<|constrain|>json<|message|>{"a": 1}<|call|>'
)


def new_parser(name: str) -> Parser:
    return call_parser(name, SCHEMAS)


def new_coder() -> Parser:
    return new_parser("qwen3_coder")


@pytest.mark.parametrize("name", [name for name in FORMS if name != "openai"])
@given(text=st.text(alphabet="<tol_cal>/{}[]TOLCAS|()= ab", max_size=40))
def test_text_without_a_call_is_unchanged_content(name: str, text: str) -> None:
    assert parse(new_parser(name), list(text))[1:] == (text, [])


@pytest.mark.parametrize(
    ("parser", "text", "calls"),
    [
        (
            partial(call_parser, "hermes"),
            f"Let me see.\n{CALL}\n{CALL.replace('1', '2')}",
            [("add", {"a": 1}), ("add", {"a": 2})],
        ),
        (
            partial(call_parser, "hermes"),
            '<tool_call>{"arguments": {"a": "</tool_call>"}, "name": "f"}</tool_call>',
            [("f", {"a": "</tool_call>"})],
        ),
        (
            partial(call_parser, "hermes"),
            '<tool_call>{"name": "f", "arguments": {"a": "</tool_call>\\""}}',
            [("f", {"a": '</tool_call>"'})],
        ),
        (
            partial(call_parser, "hermes"),
            '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>',
            [("f", {"a": 1})],
        ),
        (
            LlamaParser,
            '{"name": "f", "parameters": {"x": "é"}}; {"name": "g", "parameters": {}}',
            [("f", {"x": "é"}), ("g", {})],
        ),
        (LlamaParser, '\n<|python_tag|>{"name": "f", "parameters": {"x": [1, "]"]}}', [("f", {"x": [1, "]"]})]),
        (partial(call_parser, "mistral"), TWO, [("f", {"a": 1}), ("g", {})]),
        (
            partial(call_parser, "mistral"),
            'Well.[TOOL_CALLS]f[ARGS]{"a": {}}[TOOL_CALLS]g{"b": "{"}',
            [("f", {"a": {}}), ("g", {"b": "{"})],
        ),
        (partial(call_parser, "mistral"), '[TOOL_CALLS]f[CALL_ID]abc123[ARGS]{"a": 1}', [("f", {"a": 1})]),
        (
            partial(call_parser, "pythonic"),
            "[f(a=1, b='x', c=[true, None], d={'e': -2.5}), g.h()]",
            [("f", {"a": 1, "b": "x", "c": [True, None], "d": {"e": -2.5}}), ("g.h", {})],
        ),
        (partial(call_parser, "pythonic"), "<|python_start|>[f(a='é')]<|python_end|>", [("f", {"a": "é"})]),
        (
            partial(call_parser, "olmo3"),
            'Hm. <function_calls>\nf(a=1, b="x\\n", c=[true, null])\ng.h()\n\nf(a=2)\n</function_calls>',
            [("f", {"a": 1, "b": "x\n", "c": [True, None]}), ("g.h", {}), ("f", {"a": 2})],
        ),
        (
            partial(call_parser, "granite"),
            'Hm. <|tool_call|> [{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]',
            [("f", {"a": 1}), ("g", {})],
        ),
        (
            partial(call_parser, "lfm2"),
            "Hm. <|tool_call_start|>[f(a='é', b=[True]), g()]<|tool_call_end|>",
            [("f", {"a": "é", "b": [True]}), ("g", {})],
        ),
        (new_coder, f"Hm. {CODER}\n{CODER}", [("add", {"a": 1, "s": "2\nx"})] * 2),
        (
            new_coder,
            "<function=add><parameter=l>[1]<parameter=a>True</function>",
            [("add", {"l": [1], "a": True})],
        ),
        (new_coder, "<tool_call><function=now></function></tool_call>", [("now", {})]),
        (lambda: HarmonyParser(has_calls=True), HARMONY, [("add", {"a": 1})]),
        (lambda: HarmonyParser(has_calls=True), TO_F, [("f", {})]),
    ],
)
def test_each_form_is_read(parser: Callable[[], Parser], text: str, calls: list[tuple[str, object]]) -> None:
    for pieces in ([text], list(text)):
        _, content, found = parse(parser(), pieces)
        assert found == calls
        assert not any(sign in content for sign in "<[{")


def test_arguments_stream() -> None:
    texts = {
        "hermes": '<tool_call>{"name": "f", "arguments": {"a": ["x',
        "llama": '{"name": "f", "parameters": {"a": ["x',
        "mistral": '[TOOL_CALLS]f{"a": ["x',
        "openai": '<|channel|>commentary to=functions.f<|message|>{"a": ["x',
    }
    for name, text in texts.items():
        parts = new_parser(name).append(text)
        assert [type(part) for part in parts] == [CallBegin, Arguments], name
        assert isinstance(last := parts[-1], Arguments) and last.text == '{"a": ["x'
    coder = new_parser("qwen3_coder").append("<function=add><parameter=a>1</parameter><parameter=s>begun")
    assert "".join(part.text for part in coder if isinstance(part, Arguments)) == '{"a": 1'


def test_harmony_separates_thought_content_and_calls() -> None:
    text = HARMONY.replace("<|call|>", "<|end|>") + "<|start|>assistant<|channel|>final<|message|>3<|return|>"
    assert parse(HarmonyParser(has_calls=True), list(text)) == ("Let me see.", "3", [("add", {"a": 1})])
    assert parse(HarmonyParser(has_calls=False), [text]) == ("Let me see.", '{"a": 1}3', [])
    assert parse(HarmonyParser(has_calls=True), ['{"a": 1}']) == ("", '{"a": 1}', []), "an answer without channels"


def test_a_deeply_nested_object_is_read_by_character() -> None:
    value: object = 1
    for _ in range(300):
        value = {"a": [value]}
    text = json.dumps({"name": "f", "arguments": value})
    assert parse(LlamaParser(), list(text))[2] == [("f", value)]


@pytest.mark.parametrize(
    ("template", "tools", "reasoning"),
    [
        ("{% if tools %}<tool_call>{% endif %}", "hermes", "none"),
        ("{% if tools %}<tool_call><function=name>{% endif %}<think></think>", "qwen3_coder", "think"),
        ('{% if tools %}{"name": …, "parameters": …}{% endif %}', "llama", "none"),
        ("{% if tools %}[AVAILABLE_TOOLS][TOOL_CALLS]{% endif %}[THINK][/THINK]", "mistral", "mistral"),
        ("{% if tools %}[func_name1(params_name1=params_value1)]{% endif %}", "pythonic", "none"),
        ("{% if tools %}<functions></functions><function_calls>{% endif %}", "olmo3", "none"),
        ("{% if tools %}respond only with <|tool_call|> followed by a list{% endif %}", "granite", "none"),
        ("{% if tools %}List of tools: <|tool_list_start|>[{% endif %}", "lfm2", "none"),
        ("{% if tools %}List of tools: [{% endif %}", "lfm2", "none"),
        ("<|start|>assistant<|channel|>{{ tools }}", "openai", "gpt_oss"),
        ("{{ messages }}", "hermes", "none"),
        ("{{ parameters }}", "hermes", "none"),
    ],
)
def test_a_template_implies_its_parsers(template: str, tools: str, reasoning: str) -> None:
    assert (find_tool_parser(template), find_reasoning_parser(template)) == (tools, reasoning)


def test_options_and_parsers_have_the_same_names() -> None:
    hints = get_type_hints(EngineConfig)
    reasoning = {*THOUGHTS, "gpt_oss"}
    assert set(get_args(hints["tool_call_parser"])) - {"auto", "none"} == FORMS.keys()
    assert set(get_args(hints["reasoning_parser"])) - {"auto", "none"} == reasoning
    assert TOOL_SYNONYMS.keys().isdisjoint(FORMS) and set(TOOL_SYNONYMS.values()) <= {"auto", *FORMS}
    assert REASONING_SYNONYMS.keys().isdisjoint(reasoning) and set(REASONING_SYNONYMS.values()) <= {"auto", *reasoning}


@pytest.mark.parametrize(("name", "whole"), [("hermes", CALL), ("qwen3_coder", CODER)])
def test_a_call_that_is_cut_is_content_without_the_end_of_the_call_before_it(name: str, whole: str) -> None:
    torn = whole[: whole.index("1") + 1]
    assert parse(new_parser(name), [f"{whole}\n{torn}"])[1] == torn
