"""BlockWriter: the parts of an answer → the content blocks of a message and the events that build them.

One block is open at most: thinking until content comes, text until a call comes, a call until its end. However an
answer is cut into pieces, the blocks and the joined deltas are the same.
"""

from __future__ import annotations

import contextlib
import re
from collections import deque
from collections.abc import Iterator, Sequence

import msgspec

from ....ipc.codec import JsonObject
from ...openai.parsers.parts import Arguments, CallBegin, CallEnd, Content, Part, Thought, is_json

Event = tuple[str, JsonObject]  # type, fields
SIGNATURE = "unsigned"  # of every thought: clients keep only those with a signature, and nobody reads it here
_TOKENS = re.compile(r'"(?:[^"\\]|\\.?)*"?|[\[\]{},]', re.DOTALL)
MAX_TRIES = 8  # to read a torn object: more are needed only where it is no JSON anyway


class BlockWriter:
    """`blocks` holds the closed ones in order; `has_calls` says that one of them is a call with whole arguments."""

    def __init__(self) -> None:
        self._open: JsonObject = {}  # the open block as it began, if there is one
        self._kind = ""  # its type
        self._texts: list[str] = []  # its deltas
        self._space = ""  # white space that is content only if more follows
        self.blocks: list[JsonObject] = []
        self.has_calls = False

    def write(self, parts: Sequence[Part]) -> Iterator[Event]:
        for part in parts:
            space, self._space = self._space, ""
            if isinstance(part, Content):
                text = space + part.text
                if self._kind == "text" or text.strip():
                    yield from self._append("text", text)
                else:
                    self._space = text
            elif isinstance(part, Thought):
                yield from self._append("thinking", part.text)
            elif isinstance(part, CallBegin):
                call_id = f"toolu_{part.id.removeprefix('call_')}"
                yield from self._begin({"type": "tool_use", "id": call_id, "name": part.name, "input": {}})
            elif isinstance(part, Arguments):
                yield self._delta("input_json_delta", "partial_json", part.text)
            elif isinstance(part, CallEnd):
                yield from self.close()

    def close(self) -> Iterator[Event]:
        """Close the open block, if there is one."""
        if not self._kind:
            return
        text = "".join(self._texts)
        if self._kind == "tool_use":
            self.has_calls |= is_json(text)
            self._open["input"] = begun_object(text)
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


def begun_object(text: str) -> JsonObject:
    """The object that a JSON text is; of one that is torn, the values that are whole."""
    closers = ""
    ends: deque[tuple[int, str]] = deque(maxlen=MAX_TRIES)  # where a value may end, and what closes the rest there
    for token in _TOKENS.finditer(text):
        sign = token[0]
        if sign in "{[":
            closers = ("}" if sign == "{" else "]") + closers
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
