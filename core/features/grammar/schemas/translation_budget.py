"""TranslationBudget: limits the size and the time of the translation of one schema, while it grows.

Some keywords repeat parts of a schema (`contains` with `minContains`, `if`, references next to other keywords); nested,
each level repeats the level below, so that the size may grow exponentially. Knows no keyword.
"""

from __future__ import annotations

import json
import time

from .....ipc.errors import RequestError
from .....ipc.params.json_schema import subschemas

MAX_PARTS = 50_000  # schemas, names and comparisons; a text of MAX_GRAMMAR_CHARACTERS has some 20,000 parts
MAX_BYTES = 4 << 20
MAX_CPU_S = 1.0  # of this thread
_LOOK_AT_CLOCK = 64  # parts between two looks at the clock


class TranslationBudget:
    """Counter of parts, bytes and time. Owns the known sizes of values; the root must not change while it is used."""

    def __init__(self, root: object) -> None:
        self._root = root
        self._num_parts = self._num_bytes = 0
        self._part: object = root  # the innermost one that is being translated
        self._size_by_id: dict[int, tuple[object, int]] = {}
        self._begun_at = time.thread_time()

    def enter(self, part: object) -> None:
        """Count a schema that is to be translated, with its values. RequestError, which names its place, if that is too
        much."""
        self._part = part
        self.spend(1)
        if isinstance(part, dict):
            self.spend(0, sum(map(self._size_of, part.values())) + 2 * len(part))

    def spend(self, num_parts: int, num_bytes: int = 0) -> None:
        """Count parts and bytes. RequestError if there are too many, or the translation has taken too long."""
        looks = self._num_parts // _LOOK_AT_CLOCK
        self._num_parts += num_parts
        self._num_bytes += num_bytes
        if self._num_parts > MAX_PARTS:
            self._refuse(f"more than {MAX_PARTS} parts")
        if self._num_bytes > MAX_BYTES:
            self._refuse(f"more than {MAX_BYTES >> 20} MiB")
        if self._num_parts // _LOOK_AT_CLOCK > looks and time.thread_time() - self._begun_at > MAX_CPU_S:
            self._refuse(f"more than {MAX_CPU_S:g} s")

    def _size_of(self, value: object) -> int:
        """Return the size of a value in bytes, about; 0 for a list of schemas, which count when they are entered."""
        if isinstance(value, str):
            return len(value)
        if not isinstance(value, list):
            return 8
        known = self._size_by_id.get(id(value))
        if known is None:
            size = 0 if any(isinstance(each, dict) for each in value) else len(json.dumps(value))
            known = self._size_by_id[id(value)] = value, size  # holds the value, so that no other gets its id
        return known[1]

    @property
    def place(self) -> str:
        """The place in the root of the part that was entered last: " at #POINTER", or "" if it is not in the root."""
        return _pointer_to(self._part, self._root)

    def _refuse(self, what: str) -> None:
        raise RequestError(
            f"structured_outputs.json{self.place}: {what} come of its parts when they are repeated for contains, if, "
            "dependentSchemas, $ref or patternProperties: lower minContains or nest fewer of them"
        )


def _pointer_to(part: object, root: object) -> str:
    """Return " at #POINTER" for a part of the root; "" if it is not in the root, because the translation made it."""
    todo = [("", root)]
    while todo:
        pointer, schema = todo.pop()
        if schema is part:
            return f" at #{pointer}"
        todo += [(pointer + step, inner) for step, inner in subschemas(schema)]
    return ""
