"""The keys that an object's schema allows, and the schemas of their values.

A value conforms to the schema of its name, if there is one, and to those of all patterns that match the name; a key
with neither has the schema of additional ones. Knows no rules.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from .....ipc.errors import RequestError
from .key_pattern import KeyPatterns
from .pattern_branches import found_anywhere
from .schema import Schema


class OtherKeys(NamedTuple):
    """Keys that a schema does not name, and the schema of their values. They match `pattern`, if there is one, and none
    of `unmatched`: keys that match two patterns are left out."""

    schema: object
    pattern: str | None = None
    unmatched: tuple[str, ...] = ()

    def conditions(self) -> Iterator[str]:
        """Yield terminals that such a key must match, all of them. RequestError as in `found_anywhere`."""
        if self.pattern is not None:
            yield f"/{found_anywhere(self.pattern)}/"
        for pattern in self.unmatched:
            yield f"~(/{found_anywhere(pattern)}/)"


def named_values(own: Schema, key_patterns: KeyPatterns) -> dict[str, object]:
    """Return the schema of each key that an object's schema names or requires. RequestError for a pattern that the
    library cannot compare with them."""
    patterns: Mapping[str, object] = own.get("patternProperties", {})
    properties: Schema = own.get("properties", {})
    values: dict[str, object] = {}
    for name in dict.fromkeys((*properties, *own.get("required", ()))):
        parts = [part for pattern, part in patterns.items() if _matches(key_patterns, pattern, name)]
        if name in properties:
            parts.insert(0, properties[name])
        if not parts:
            parts = [own.get("additionalProperties", True)]
        values[name] = parts[0] if len(parts) == 1 else {"allOf": parts}
    return values


def other_keys(own: Schema) -> list[OtherKeys]:
    """Return the keys that an object's schema allows but does not name."""
    patterns: Mapping[str, object] = own.get("patternProperties", {})
    found = [
        OtherKeys(part, pattern, tuple(each for each in patterns if each != pattern))
        for pattern, part in patterns.items()
    ]
    return [*found, OtherKeys(own.get("additionalProperties", True), unmatched=tuple(patterns))]


def _matches(key_patterns: KeyPatterns, pattern: str, name: str) -> bool:
    is_match = key_patterns.matches(pattern, name)
    if is_match is None:
        raise RequestError(f"structured_outputs.json: the pattern {pattern!r:.80} of keys cannot be read: simplify it")
    return is_match
