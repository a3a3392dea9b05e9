"""ItemWriter: the pieces of an answer → the output items of /v1/responses and the events that build them.

One item is open at most: reasoning until content comes, a message until a call comes or the end.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ....ipc.codec import JsonObject
from .text import Piece
from .tools import ToolUse

Event = tuple[str, JsonObject]  # type, fields
_TEXT_EVENTS = {"message": "response.output_text", "reasoning": "response.reasoning_text"}  # by kind of item


class ItemWriter:
    """`items` holds what has been closed, in order."""

    def __init__(self, unique: str) -> None:
        """`unique` makes the items' ids unlike those of other answers."""
        self._unique = unique
        self._kind = ""  # of the open item: reasoning, message or nothing
        self._text = ""
        self._logprobs: list[JsonObject] = []  # of the open message
        self._new_logprobs: list[JsonObject] = []  # of tokens whose text may be held back
        self.items: list[JsonObject] = []

    def write(self, piece: Piece, logprobs: Sequence[JsonObject] = ()) -> Iterator[Event]:
        """`logprobs`: of the tokens that brought the piece; only a message keeps them."""
        self._new_logprobs += logprobs
        if piece.reasoning:
            yield from self._append("reasoning", piece.reasoning)
        if (piece.reasoning or piece.calls) and not piece.content:
            self._new_logprobs = []
        if piece.content and (piece.content.strip() or self._kind == "message"):
            yield from self._append("message", piece.content)
        for call in piece.calls:
            yield from self.close()
            yield from self._call(call)

    def close(self) -> Iterator[Event]:
        """Close the open item, if there is one."""
        if not self._kind:
            return
        more = self._take_logprobs()
        item, where, event = self._item("completed"), self._where(), _TEXT_EVENTS[self._kind]
        more |= {"logprobs": self._logprobs} if more else {}
        yield f"{event}.done", {**where, "content_index": 0, "text": self._text, **more}
        if self._kind == "message":
            yield "response.content_part.done", {**where, "content_index": 0, "part": self._text_part()}
        yield "response.output_item.done", {"output_index": len(self.items), "item": item}
        self.items.append(item)
        self._kind = self._text = ""
        self._logprobs = []

    def _append(self, kind: str, text: str) -> Iterator[Event]:
        if self._kind != kind:
            yield from self.close()
            self._kind = kind
            yield "response.output_item.added", {"output_index": len(self.items), "item": self._item("in_progress")}
            if kind == "message":
                yield "response.content_part.added", {**self._where(), "content_index": 0, "part": self._text_part()}
        self._text += text
        more = self._take_logprobs()
        yield f"{_TEXT_EVENTS[kind]}.delta", {**self._where(), "content_index": 0, "delta": text, **more}

    def _take_logprobs(self) -> JsonObject:
        """The field that events of a message have; what is new becomes the message's."""
        if self._kind != "message":
            return {}
        taken, self._new_logprobs = self._new_logprobs, []
        self._logprobs = [*self._logprobs, *taken]
        return {"logprobs": taken}

    def _call(self, call: ToolUse) -> Iterator[Event]:
        where: JsonObject = {"item_id": f"fc_{call.id.removeprefix('call_')}", "output_index": len(self.items)}
        item: JsonObject = {
            "type": "function_call",
            "id": where["item_id"],
            "call_id": call.id,
            "name": call.name,
            "arguments": "",
            "status": "in_progress",
        }
        yield "response.output_item.added", {"output_index": len(self.items), "item": item}
        yield "response.function_call_arguments.delta", {**where, "delta": call.arguments}
        done = {**where, "name": call.name, "arguments": call.arguments}
        yield "response.function_call_arguments.done", done
        whole = item | {"arguments": call.arguments, "status": "completed"}
        yield "response.output_item.done", {"output_index": len(self.items), "item": whole}
        self.items.append(whole)

    def _where(self) -> JsonObject:
        prefix = "msg" if self._kind == "message" else "rs"
        return {"item_id": f"{prefix}_{self._unique}{len(self.items)}", "output_index": len(self.items)}

    def _item(self, status: str) -> JsonObject:
        item_id = self._where()["item_id"]
        if self._kind == "reasoning":
            content = [{"type": "reasoning_text", "text": self._text}] if self._text else []
            return {"type": "reasoning", "id": item_id, "summary": [], "content": content, "status": status}
        parts = [self._text_part()] if status == "completed" else []
        return {"type": "message", "id": item_id, "role": "assistant", "status": status, "content": parts}

    def _text_part(self) -> JsonObject:
        return {"type": "output_text", "text": self._text, "annotations": [], "logprobs": self._logprobs}
