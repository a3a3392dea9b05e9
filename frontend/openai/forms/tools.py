"""Tool calls in an answer's text, as the models write them, made into OpenAI's objects.

    hermes (Qwen)   <tool_call>{"name": …, "arguments": {…}}</tool_call>, any number of them
    llama           the whole answer is {"name": …, "parameters": {…}}, more of them after a semicolon

A call is told when it is complete; text before the first one is content. What looks like a call and is none stays
content, so that nothing a model wrote is lost.
"""

from __future__ import annotations

import json
import secrets
from typing import Literal, Protocol

import msgspec

from ....ipc.codec import JsonObject
from ....ipc.json_schema import moved

OPENING, CLOSING = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"

ParserName = Literal["hermes", "llama", "none"]


class ToolUse(msgspec.Struct, frozen=True):
    """A call of a function: its name and its arguments as JSON text."""

    id: str
    name: str
    arguments: str

    def to_json(self) -> JsonObject:
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


class ToolParser(Protocol):
    """`append` and `finish` return (content, calls that are complete)."""

    def append(self, text: str) -> tuple[str, list[ToolUse]]: ...

    def finish(self) -> tuple[str, list[ToolUse]]: ...


class HermesParser:
    """Calls between markers. White space after a call is content only if other content follows it."""

    def __init__(self) -> None:
        self._held = ""
        self._is_after_call = False
        self._space = ""  # since that call

    def append(self, text: str) -> tuple[str, list[ToolUse]]:
        self._held += text
        content = ""
        calls: list[ToolUse] = []
        while True:
            before, opening, rest = self._held.partition(OPENING)
            if not opening:
                keep = held_back(self._held, OPENING)
                content += self._outside(self._held[: len(self._held) - keep])
                self._held = self._held[len(self._held) - keep :]
                return content, calls
            content += self._outside(before)
            inside, closing, after = rest.partition(CLOSING)
            if not closing:
                self._held = opening + rest
                return content, calls
            call = read_call(inside)
            if call is None:
                content += self._outside(opening + inside + closing)
            else:
                calls.append(call)
                self._is_after_call, self._space = True, ""
            self._held = after

    def finish(self) -> tuple[str, list[ToolUse]]:
        """A last call whose closing marker never came counts if its JSON is whole."""
        held, self._held = self._held, ""
        call = read_call(held.removeprefix(OPENING)) if held.startswith(OPENING) else None
        if call is not None:
            return "", [call]
        return self._outside(held), []

    def _outside(self, text: str) -> str:
        """What is known to be content once this text has come."""
        if not self._is_after_call:
            return text
        text, self._space = self._space + text, ""
        if text.strip():
            self._is_after_call = False
            return text
        self._space = text
        return ""


class LlamaParser:
    """The answer is a call, or several, if it begins as JSON does; else it is content."""

    def __init__(self) -> None:
        self._held = ""
        self._is_content = False

    def append(self, text: str) -> tuple[str, list[ToolUse]]:
        if self._is_content:
            return text, []
        self._held += text
        begun = self._held.lstrip()
        if not begun or begun[0] == "{" or PYTHON_TAG.startswith(begun[: len(PYTHON_TAG)]):
            return "", []
        self._is_content = True
        held, self._held = self._held, ""
        return held, []

    def finish(self) -> tuple[str, list[ToolUse]]:
        held, self._held = self._held, ""
        calls = _read_calls(held.strip().removeprefix(PYTHON_TAG))
        return ("", calls) if calls else (held, [])


def _read_calls(text: str) -> list[ToolUse]:
    """Calls with semicolons or white space between them; none if anything else is there."""
    decoder, position = json.JSONDecoder(), 0
    calls: list[ToolUse] = []
    while position < len(text):
        try:
            value, position = decoder.raw_decode(text, position)
        except (ValueError, RecursionError):
            return []
        call = _to_use(value)
        if call is None:
            return []
        calls.append(call)
        while position < len(text) and text[position] in "; \n\t":
            position += 1
    return calls


def read_call(text: str) -> ToolUse | None:
    """The call that `text` is, in whichever of the two spellings."""
    try:
        return _to_use(json.loads(text))
    except (ValueError, RecursionError):
        return None


def _to_use(value: object) -> ToolUse | None:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        written = arguments
    elif isinstance(arguments, dict):
        written = json.dumps(arguments, ensure_ascii=False)
    else:
        return None
    return ToolUse(f"call_{secrets.token_hex(12)}", value["name"], written)


def held_back(text: str, marker: str) -> int:
    """How many characters at the end of `text` may be the beginning of `marker`."""
    return next((n for n in range(min(len(text), len(marker) - 1), 0, -1) if marker.startswith(text[-n:])), 0)


def new_parser(name: ParserName) -> ToolParser | None:
    if name == "hermes":
        return HermesParser()
    return LlamaParser() if name == "llama" else None


def find_parser(template: str) -> ParserName:
    """The form that a chat template shows its model; none if it says nothing of tools."""
    if OPENING in template:
        return "hermes"
    if "tools" in template:
        return "llama" if "parameters" in template or "python_tag" in template else "hermes"
    return "none"


class ForcedParser:
    """For an answer that a schema forces to be calls: `name` and its arguments, or a list of {name, parameters}."""

    def __init__(self, name: str | None) -> None:
        self._name = name
        self._held = ""

    def append(self, text: str) -> tuple[str, list[ToolUse]]:
        self._held += text
        return "", []

    def finish(self) -> tuple[str, list[ToolUse]]:
        held, self._held = self._held.strip(), ""
        if self._name is not None:
            return "", [ToolUse(f"call_{secrets.token_hex(12)}", self._name, held)]
        try:
            values = json.loads(held)
        except ValueError:  # the answer was cut short
            return held, []
        calls = [_to_use(value) for value in values] if isinstance(values, list) else []
        return "", [call for call in calls if call is not None]


def forcing_schema(parameters_by_name: dict[str, JsonObject], name: str | None, *, is_parallel: bool) -> JsonObject:
    """The schema that an answer must meet to be calls, as ForcedParser reads them."""
    if name is not None:
        return {"type": "object"} | parameters_by_name[name]
    definitions = {
        f"f{i}": {"type": "object"} | moved(each, f"#/$defs/f{i}") for i, each in enumerate(parameters_by_name.values())
    }
    forms: list[JsonObject] = [
        {
            "type": "object",
            "properties": {"name": {"const": each}, "parameters": {"$ref": f"#/$defs/f{i}"}},
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        for i, each in enumerate(parameters_by_name)
    ]
    schema: JsonObject = {"type": "array", "minItems": 1, "items": {"anyOf": forms}, "$defs": definitions}
    return schema if is_parallel else schema | {"maxItems": 1}
