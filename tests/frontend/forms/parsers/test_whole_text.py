"""No text of a model vanishes: each word of an answer is in its thought, its content, or a call's name or arguments,
once and in order, wherever the answer is cut into pieces and wherever it ends."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenloom.frontend.forms.answer_forms.named import THOUGHTS
from tokenloom.frontend.forms.parsers.families.harmony import HarmonyParser
from tokenloom.frontend.forms.parsers.families.llama import LlamaParser
from tokenloom.frontend.forms.parsers.forced import ForcedParser
from tokenloom.frontend.forms.parsers.parts import CallBegin, CallEnd, Content, Parser, Part, Thought, whole_calls
from tokenloom.ipc.messages.client import Delta
from tokenloom.tests.frontend.forms.parsers.cuts import call_parser, check_cuts, cut, new_answer_text, parse, parts_of

JSON = '{"name": "%", "arguments": {"%": "%", "a": {"%": ["}", "%"]}}}'
LATE = '{"arguments": {"%": "<tool_call>"}, "name": "%"}'
OPEN = '{"name": "%", "arguments": {"%": "%"}'
NULL = '{"name": "%", "arguments": null}'
BROKEN = '{"name": "%", "arguments": {"%": }}'
TORN = '{"name": "%", "arguments": {"%": "%'
TAIL = '{"name": "%", "arguments": {"%": 1}, % }'
WORD = re.compile(r"w\d+w")
CALLS = [JSON, LATE, OPEN, NULL, BROKEN, TORN, TAIL, "% ", "{", "}", '"', "\n", ", ", "; ", "<"]


class Form(NamedTuple):
    """A parser and pieces of the texts it reads. Each % is a word that occurs once. `keeps_order`: all words come in
    order; otherwise those inside a call that belong neither to its name nor to its arguments may come beside it."""

    new_parser: Callable[[], Parser]
    pieces: Sequence[str]
    keeps_order: bool = True


FORMS = {
    "hermes": Form(
        partial(call_parser, "hermes"),
        [f"<tool_call>{JSON}</tool_call>", "<tool_call>", "</tool_call>", "<tool", "_call>", *CALLS],
    ),
    "llama": Form(LlamaParser, ["<|python_tag|>", JSON.replace("arguments", "parameters"), *CALLS]),
    "mistral": Form(
        partial(call_parser, "mistral"),
        [
            f"[TOOL_CALLS][{JSON}]",
            "[TOOL_CALLS]",
            "[ARGS]",
            "[CALL_ID]",
            "[TOOL",
            "_CALLS]",
            "[",
            "]",
            "null",
            "%{",
            '{"%": "%"}',
            *CALLS,
        ],
    ),
    "pythonic": Form(
        partial(call_parser, "pythonic"),
        ["<|python_start|>", "<|python_end|>", "[", "]", ", ", "%(%='%')", "%(%=1e999)", "%(**{'%': 1})", "%", "# %\n"],
    ),
    "olmo3": Form(
        partial(call_parser, "olmo3"),
        [
            "<function_calls>",
            "</function_calls>",
            "\n",
            " ",
            "%(%='%')",
            "%(%=1e999)",
            "%()",
            "%",
            "% %\n",
            "(",
            "<func",
        ],
    ),
    "qwen3_coder": Form(
        partial(call_parser, "qwen3_coder"),
        [
            "<tool_call><function=%><parameter=%>%</parameter></function></tool_call>",
            *("<tool_call>", "</tool_call>", "<function=%>", "</function>", "<parameter=%>", "</parameter>"),
            *("%", " % ", "\n", "<func", "tion=", ">", "<function=>"),
        ],
        keeps_order=False,
    ),
    "openai": Form(
        lambda: HarmonyParser(has_calls=True),
        [
            '<|channel|>commentary to=functions.%<|message|>{"%": "%"}<|call|>',
            *("<|start|>", "<|start|>assistant", "<|channel|>", "<|channel|>analysis", "<|channel|>final"),
            *("<|channel|>commentary", " to=functions.%", "<|constrain|>json", "<|message|>", "<|end|>", "<|call|>"),
            *("<|return|>", '{"%": "%"}', "%", " % %", "null", "<|"),
        ],
        keeps_order=False,
    ),
    "forced": Form(lambda: ForcedParser(None), ["[", "]", ", ", JSON.replace("arguments", "parameters"), *CALLS]),
    "named": Form(lambda: ForcedParser("f"), ['{"%": "%"}', "{", "}", '"', "%"]),
}


def texts(pieces: Sequence[str]) -> st.SearchStrategy[str]:
    """Texts made of `pieces`, with numbered words."""

    def numbered(chosen: list[str]) -> str:
        first, *others = "".join(chosen).split("%")
        return first + "".join(f"w{i}w{other}" for i, other in enumerate(others))

    return st.lists(st.sampled_from(pieces), max_size=12).map(numbered)


def words(text: str) -> list[str]:
    return WORD.findall(text)


def shown(parts: Sequence[Part]) -> list[str]:
    """The words of a whole answer as a caller sees them, in order; those of a call are sorted."""
    call_by_id = {call.id: call for call in whole_calls(parts)[1]}
    found, text, called = list[str](), "", ""
    for part in parts:
        if isinstance(part, Content | Thought):
            text += part.text
            continue
        if isinstance(part, CallBegin):
            called = part.id
        elif isinstance(part, CallEnd) and called in call_by_id:
            call = call_by_id[called]
            found += words(text) + sorted(words(f"{call.name} {call.arguments}"), key=number)
            text = ""
        elif isinstance(part, CallEnd):
            text += part.raw
    return found + words(text)


def number(word: str) -> int:
    return int(word.strip("w"))


@pytest.mark.parametrize("name", FORMS)
@given(data=st.data())
@settings(max_examples=40)
def test_each_word_is_shown_once(name: str, data: st.DataObject) -> None:
    form = FORMS[name]
    text = data.draw(texts(form.pieces))
    found = shown(parts_of(form.new_parser(), [text]))
    assert (found if form.keeps_order else sorted(found, key=number)) == words(text)


@pytest.mark.parametrize("name", FORMS)
@given(data=st.data())
@settings(max_examples=60)
def test_a_stream_brings_the_parts_of_the_whole_text(name: str, data: st.DataObject) -> None:
    form = FORMS[name]
    text = data.draw(texts(form.pieces))
    check_cuts(form.new_parser, text, data.draw(st.lists(st.integers(0, 10_000), max_size=8)))
    check_cuts(form.new_parser, text, range(len(text)))


@pytest.mark.parametrize("reasoning", sorted(THOUGHTS))
@given(data=st.data())
@settings(max_examples=25)
def test_thoughts_and_the_calls_in_or_behind_them_lose_no_word(reasoning: str, data: st.DataObject) -> None:
    text = data.draw(texts([*THOUGHTS[reasoning], "<tool_call>", "</tool_call>", JSON, TORN, "% ", "\n"]))
    pieces = cut(text, data.draw(st.lists(st.integers(0, 10_000), max_size=8)))
    reader = new_answer_text(reasoning_parser=reasoning, is_inside_thought=data.draw(st.booleans()))
    last = len(pieces) - 1
    deltas = [
        Delta(request_id="", text=each, finish_reason=None if i < last else "stop") for i, each in enumerate(pieces)
    ]
    parts = [part for delta in deltas for part in reader.read(delta)]
    assert shown(parts) == words(text)
    assert reader.finish_reason(deltas[-1]) == ("tool_calls" if whole_calls(parts)[1] else "stop")


A, B = ("a", {}), ("b", {})
TO_A = '<tool_call>\n{"name": "a", "arguments": {}}'
TO_B = '{"name": "b", "arguments": {}}'
CODER = "<tool_call>\n<function=a>\n</function>"
COMMENTARY = "<|channel|>commentary to=functions."


@pytest.mark.parametrize(
    ("name", "text", "content", "calls"),
    [
        ("hermes", f"{TO_A}\n<tool_call>\n{TO_B}\n</tool_call>", "", [A, B]),
        ("hermes", f"{TO_A}\n{TO_B}\n</tool_call>", "", [A, B]),
        ("hermes", f"{TO_A}{TO_B}{TO_B}", "", [A, B, B]),
        ("hermes", f"{TO_A[:-1]}\n{TO_B}", "", [A, B]),
        ("hermes", f"{TO_A}\nI wait for the result.", "\nI wait for the result.", [A]),
        ("hermes", f"{TO_A}</tool_call>{TO_B}", TO_B, [A]),
        ("hermes", f"{TO_A} well </tool_call> so <tool_call>{TO_B}</tool_call>", " well  so ", [A, B]),
        ("hermes", f'{TO_A}\n{{"x": 1}}</tool_call>', '\n{"x": 1}', [A]),
        ("hermes", f"{TO_A}</tool_", "</tool_", [A]),
        ("llama", f"{TO_B}; {TO_B} and so", " and so", [B, B]),
        ("llama", f"{TO_B[:-1]}, why? }}", ", why? }", [B]),
        ("mistral", f"[TOOL_CALLS][{TO_B}, {TO_B}] so [TOOL_CALLS]a{{}}", " so ", [B, B, A]),
        ("mistral", f"[TOOL_CALLS][{TO_B}, 5]", ", 5]", [B]),
        ("qwen3_coder", f"{CODER} so {CODER}\n</tool_call>", " so ", [A, A]),
        ("qwen3_coder", "<tool_call><function=a></tool_call><function=b></function>", "", [A, B]),
        ("qwen3_coder", "<tool_call>so <function=a>this</function></tool_call>", "so this", [A]),
        ("openai", f"{COMMENTARY}a<|message|><|start|>assistant{COMMENTARY}b<|message|>{{}}", "", [A, B]),
        ("openai", "<|channel|>analysis<|end|><|start|>assistant<|channel|>final<|message|>so", "so", []),
        ("openai", "<|channel|>final so it is", "<|channel|>final so it is", []),
        ("pythonic", "[a(), b(x=1e999)]", "[a(), b(x=1e999)]", []),
        ("pythonic", "[a(x=1, x=2)]", "[a(x=1, x=2)]", []),
        ("pythonic", "[a(x={'y': -1e999})]", "[a(x={'y': -1e999})]", []),
        ("forced", f"[{TO_B}, {TO_B[:9]}", f", {TO_B[:9]}", [B]),
    ],
)
def test_what_follows_a_call_is_found(name: str, text: str, content: str, calls: list[tuple[str, object]]) -> None:
    for pieces in ([text], list(text)):
        assert parse(FORMS[name].new_parser(), pieces) == ("", content, calls)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        *(("hermes", f'<tool_call>{{"name": "a", "arguments": {each}}}</tool_call>') for each in ("null", '""', '" "')),
        ("hermes", '<tool_call>{"arguments": null, "name": "a"}</tool_call>'),
        ("hermes", '<tool_call>{"name": "a"}</tool_call>'),
        *(("llama", f'{{"name": "a", "parameters": {each}}}') for each in ("null", '""', '"null"')),
        *(("mistral", f"[TOOL_CALLS]a[ARGS]{each}") for each in ("", " ", "null", "{}", "null\n")),
        ("mistral", "[TOOL_CALLS]a[CALL_ID]123[ARGS]"),
        ("mistral", '[TOOL_CALLS][{"name": "a", "arguments": null}]'),
        ("qwen3_coder", "<function=a></function>"),
        ("pythonic", "[a()]"),
        *(("openai", f"{COMMENTARY}a<|message|>{each}<|call|>") for each in ("", " \n", "null", " null ", "{}")),
        ("openai", f"{COMMENTARY}a<|message|>"),
        ("forced", '[{"name": "a", "parameters": null}]'),
    ],
)
def test_no_arguments_are_an_empty_object(name: str, text: str) -> None:
    for pieces in ([text], list(text)):
        content, (call,) = whole_calls(parts_of(FORMS[name].new_parser(), pieces))
        assert (content, call.name, call.arguments) == ("", "a", "{}")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", '<tool_call>{"name": "a", "arguments": [1]}</tool_call>'),
        ("hermes", '<tool_call>{"name": "a", "arguments": "why"}</tool_call>'),
        ("hermes", '<tool_call>{"name": "", "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"arguments": {"x": NaN}, "name": "a"}</tool_call>'),
        ("mistral", "[TOOL_CALLS]a[ARGS]why"),
        ("mistral", "[TOOL_CALLS]a[ARGS]nul"),
        ("qwen3_coder", "<function=></function>"),
        ("pythonic", "[a(**{'x': 1})]"),
        ("pythonic", "[a().b()]"),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": [1, 2'),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": }}</tool_call>'),
        ("hermes", "<tool_call>x</tool_call>"),
        ("llama", '{"name": "f", "parameters": {"a": '),
        ("llama", '{"a": 1}'),
        ("llama", '<|python_tag|>{"a": 1} and so'),
        ("mistral", '[TOOL_CALLS]f[ARGS]{"a": '),
        ("mistral", "[TOOL_CALLS] of several words"),
        ("pythonic", "[f(a=1), g(b="),
        ("pythonic", "[f(a=open)]"),
        ("pythonic", "[f(1)]"),
        ("qwen3_coder", "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<par"),
        ("qwen3_coder", "<tool_call>x</tool_call>"),
    ],
)
def test_incomplete_calls_and_those_without_a_name_or_an_object_are_content(name: str, text: str) -> None:
    for pieces in ([text], list(text)):
        assert parse(FORMS[name].new_parser(), pieces) == ("", text, [])


def test_a_message_to_a_function_that_is_no_object_is_content() -> None:
    for text in ("5", "why", "nul", '"{}"'):
        parts = parts_of(HarmonyParser(has_calls=True), [f"{COMMENTARY}a<|message|>{text}<|call|>"])
        assert whole_calls(parts) == (f"{COMMENTARY}a<|message|>{text}", [])
