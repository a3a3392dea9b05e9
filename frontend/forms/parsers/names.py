"""Find the form of answers by the texts in a chat template, and the parsers of a form."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import TypeAlias

import msgspec

from ....ipc.codec import JsonObject
from ..answer_forms.form import AnswerForm, Spaces
from ..answer_forms.named import HARMONY, THOUGHTS, named_form
from .families.harmony import CHANNEL, HarmonyParser
from .families.llama import LlamaParser
from .machine import AnswerMachine
from .parts import Parser
from .response_templates.reader import ResponseTemplateParser
from .whole_answer import WholeCalls

Schemas: TypeAlias = Mapping[str, JsonObject]  # name of a tool → schema of its arguments
_TOOL_SIGNS = (  # text in a template, and the parser that it implies; the first match wins
    (CHANNEL, "openai"),
    ("[TOOL_CALLS]", "mistral"),
    ("<function=", "qwen3_coder"),
    ("<tool_call>", "hermes"),
    ("<function_calls>", "olmo3"),
    ("<|tool_call|>", "granite"),
    ("<|tool_list_start|>", "lfm2"),
    ("List of tools: [", "lfm2"),
    ("<|python_start|>", "pythonic"),
    ("[func_name1(", "pythonic"),
)


def find_tool_parser(template: str) -> str:
    """Return the name of the parser for the format of tool calls in a chat template.

    Without a known marker it is `llama` for a template with the words tools and parameters, or tools and python_tag,
    otherwise `hermes`. If a template has no place for tools, `text/generic_tools.py` writes them in the form of Hermes.
    """
    named = next((name for sign, name in _TOOL_SIGNS if sign in template), None)
    if named is not None:
        return named
    is_llamas = "tools" in template and ("parameters" in template or "python_tag" in template)
    return "llama" if is_llamas else "hermes"


def find_reasoning_parser(template: str) -> str:
    if CHANNEL in template:
        return HARMONY
    named = (name for name, markers in THOUGHTS.items() if any(each in template for each in markers))
    return next(named, "none")


def find_form(template: str, tool_parser: str = "auto", reasoning_parser: str = "auto") -> AnswerForm:
    """Return the form of answers by the names of the options or, where they are auto, by texts in a chat template."""
    if tool_parser == "auto":
        tool_parser = find_tool_parser(template)
    if reasoning_parser == "auto":
        reasoning_parser = find_reasoning_parser(template)
    return named_form(tool_parser, reasoning_parser)


def new_parsers(form: AnswerForm, schemas: Schemas, *, is_inside_thought: bool) -> list[Parser]:
    """Return the parsers of one answer, in order; each parses the content that the one before it returned. `schemas`:
    name of a tool → schema of its arguments; `is_inside_thought`: the answer begins inside a thought."""
    if form.reader == "response_template":
        return [ResponseTemplateParser(form.response_template, schemas, is_inside_thought=is_inside_thought)]
    if form.reader == "harmony":
        return [HarmonyParser(has_calls=form.name != "none")]
    parsers: list[Parser] = []
    if form.thought is not None or form.content_open:
        thoughts = msgspec.structs.replace(form, calls=())
        parsers.append(AnswerMachine(thoughts, {}, is_inside_thought=is_inside_thought))
    if form.reader == "llama":
        return [*parsers, LlamaParser()]
    if not all(map(_has_word, (call.start for call in form.calls))):
        spaces = Spaces(calls=form.spaces.calls)  # the parser of thoughts drops the others
        calls = msgspec.structs.replace(form, thought=None, content_open="", spaces=spaces)
        return [*parsers, WholeCalls(AnswerMachine(calls, schemas))]
    if form.calls:
        return [AnswerMachine(form, schemas, is_inside_thought=is_inside_thought)]
    return parsers


@lru_cache(maxsize=256)
def _has_word(start: str) -> bool:
    """Return whether the start of a call has more than signs, which any text may hold."""
    return any(map(str.isalnum, start))
