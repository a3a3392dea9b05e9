"""The arguments of one tool, key by key, for forms of calls that write each by itself."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from .....ipc.errors import RequestError
from ..schemas.alternatives import Alternatives
from ..schemas.schema import Schema
from .lark_rules import LarkRules, quoted
from .notation import OTHER_NAME
from .text_terminal import conditions

TOO_MANY = (
    "structured_outputs.json: a schema combines too many alternatives for the form of this model's calls: name fewer "
    "in anyOf, oneOf or allOf"
)


class Pair(NamedTuple):
    """An argument: an expression for its key, its name for joints that repeat it, the schema of its value."""

    key: str
    name: str
    schema: object
    is_required: bool


def flat_objects(alternatives: Alternatives, root: Schema) -> list[Schema]:
    """Return schemas without references and unions, each for some of the arguments that conform to `root`. RequestError
    for counts of keys, and if there are too many alternatives."""
    found = alternatives.of(root)
    objects = [None] if found is None else [alternatives.joined(each) for each in found]
    if None in objects:
        raise RequestError(TOO_MANY)
    flat = [each for each in objects if isinstance(each, dict)]
    for each in flat:
        if each.get("minProperties", 0) > len(each.get("required", ())) or "maxProperties" in each:
            raise RequestError(
                "structured_outputs.json: minProperties and maxProperties of the arguments are not served in the form "
                "of this model's calls: leave them out"
            )
    return flat


def pairs_of(schema: Schema, rules: LarkRules) -> Iterator[Pair]:
    """Yield the arguments that a flat schema names, in its order, and then others, which may be repeated."""
    others = schema.get("additionalProperties", True)
    required = dict.fromkeys(schema.get("required", ()))
    properties: Schema = schema.get("properties", {})
    properties = properties | {name: others for name in required if name not in properties}
    for name, part in properties.items():
        yield Pair(quoted(name), name, part, name in required)
    taken = " | ".join(map(quoted, properties))
    free = f"{OTHER_NAME} & ~({taken})" if taken else OTHER_NAME
    for pattern, part in schema.get("patternProperties", {}).items():
        yield Pair(rules.terminal(" & ".join([free, *conditions({"pattern": pattern})])), "", part, False)
    if others is not False:
        yield Pair(rules.terminal(free), "", others, False)


def any_of(options: Iterable[str | None]) -> str | None:
    """Return an expression for any of some others; None if there are none."""
    found = list(dict.fromkeys(each for each in options if each is not None))
    return f"({' | '.join(found)})" if found else None
