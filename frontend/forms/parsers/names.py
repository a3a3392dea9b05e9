"""Find parsers by the names of --tool-call-parser and --reasoning-parser, or by the markers in a chat template."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

from ....ipc.codec import JsonObject
from .harmony import CHANNEL, HarmonyParser
from .hermes import OPENING, HermesParser
from .llama import LlamaParser
from .mistral import MARKER, MistralParser
from .parts import Parser
from .pythonic import START, PythonicParser
from .qwen3_coder import FUNCTION, Qwen3CoderParser
from .thoughts import MARKERS, ThoughtParser

Schemas: TypeAlias = Mapping[str, JsonObject]  # name of a tool → schema of its arguments
TOOL_PARSERS: dict[str, Callable[[Schemas], Parser]] = {
    "hermes": lambda _: HermesParser(),
    "llama": lambda _: LlamaParser(),
    "mistral": lambda _: MistralParser(),
    "pythonic": lambda _: PythonicParser(),
    "qwen3_coder": Qwen3CoderParser,
    "openai": lambda _: HarmonyParser(has_calls=True),
}
HARMONY = "gpt_oss"
_TOOL_SIGNS = (  # text in a template, and the parser that it implies; the first match wins
    (CHANNEL, "openai"),
    (MARKER, "mistral"),
    (FUNCTION, "qwen3_coder"),
    (OPENING, "hermes"),
    (START, "pythonic"),
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
    named = (name for name, markers in MARKERS.items() if any(each in template for each in markers))
    return next(named, "none")


def new_parsers(tool_parser: str, reasoning_parser: str, schemas: Schemas, *, is_inside_thought: bool) -> list[Parser]:
    """Return the parsers of one answer, in order; each parses the content that the one before it returned."""
    has_calls = tool_parser != "none"
    if reasoning_parser == HARMONY or tool_parser == "openai":
        return [HarmonyParser(has_calls=has_calls)]
    parsers: list[Parser] = []
    if reasoning_parser != "none":
        parsers.append(ThoughtParser(reasoning_parser, is_open=is_inside_thought))
    return [*parsers, TOOL_PARSERS[tool_parser](schemas)] if has_calls else parsers
