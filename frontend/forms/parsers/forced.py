"""Parse answers that a schema forces to be calls: the arguments of one function, or a list of {name, parameters}."""

from __future__ import annotations

from ....ipc.codec import JsonObject
from ....ipc.params.json_schema import moved
from .json_calls import CallListReader
from .parts import Arguments, CallBegin, CallEnd, Part, content


class ForcedParser:
    """Parser of one forced answer. If the answer ends inside the arguments of a call, `whole_calls` returns that call
    as content."""

    markers = ()

    def __init__(self, name: str | None) -> None:
        """`name`: the forced function; None if the answer is a list of calls."""
        self._name = name
        self._raw: list[str] = []  # text of the named function's call
        self._calls = CallListReader("[,] \n\t")

    def append(self, text: str) -> list[Part]:
        if self._name is None:
            return content(text) if self._calls.is_over else self._read_list(text)
        begin: list[Part] = [] if self._raw or not text else [CallBegin(self._name)]
        self._raw += [text] if text else []
        return [*begin, Arguments(text)] if text else []

    def finish(self) -> list[Part]:
        if self._name is None:
            return self._calls.finish()
        return [CallEnd("".join(self._raw))] if self._raw else []

    def _read_list(self, text: str) -> list[Part]:
        parts, calls = self._calls.append(text), self._calls
        return [*parts, *content(calls.before + calls.rest)] if calls.is_over else parts


def forcing_schema(parameters_by_name: dict[str, JsonObject], name: str | None, *, is_parallel: bool) -> JsonObject:
    """Return the schema of a forced answer: the arguments of the function `name` or, if that is None, a list of calls,
    with exactly one call unless `is_parallel`."""
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
