"""Write the parts of an answer as content blocks of /v1/messages, and as the events that build them.

At most one block is open: thinking and text until a part of another kind starts, a call until its end. The blocks and
their joined deltas do not depend on how the answer is split into deltas.
"""

from __future__ import annotations

import contextlib
import re
from collections import deque
from collections.abc import Iterator, Sequence

import msgspec

from ....ipc.codec import JSON_STRING, JsonObject
from ..parsers.parts import Arguments, CallBegin, CallEnd, Content, Part, Thought, is_object
from ..parsers.white_space import BlankFilter
from .tool_use_ids import tool_use_id

Event = tuple[str, JsonObject]  # type, fields
SIGNATURE = "unsigned"  # of every thinking block, since clients drop those without one; never checked
_TOKENS = re.compile(rf"{JSON_STRING}|[\[\]{{}},]")
MAX_DEPTH = 1000  # levels of brackets; the decoder reads fewer
MAX_TRIES = 8  # attempts to close an incomplete object; only text that is not JSON would need more


class BlockWriter:
    """Writer of one answer. `blocks` holds the closed blocks in order; `has_calls`: one of them is a complete call."""

    def __init__(self) -> None:
        self._open: JsonObject = {}  # the open block, with the fields it started with
        self._kind = ""  # type of the open block, "" if none is open
        self._texts: list[str] = []  # deltas of the open block
        self._blanks = BlankFilter()
        self.blocks: list[JsonObject] = []
        self.has_calls = False

    def write(self, parts: Sequence[Part]) -> Iterator[Event]:
        for part in self._blanks.read(parts):
            if isinstance(part, Content):
                yield from self._append("text", part.text)
            elif isinstance(part, Thought):
                yield from self._append("thinking", part.text)
            elif isinstance(part, CallBegin):
                yield from self._begin({"type": "tool_use", "id": tool_use_id(part), "name": part.name, "input": {}})
            elif isinstance(part, Arguments):
                yield self._delta("input_json_delta", "partial_json", part.text)
            elif isinstance(part, CallEnd):
                yield from self.close()

    def close(self) -> Iterator[Event]:
        """Close the open block, if any, and yield its events."""
        if not self._kind:
            return
        text = "".join(self._texts)
        if self._kind == "tool_use":
            self.has_calls |= is_object(text)
            self._open["input"] = partial_object(text)
        else:
            self._open[self._kind] = text
        if self._kind == "thinking":
            yield self._delta("signature_delta", "signature", SIGNATURE)
            self._open["signature"] = SIGNATURE
        yield "content_block_stop", {"index": len(self.blocks)}
        self.blocks.append(self._open)
        self._kind = ""

    def _append(self, kind: str, text: str) -> Iterator[Event]:
        if self._kind != kind:
            signature: JsonObject = {"signature": ""} if kind == "thinking" else {}
            yield from self._begin({"type": kind, kind: "", **signature})
        yield self._delta(f"{kind}_delta", kind, text)

    def _begin(self, block: JsonObject) -> Iterator[Event]:
        yield from self.close()
        self._open, self._kind, self._texts = block, str(block["type"]), []
        yield "content_block_start", {"index": len(self.blocks), "content_block": dict(block)}

    def _delta(self, kind: str, field: str, text: str) -> Event:
        self._texts.append(text)
        return "content_block_delta", {"index": len(self.blocks), "delta": {"type": kind, field: text}}


def partial_object(text: str) -> JsonObject:
    """Return the object in a JSON text; if the text is incomplete, an object with its complete values (a number at the
    end counts as complete). {} if the text is not an object, or nested deeper than MAX_DEPTH."""
    closers = ""
    ends: deque[tuple[int, str]] = deque(maxlen=MAX_TRIES)  # (place where a value may end, brackets to add there)
    for token in _TOKENS.finditer(text):
        sign = token[0]
        if sign in "{[":
            closers = ("}" if sign == "{" else "]") + closers
            if len(closers) > MAX_DEPTH:
                return {}
        elif sign in "}]":
            closers = closers[1:]
        ends.append((token.start() if sign == "," else token.end(), closers))
    for end, needed in reversed([*ends, (len(text), closers)]):
        value: object = None
        with contextlib.suppress(msgspec.DecodeError, RecursionError):
            value = msgspec.json.decode(text[:end] + needed)
        if isinstance(value, dict):
            return value
    return {}
