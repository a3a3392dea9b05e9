"""Parser of Qwen 3 Coder's calls: <tool_call><function=NAME><parameter=KEY>VALUE</parameter>…</function></tool_call>.

Values are text without quotes; the tool's schema determines their types (`argument_types.py`). Arguments are returned
one parameter at a time.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from ....ipc.codec import JsonObject
from .argument_types import ArgumentTypes
from .markers import MarkerFinder
from .parts import Arguments, BlankFilter, CallBegin, CallEnd, Part, content

OPENING, CLOSING = "<tool_call>", "</tool_call>"
FUNCTION, END_FUNCTION = "<function=", "</function>"
PARAMETER, END_PARAMETER = "<parameter=", "</parameter>"
_MARKERS: dict[str, tuple[str, ...]] = {  # the markers that end each state
    "outside": (OPENING, FUNCTION),
    "opened": (FUNCTION, CLOSING),
    "name": (">",),
    "parameters": (PARAMETER, END_FUNCTION, CLOSING, OPENING, FUNCTION),
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
_BETWEEN_CALLS = ("outside", "closing")


class Qwen3CoderParser:
    """Parser of one answer: a state machine over the markers. It holds names and values back until the marker after
    them, and other text only while it may be the start of a marker or blank. Text inside a call that belongs to no
    parameter becomes content after the call."""

    markers = (OPENING, CLOSING, FUNCTION, END_FUNCTION, PARAMETER, END_PARAMETER)

    def __init__(self, schemas: Mapping[str, JsonObject]) -> None:
        """`schemas`: name of a tool → schema of its arguments."""
        self._types = {name: ArgumentTypes(schema) for name, schema in schemas.items()}
        self._enter("outside")
        self._before: list[str] = []  # the text since the last marker
        self._raw: list[str] = []  # the text since the first marker of the call
        self._stray: list[str] = []  # text of the call outside its parameters
        self._name = self._key = ""
        self._num_parameters = 0
        self._blanks = BlankFilter(keeps_first=True)

    def append(self, text: str) -> list[Part]:
        parts: list[Part] = []
        while text:
            before, marker, text = self._finder.feed(text)
            if self._state in _BETWEEN_CALLS:
                parts += content(before)
                self._raw = [marker]
            else:
                self._before.append(before)
                self._raw += before, marker
            if marker:
                before, self._before = "".join(self._before), []
                parts += self._move(before, marker)
        return self._blanks.read(parts)

    def finish(self) -> list[Part]:
        """Return the parts of the text that was held back. An incomplete call gets a CallEnd, or is content if its name
        is incomplete."""
        held = self._finder.finish()
        raw = "".join(self._raw) + held
        if self._state in _BETWEEN_CALLS:
            found = content(held)
        elif self._state in ("opened", "name"):
            found = content(raw)
        else:
            found = [CallEnd(raw)]
        return self._blanks.read(found)

    def _enter(self, state: str) -> None:
        self._state, self._finder = state, MarkerFinder(*_MARKERS[state])

    def _move(self, before: str, marker: str) -> list[Part]:
        """Enter the state after `marker` and return the parts of the text `before` it."""
        state = self._state
        self._enter(_NEXT.get(marker) or ("parameters" if state == "name" else "value"))
        if state == "name":
            return self._begin(before.strip())
        if state == "opened" and marker == CLOSING:
            return content("".join(self._raw))
        if state == "opened" and before.strip():
            self._raw = [marker]
            return content(before)
        if state == "key":
            self._key = before.strip()
        elif state == "value":
            return [self._argument(before), *(self._end() if marker == END_FUNCTION else ())]
        elif state == "parameters":
            self._stray += [before] if before.strip() else []
            return [] if marker == PARAMETER else self._end(marker)
        return []

    def _begin(self, name: str) -> list[Part]:
        """Start a call and return its first parts; if `name` is empty, return the text so far as content."""
        if not name:
            self._enter("outside")
            return content("".join(self._raw))
        self._name, self._num_parameters, self._stray = name, 0, []
        return [CallBegin(name), Arguments("{")]

    def _end(self, marker: str = END_FUNCTION) -> list[Part]:
        """End the call and return its last parts. `marker`: the marker at its end, which may start the next call."""
        ended: list[Part] = [Arguments("}"), CallEnd("".join(self._raw)), *content("".join(self._stray))]
        self._raw = [marker]
        return ended

    def _argument(self, text: str) -> Part:
        text = text.removeprefix("\n").removesuffix("\n")
        types = self._types.get(self._name)
        value = json.dumps(text, ensure_ascii=False) if types is None else types.written(self._key, text)
        comma = ", " if self._num_parameters else ""
        self._num_parameters += 1
        return Arguments(f"{comma}{json.dumps(self._key, ensure_ascii=False)}: {value}")
