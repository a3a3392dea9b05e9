"""Probes: answers to put through a chat template, and the conversation that shows one answer.

Names, keys, ids and texts of the probes are sentinels: they occur in no template, so that they are found in a rendering
without doubt. Knows no template and no form.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from ....ipc.codec import JsonObject
from ....ipc.messages.client import ChatMessage

VERSION = 10  # of probes, learning and history: choices of another version are made again
USER = "Zquser"
CONTENT = "Zqcontent"
THOUGHT = "Zqthought"
NAMES = ("zqa_name", "zqb_name", "zqc_name")
KEYS = ("zqa_key", "zqb_key")  # in alphabetical order, since some templates sort keys
IDS = ("zqId00001", "zqId00002", "zqId00003")  # nine letters and digits, which some templates demand
NAMED_ID = "functions.{NAME}:{INDEX}"  # form of ids that hold the name of their call
VALUES: dict[str, JsonObject] = {
    "string": {"type": "string", "description": "text"},
    "number": {"type": "number", "description": "number"},
    "boolean": {"type": "boolean", "description": "flag"},
    "null": {"type": "null", "description": "nothing"},
    "array": {"type": "array", "description": "list", "items": {"type": "string", "description": "item"}},
    "object": {"type": "object", "description": "object", "properties": {}, "additionalProperties": True},
}


class ProbeCall(NamedTuple):
    name: str
    arguments: JsonObject


class ProbeAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """An answer as its parts. `calls` are in the order of the template."""

    thought: str = ""
    content: str = ""
    calls: tuple[ProbeCall, ...] = ()

    def messages(self, *, has_named_ids: bool = False, ids: tuple[str, ...] = IDS) -> list[ChatMessage]:
        """Return the conversation with a user's turn and this answer. `ids`: those of the calls. `has_named_ids`: they
        are in the form of NAMED_ID instead."""
        more: JsonObject = {}
        content: str | None = self.content
        if self.thought:
            more["reasoning_content"] = self.thought
        if self.calls:
            content = self.content or None
            named = [call_id(index, call.name) for index, call in enumerate(self.calls)]
            more["tool_calls"] = [
                {"id": given, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for given, call in zip((ids, named)[has_named_ids], self.calls, strict=False)
            ]
        return [ChatMessage("user", USER), ChatMessage("assistant", content, more)]


class Probe(NamedTuple):
    name: str
    answer: ProbeAnswer


def call_id(index: int, name: str) -> str:
    """Return an id in the form of NAMED_ID."""
    return NAMED_ID.replace("{NAME}", name).replace("{INDEX}", str(index))


def tools(answer: ProbeAnswer | None = None) -> list[JsonObject]:
    """Return the three functions of the probes, in OpenAI's form. Keys have the types that they have in the calls of
    `answer`; others are texts."""
    return [tool(name, schema) for name, schema in schemas(answer).items()]


def tool(name: str, schema: JsonObject) -> JsonObject:
    """Return a function in OpenAI's form."""
    return {"type": "function", "function": {"name": name, "description": "a function", "parameters": schema}}


def schemas(answer: ProbeAnswer | None = None) -> dict[str, JsonObject]:
    """Return the schema of each function's arguments, as `tools` has them."""
    types = {(name, key): "string" for name in NAMES for key in KEYS}
    if answer is not None:
        types |= {(call.name, key): type_of(value) for call in answer.calls for key, value in call.arguments.items()}
    return {name: schema_of({key: VALUES[types[name, key]] for key in KEYS}) for name in NAMES}


def schema_of(keys: dict[str, JsonObject]) -> JsonObject:
    """Return the schema of a function's arguments, with all that some templates fail without: a description, required
    keys and additionalProperties."""
    return {
        "type": "object",
        "properties": keys,
        "required": list(keys),
        "additionalProperties": False,
        "description": "arguments",
    }


def type_of(value: object) -> str:
    """Return the name of a value's type in JSON schemas."""
    if isinstance(value, bool):
        return "boolean"
    names = {str: "string", int: "number", float: "number", list: "array", dict: "object"}
    return names.get(type(value), "null")


def _call(index: int, *values: object) -> ProbeCall:
    return ProbeCall(NAMES[index], dict(zip(KEYS, values, strict=False)))


_ONE = (_call(0, "Zqone", 73571),)
_NESTED = {"list": [1, True, None, {"deep": "a \"b\" 'c' \\ d"}], "letters": "äß 字 🙂", "empty": {}}
PROBES = (
    Probe("one call", ProbeAnswer(calls=_ONE)),
    Probe("two calls", ProbeAnswer(calls=(*_ONE, _call(1, "Zqtwo", "two words")))),
    Probe("three calls", ProbeAnswer(calls=(*_ONE, _call(1, "Zqtwo"), _call(2, "Zqthree", False)))),
    Probe("calls without arguments", ProbeAnswer(calls=(_call(0), _call(1)))),
    Probe("nested values", ProbeAnswer(calls=(_call(0, "Zqone", _NESTED), _call(1, ["x", 2.5], 'it\'s "quoted" ✓')))),
    Probe("line breaks", ProbeAnswer(calls=(_call(0, "first line\n  second\n\nlast", "Zqtwo"),))),
    Probe("content beside calls", ProbeAnswer(content=CONTENT, calls=(*_ONE, _call(1, "Zqtwo")))),
    Probe("thought beside calls", ProbeAnswer(thought=THOUGHT, calls=(*_ONE, _call(1, "Zqtwo")))),
    Probe("content alone", ProbeAnswer(content=CONTENT)),
    Probe("thought and content", ProbeAnswer(thought=THOUGHT, content=CONTENT)),
)
MINOR = frozenset(("nested values", "line breaks"))  # a form that fails at these alone is used, and the line says so
