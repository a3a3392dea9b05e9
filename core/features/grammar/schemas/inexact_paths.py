"""Numbers of a schema that the grammar library would round: which parts contain them, and a schema without them."""

from __future__ import annotations

from .....ipc.params.json_schema import at_pointer, subschemas
from .exact_numbers import BOUNDS, inexact_number, is_number, narrowed
from .schema import DEFINITIONS, TYPES, UNIONS, VALUES, Schema, listed

REST = {"object": "additionalProperties", "array": "items"}  # keywords for values that have no schema of their own


def paths_to_inexact(root: Schema, *, has_finite_numbers: bool = False) -> tuple[set[int], bool]:
    """Return the ids of all schemas that have, or contain at any depth, a number that would be rounded; with
    `has_finite_numbers` also of those whose values may be, or contain, numbers without bounds. If there are any,
    schemas that contain a reference are added, since its target would be repeated wherever it is named; and those that
    contain `false`, which the library refuses in a schema of its own. Second: whether the schema has references other
    than pointers into the root."""
    has_other_references = False
    outer_by_id: dict[int, list[int]] = {}
    todo, found, others = [root], list[int](), list[int]()
    while todo:
        schema = todo.pop()
        inner = [part for step, part in subschemas(schema) if step.split("/")[1] not in DEFINITIONS]
        if "$ref" in schema:
            inner.append(at_pointer(root, str(schema["$ref"])))
            has_other_references |= not f"{schema['$ref']}/".startswith("#/")
        has_other_references |= "$id" in schema and schema is not root
        if _is_inexact(schema) or (has_finite_numbers and has_free_numbers(schema)):
            found.append(id(schema))
        if "$ref" in schema or any(part is False for part in inner):
            others.append(id(schema))
        for part in inner:
            if isinstance(part, dict):
                if id(part) not in outer_by_id:
                    todo.append(part)
                outer_by_id.setdefault(id(part), []).append(id(schema))
    ways: set[int] = set()
    if found:
        found += others
    while found:
        if (each := found.pop()) not in ways:
            ways.add(each)
            found += outer_by_id.get(each, ())
    return ways, has_other_references


def _is_inexact(schema: Schema) -> bool:
    return any(inexact_number(schema.get(name)) is not None for name in VALUES) or narrowed(schema) != schema


def has_free_numbers(schema: Schema) -> bool:
    """Return whether values of a schema may be numbers without bounds, or contain them where it has no schema."""
    if not schema.keys().isdisjoint(("$ref", "allOf", *UNIONS, *VALUES)):
        return False  # their own schemas say it
    types = listed(schema.get("type", TYPES))
    is_free = "number" in types and schema.keys().isdisjoint((*BOUNDS, "multipleOf"))
    return is_free or any(name in types and schema.get(inner, True) is True for name, inner in REST.items())


def without_inexact(schema: Schema) -> Schema:
    """Return the schema itself if none of its own numbers would be rounded; else a copy without its bounds, and with 0
    in place of such numbers in `const` and `enum`."""
    if not _is_inexact(schema):
        return schema
    schema = {name: value for name, value in schema.items() if name not in BOUNDS or not is_number(value)}
    return {name: _without_large(value) if name in VALUES else value for name, value in schema.items()}


def _without_large(value: object) -> object:
    if isinstance(value, list):
        return [_without_large(each) for each in value]
    if isinstance(value, dict):
        return {name: _without_large(each) for name, each in value.items()}
    return value if inexact_number(value) is None else 0
