"""Parse Qwen 3 Coder: <tool_call><function=NAME><parameter=KEY>VALUE</parameter>…</function></tool_call>.

Values are text without quotes; the schema of the tool tells their types (`argument_types.py`). Arguments leave one
parameter at a time.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from ....ipc.codec import JsonObject
from ...text.markers import MarkerFinder
from .argument_types import ArgumentTypes
from .parts import Arguments, CallBegin, CallEnd, Part, content

OPENING, CLOSING = "<tool_call>", "</tool_call>"
FUNCTION, END_FUNCTION = "<function=", "</function>"
PARAMETER, END_PARAMETER = "<parameter=", "</parameter>"
_MARKERS: dict[str, tuple[str, ...]] = {  # the markers that end each state
    "outside": (OPENING, FUNCTION),
    "opened": (FUNCTION, CLOSING),
    "name": (">",),
    "parameters": (PARAMETER, END_FUNCTION),
    "key": (">",),
    "value": (END_PARAMETER, PARAMETER, END_FUNCTION),
    "closing": (CLOSING, OPENING, FUNCTION),
}
_NEXT = {  # state after each marker
    OPENING: "opened",
    CLOSING: "outside",
    FUNCTION: "name",
    PARAMETER: "key",
    END_PARAMETER: "parameters",
    END_FUNCTION: "closing",
}


class Qwen3CoderParser:
    """Parser of one answer: a state machine over the markers. It holds names and values until the marker after them
    comes; content is not held."""

    def __init__(self, schemas: Mapping[str, JsonObject]) -> None:
        """`schemas`: schema of the arguments by name of the tool."""
        self._types = {name: ArgumentTypes(schema) for name, schema in schemas.items()}
        self._enter("outside")
        self._before = ""  # the text since the last marker
        self._raw = ""  # the text since the first marker of the call
        self._name = self._key = ""
        self._num_parameters = 0

    def append(self, text: str) -> list[Part]:
        parts: list[Part] = []
        while text:
            before, marker, text = self._finder.feed(text)
            if self._state == "outside":
                parts += content(before)
                self._raw = marker
            else:
                self._before += before
                self._raw += before + marker
            if marker:
                before, self._before = self._before, ""
                parts += self._move(before, marker)
        return parts

    def finish(self) -> list[Part]:
        """Return the held text. An incomplete call ends with its raw text, or is content if it has no name."""
        held = self._finder.finish()
        if self._state == "outside":
            return content(held)
        raw = self._raw + held
        if self._state == "closing":
            return content(raw.rpartition(END_FUNCTION)[2].strip())
        is_call = self._state not in ("opened", "name")
        return [CallEnd(raw)] if is_call else content(raw)

    def _enter(self, state: str) -> None:
        self._state, self._finder = state, MarkerFinder(*_MARKERS[state])

    def _move(self, before: str, marker: str) -> list[Part]:
        """Enter the state after `marker` and return the parts of the text `before` it."""
        state = self._state
        self._enter(_NEXT.get(marker) or ("parameters" if state == "name" else "value"))
        if state == "name":
            self._name, self._num_parameters = before.strip(), 0
            return [CallBegin(self._name), Arguments("{")]
        if state == "key":
            self._key = before.strip()
            return []
        if state == "opened" and marker == CLOSING:
            return content(self._raw)
        parts = [self._argument(before)] if state == "value" else []
        if marker == END_FUNCTION:
            return [*parts, Arguments("}"), CallEnd(self._raw)]
        if state == "closing":
            self._raw = marker
        return parts

    def _argument(self, text: str) -> Part:
        text = text.removeprefix("\n").removesuffix("\n")
        types = self._types.get(self._name)
        value = json.dumps(text, ensure_ascii=False) if types is None else types.written(self._key, text)
        comma = ", " if self._num_parameters else ""
        self._num_parameters += 1
        return Arguments(f"{comma}{json.dumps(self._key, ensure_ascii=False)}: {value}")
