"""Parser of Mistral's tool calls: [TOOL_CALLS] and then a list of {"name": …, "arguments": {…}}, name{…} or
name[ARGS]{…}."""

from __future__ import annotations

import re

from .json_calls import CallListReader, CallReader
from .markers import MarkerFinder
from .parts import CallBegin, Part, call, content

MARKER = "[TOOL_CALLS]"
MAX_HEAD = 512  # most characters between a marker and the arguments
_NAME = r"\s*+([\w.-]++)\s*+(?:\[CALL_ID\]\s*+[\w-]*+\s*+)?+"
_CALL = re.compile(_NAME + r"(?:\[ARGS\]\s*+)?+(?=\{)")
_BARE = re.compile(_NAME + r"\[ARGS\]\s*+(?:null\s*+)?+(?=\[TOOL_CALLS\]|\Z)")  # a call without arguments
_BEGIN = re.compile(rf"\s*+(?:{_NAME}(?:\[ARGS\]\s*+(?:n(?:u(?:l(?:l\s*+)?)?)?)?)?(?:\[[A-Z_]*+)?)?")  # of both


class MistralParser:
    """Parser of one answer. Text after a call is content, and so is a marker without a call."""

    markers = (MARKER, "[ARGS]", "[CALL_ID]")

    def __init__(self) -> None:
        self._marker = MarkerFinder(MARKER)
        self._head: str | None = None  # text since the marker, before a call
        self._list: CallListReader | None = None
        self._call: CallReader | None = None

    def append(self, text: str) -> list[Part]:
        parts: list[Part] = []
        while text:
            if self._list is not None:
                found, text = self._read_list(self._list, text)
            elif self._call is not None:
                found, text = self._call.append(text), self._call.rest
                self._call = None if self._call.is_over else self._call
            elif self._head is not None:
                found, text = self._read_name(self._head + text)
            else:
                before, marker, text = self._marker.feed(text)
                found, self._head = content(before), "" if marker else None
            parts += found
        return parts

    def finish(self) -> list[Part]:
        if self._list is not None:
            return self._list.finish()
        if self._call is not None:
            return self._call.finish()
        if self._head is None:
            return content(self._marker.finish())
        bare = _BARE.match(self._head)
        return content(MARKER + self._head) if bare is None else call(bare[1], "{}", MARKER + self._head)

    def _read_name(self, head: str) -> tuple[list[Part], str]:
        """Read the text between the marker and a list or arguments. Return the parts and the text after them; [] and ""
        if more text is needed."""
        self._head = None
        if head.lstrip().startswith("["):
            before, _, rest = head.partition("[")
            self._list = CallListReader(", \n\t", f"{MARKER}{before}[")
            return [], rest
        window = head[:MAX_HEAD]
        if (name := _CALL.match(window)) is not None:
            self._call = CallReader(MARKER + name[0], has_name=True)
            return [CallBegin(name[1])], head[name.end() :]
        if len(head) < MAX_HEAD and _BEGIN.fullmatch(head):
            self._head = head
            return [], ""
        if (bare := _BARE.match(window)) is not None:
            return call(bare[1], "{}", MARKER + bare[0]), head[bare.end() :]
        return content(MARKER), head

    def _read_list(self, calls: CallListReader, text: str) -> tuple[list[Part], str]:
        parts = calls.append(text)
        if not calls.is_over:
            return parts, ""
        self._list = None
        if calls.rest.startswith("]"):
            return parts, calls.rest[1:]
        return [*parts, *content(calls.before)], calls.rest  # an item of the list is not a call
