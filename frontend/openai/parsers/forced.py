"""Parse answers that a schema forces to be calls: the arguments of one function, or a list of {name, parameters}."""

from __future__ import annotations

from ....ipc.codec import JsonObject
from ....ipc.json_schema import moved
from .json_calls import CallListReader
from .parts import Arguments, CallBegin, CallEnd, Content, Part


class ForcedParser:
    """Parser of one forced answer. Its parts never hold content, even if the answer is incomplete."""

    def __init__(self, name: str | None) -> None:
        """`name`: the forced function; None if the answer is a list of calls."""
        self._name = name
        self._has_begun = False
        self._calls = CallListReader("[,] \n\t")

    def append(self, text: str) -> list[Part]:
        if self._name is None:
            return _without_content(self._calls.append(text))
        begin: list[Part] = [] if self._has_begun or not text else [CallBegin(self._name)]
        self._has_begun |= bool(text)
        return [*begin, Arguments(text)] if text else []

    def finish(self) -> list[Part]:
        if self._name is None:
            return _without_content(self._calls.finish())
        return [CallEnd("")] if self._has_begun else []


def _without_content(parts: list[Part]) -> list[Part]:
    return [CallEnd("") if isinstance(part, CallEnd) else part for part in parts if not isinstance(part, Content)]


def forcing_schema(parameters_by_name: dict[str, JsonObject], name: str | None, *, is_parallel: bool) -> JsonObject:
    """Return the schema of a forced answer: arguments of `name`; if None, a list of calls, one unless `is_parallel`."""
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
