"""Write the parts of an answer as output items of /v1/responses, and as the events that build them.

At most one item is open: reasoning until content comes, a message until a call comes, a call until its end. The items
and their joined deltas do not depend on how the answer is split into deltas.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ....ipc.codec import JsonObject
from ..parsers.parts import Arguments, CallBegin, CallEnd, Content, CustomBegin, Part, Thought, is_json

Event = tuple[str, JsonObject]  # type, fields
_TEXT_EVENTS = {"message": "response.output_text", "reasoning": "response.reasoning_text"}  # by kind of item


class ItemWriter:
    """Writer of one answer. `items` holds the closed items in order."""

    def __init__(self, unique: str) -> None:
        """`unique` stands in the ids of all items and calls: generating the answer again repeats its ids."""
        self._unique = unique
        self._kind = ""  # of the open item: reasoning, message, call, or "" if none is open
        self._text = ""  # of the open item; a call's arguments
        self._space = ""  # leading white space: part of a message only if more text follows
        self._call: JsonObject = {}  # the open call
        self._logprobs: list[JsonObject] = []  # of the open message
        self._new_logprobs: list[JsonObject] = []  # of tokens that no event has carried yet
        self.items: list[JsonObject] = []

    def write(self, parts: Sequence[Part], logprobs: Sequence[JsonObject] = ()) -> Iterator[Event]:
        """Add parts. `logprobs` belong to their tokens; only messages have logprobs."""
        self._new_logprobs += logprobs
        if parts and not any(isinstance(part, Content) for part in parts):
            self._new_logprobs = []
        for part in parts:
            space, self._space = self._space, ""
            if isinstance(part, Thought):
                yield from self._append("reasoning", part.text)
            elif isinstance(part, Content):
                text = space + part.text
                if text.strip() or self._kind == "message":
                    yield from self._append("message", text)
                else:
                    self._space = text
            elif isinstance(part, CallBegin):
                yield from self._begin(part)
            elif isinstance(part, Arguments):
                self._text += part.text
                yield f"{self._call_event}.delta", {**self._call_where(), "delta": part.text}
            elif isinstance(part, CallEnd):
                yield from self.close()

    def finish(self, *, is_whole: bool) -> Iterator[Event]:
        """Close the last item. An incomplete answer without items gets an empty message."""
        if not (is_whole or self._kind or self.items):
            yield from self._append("message", "")
        yield from self.close("completed" if is_whole else "incomplete")

    def close(self, status: str = "completed") -> Iterator[Event]:
        """Close the open item, if there is one."""
        if not self._kind:
            return
        if self._kind == "call":
            yield from self._end()
            return
        more = self._take_logprobs()
        item, where, event = self._item(status), self._where(), _TEXT_EVENTS[self._kind]
        more |= {"logprobs": self._logprobs} if more else {}
        yield f"{event}.done", {**where, "content_index": 0, "text": self._text, **more}
        if self._kind == "message":
            yield "response.content_part.done", {**where, "content_index": 0, "part": self._text_part()}
        yield self._close_with(item)
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
        """Move new logprobs to the open message and return them as an event's field; {} unless a message is open."""
        if self._kind != "message":
            return {}
        taken, self._new_logprobs = self._new_logprobs, []
        self._logprobs = [*self._logprobs, *taken]
        return {"logprobs": taken}

    def _begin(self, call: CallBegin) -> Iterator[Event]:
        yield from self.close()
        self._kind = "call"
        unique = f"{self._unique}{len(self.items)}"
        kind, prefix = ("custom_tool_call", "ctc") if isinstance(call, CustomBegin) else ("function_call", "fc")
        self._call_event = f"response.{kind}_{call.form[1]}"
        ids = {"id": f"{prefix}_{unique}", "call_id": f"call_{unique}"}
        self._call = {"type": kind, **ids, "name": call.name, call.form[1]: "", "status": "in_progress"}
        yield "response.output_item.added", {"output_index": len(self.items), "item": self._call}

    def _end(self) -> Iterator[Event]:
        """Close the open call; that of a function is incomplete if its arguments are not valid JSON."""
        is_custom = "input" in self._call
        said = {"input" if is_custom else "arguments": self._text}
        item = self._call | said | {"status": "completed" if is_custom or is_json(self._text) else "incomplete"}
        yield f"{self._call_event}.done", self._call_where() | {"name": item["name"]} | said
        yield self._close_with(item)

    def _close_with(self, item: JsonObject) -> Event:
        """Add the final form of the open item to `items` and return the event that closes it."""
        self.items.append(item)
        self._kind = self._text = ""
        return "response.output_item.done", {"output_index": len(self.items) - 1, "item": item}

    def _call_where(self) -> JsonObject:
        return {"item_id": self._call["id"], "output_index": len(self.items)}

    def _where(self) -> JsonObject:
        prefix = "msg" if self._kind == "message" else "rs"
        return {"item_id": f"{prefix}_{self._unique}{len(self.items)}", "output_index": len(self.items)}

    def _item(self, status: str) -> JsonObject:
        item_id = self._where()["item_id"]
        if self._kind == "reasoning":
            content = [{"type": "reasoning_text", "text": self._text}] if self._text else []
            return {"type": "reasoning", "id": item_id, "summary": [], "content": content, "status": status}
        parts = [] if status == "in_progress" else [self._text_part()]
        return {"type": "message", "id": item_id, "role": "assistant", "status": status, "content": parts}

    def _text_part(self) -> JsonObject:
        return {"type": "output_text", "text": self._text, "annotations": [], "logprobs": self._logprobs}
