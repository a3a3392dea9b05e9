"""The arguments of one tool, key by key, for forms of calls that write each by itself."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from .....ipc.errors import RequestError
from .....ipc.params.json_schema import subschemas
from ..schemas.alternatives import Alternatives
from ..schemas.key_pattern import KeyPatterns
from ..schemas.object_keys import named_values, other_keys
from ..schemas.schema import Schema
from .lark_rules import LarkRules, quoted
from .notation import other_name

MAX_ALTERNATIVES = 1024  # of a schema that becomes rules of its own
_UNSERVED = (  # keywords that limit values, where json_schema.py could not replace them
    "not",
    "contains",
    "propertyNames",
    "dependentRequired",
    "dependentSchemas",
    "dependencies",
    "$dynamicRef",
)


class Pair(NamedTuple):
    """An argument: its name, and expressions for its key with the schemas of their values. Without a name it is any of
    the arguments that a schema does not name, and may be repeated."""

    name: str
    choices: list[tuple[str, object]]
    is_required: bool


def flat_objects(alternatives: Alternatives, root: Schema) -> list[Schema]:
    """Return schemas without references and unions, each for some of the arguments that conform to `root`. RequestError
    as `joined_alternatives`, and for a keyword in any part of the root that cannot be served."""
    todo: list[tuple[str, object]] = [("", root)]
    while todo:
        pointer, schema = todo.pop()
        if isinstance(schema, dict) and (unserved := next((each for each in _UNSERVED if each in schema), None)):
            raise RequestError(
                f"structured_outputs.json at #{pointer}: this {unserved} is not served in the form of this model's "
                "calls: leave it out"
            )
        todo += [(pointer + step, part) for step, part in subschemas(schema)]
    return joined_alternatives(alternatives, root)


def joined_alternatives(alternatives: Alternatives, schema: object) -> list[Schema]:
    """Return schemas without references and unions, each for some of the values that conform to `schema`. RequestError
    if there are too many, or if one cannot be written as one schema."""
    found = alternatives.of(schema)
    if found is None:
        raise RequestError(
            f"structured_outputs.json: a schema joins more than {MAX_ALTERNATIVES} alternatives, or refers to itself "
            "in anyOf, oneOf or allOf, which the form of this model's calls does not allow: name fewer alternatives"
        )
    joined: list[Schema] = []
    for parts in found:
        each = alternatives.joined(parts)
        if each is None:
            names = ", ".join(sorted({name for part in parts for name in part}))
            raise RequestError(
                f"structured_outputs.json: {names} together cannot be written in the form of this model's calls: leave "
                "one out, or put those of allOf into one schema"
            )
        joined += [] if each is False else [each]
    return joined


def pairs_of(schema: Schema, rules: LarkRules) -> Iterator[Pair]:
    """Yield the arguments that a flat schema names, in its order, and then all others, if there are any."""
    required = dict.fromkeys(schema.get("required", ()))
    values = named_values(schema, KeyPatterns())
    for name, part in values.items():
        yield Pair(name, [(quoted(name), part)], name in required)
    allowed = (keys for keys in other_keys(schema) if keys.schema is not False)
    others = [(rules.terminal(other_name(values, keys)), keys.schema) for keys in allowed]
    if others:
        yield Pair("", others, False)


def any_of(options: Iterable[str | None]) -> str | None:
    """Return an expression for any of some others; None if there are none."""
    found = list(dict.fromkeys(each for each in options if each is not None))
    return f"({' | '.join(found)})" if found else None
