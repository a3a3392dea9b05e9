"""Model families of each form of calls: a chat template, and two turns that such a model writes.

The first turn answers `QUESTION` with two calls, the second the calls' results.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from tokenloom.tests.support.scripted_worker import Script
from tokenloom.tests.support.template_shapes import template_of
from tokenloom.tests.system.scripted_engine import ScriptedEngine

QUESTION, RESULT, ANSWER = "How warm is it in Lima?", "17 degrees", "It is 17 degrees."
LIMA: dict[str, Any] = {"city": 'Lima, "Perú"', "days": 3, "unit": "celsius", "places": ["the port", "{2}"]}
CUSCO: dict[str, Any] = {"city": "Cusco", "days": 1, "unit": "fahrenheit", "places": []}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "unit": {"enum": ["celsius", "fahrenheit"]},
        "places": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["city", "days", "unit", "places"],
    "additionalProperties": False,
}
CALLS = [["weather", LIMA], ["weather", CUSCO]]
THOUGHT = "Two cities are near."
SAID = "Let me see."


class ToolForm(msgspec.Struct, frozen=True, kw_only=True):
    template: str  # of tests/fixtures/templates
    first: str  # the turn with the calls
    markers: list[str]  # special tokens
    end: str  # of a turn
    second: str = ANSWER
    thought: str | None = None  # of the first turn
    said: str = ""  # content of the first turn
    ids: list[str] | None = None  # of the calls; None: the form has none

    @property
    def scripts(self) -> list[Script]:
        return [Script(QUESTION, self.first), Script(RESULT, self.second)]

    def start(self, runtime: Path, *options: str) -> ScriptedEngine:
        return ScriptedEngine(runtime, template_of(self.template), self.scripts, self.markers, self.end, *options)


def _json(arguments: dict[str, Any]) -> str:
    return json.dumps(arguments, ensure_ascii=False)


def _hermes(arguments: dict[str, Any]) -> str:
    return f'<tool_call>\n{{"name": "weather", "arguments": {_json(arguments)}}}\n</tool_call>'


def _tags(arguments: dict[str, Any]) -> str:
    pairs = "".join(
        f"<arg_key>{key}</arg_key>\n<arg_value>{value if isinstance(value, str) else _json(value)}</arg_value>\n"
        for key, value in arguments.items()
    )
    return f"\n<tool_call>weather\n{pairs}</tool_call>"


def _python(arguments: dict[str, Any]) -> str:
    values = {key: f"'{value}'" if isinstance(value, str) else _json(value) for key, value in arguments.items()}
    return f"weather({', '.join(f'{key}={value}' for key, value in values.items())})"


def _placed(place: int, arguments: dict[str, Any]) -> str:
    begin = f"<|tool_call_begin|>functions.weather:{place}<|tool_call_argument_begin|>"
    return f"{begin}{_json(arguments)}<|tool_call_end|>"


FORMS = {
    "object": ToolForm(
        template="object/hermes",
        first=f"{SAID}\n{_hermes(LIMA)}\n{_hermes(CUSCO)}",
        said=SAID,
        markers=["<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>"],
        end="<|im_end|>",
    ),
    "json": ToolForm(
        template="json/marker_and_id",
        first="".join(
            f"[TOOL_CALLS]weather[CALL_ID]{each}[ARGS]{_json(arguments)}"
            for each, arguments in (("aB3dE6gH9", LIMA), ("k2M4p6R8t", CUSCO))
        ),
        ids=["aB3dE6gH9", "k2M4p6R8t"],
        markers=["[INST]", "[/INST]", "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"],
        end="<|eos|>",
    ),
    "tagged": ToolForm(
        template="tagged/key_value",
        first=f"\n<think>{THOUGHT}</think>\n{SAID}{_tags(LIMA)}{_tags(CUSCO)}",
        second=f"\n<think></think>\n{ANSWER}",
        thought=THOUGHT,
        said=SAID,
        markers=[
            "<tool_call>",
            "</tool_call>",
            "<arg_key>",
            "</arg_key>",
            "<arg_value>",
            "</arg_value>",
            "<|observation|>",
        ],
        end="<|observation|>",
    ),
    "literal": ToolForm(
        template="literal/python_calls",
        first=f"<|tool_call_start|>[{_python(LIMA)}, {_python(CUSCO)}]<|tool_call_end|>",
        markers=["<|im_start|>", "<|im_end|>", "<|tool_call_start|>", "<|tool_call_end|>"],
        end="<|im_end|>",
    ),
    "thoughts": ToolForm(
        template="json/place_and_thoughts",
        first=(
            f"<think>{THOUGHT}</think><|tool_calls_section_begin|>{_placed(0, LIMA)}{_placed(1, CUSCO)}"
            "<|tool_calls_section_end|>"
        ),
        second=f"<think>It is known.</think>{ANSWER}",
        thought=THOUGHT,
        ids=["functions.weather:0", "functions.weather:1"],
        markers=[
            *("<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>", "<|im_end|>", "<think>", "</think>"),
            *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>"),
            *("<|tool_call_argument_begin|>", "<|tool_call_end|>"),
        ],
        end="<|im_end|>",
    ),
}
