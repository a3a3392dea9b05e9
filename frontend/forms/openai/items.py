"""Write the parts of an answer as output items of /v1/responses, and as the events that build them.

At most one item is open: reasoning and a message until a part of another kind starts, a call until its end. The items
and their joined deltas do not depend on how the answer is split into deltas.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from ....ipc.codec import JsonObject
from ..parsers.parts import Arguments, CallBegin, CallEnd, Content, CustomBegin, Part, Thought, is_object
from ..parsers.white_space import BlankFilter

Event = tuple[str, JsonObject]  # type, fields
_TEXT_EVENTS = {  # by type of item
    "message": "response.output_text",
    "reasoning": "response.reasoning_text",
    "function_call": "response.function_call_arguments",
    "custom_tool_call": "response.custom_tool_call_input",
}


class ItemWriter:
    """Writer of one answer. `items` holds the closed items in order."""

    def __init__(self, unique: str, tool_names: Mapping[str, JsonObject] | None = None) -> None:
        """`unique`: part of the ids of all items, and of calls without an id of the model's, so that generating the
        answer again repeats its ids.
        `tool_names`: name that the model writes → the fields of a call that name its tool. A name that is missing there
        is the tool's name."""
        self._unique, self._tool_names = unique, tool_names or {}
        self._open: JsonObject = {}  # the open item, with the fields it started with
        self._type = ""  # type of the open item, "" if none is open
        self._texts: list[str] = []  # deltas of the open item
        self._blanks = BlankFilter()
        self._logprobs: list[JsonObject] = []  # logprobs in events of the open message
        self._new_logprobs: list[JsonObject] = []  # logprobs that no event has had yet
        self.items: list[JsonObject] = []

    def write(self, parts: Sequence[Part], logprobs: Sequence[JsonObject] = ()) -> Iterator[Event]:
        """Add parts and yield their events. `logprobs`: those of the parts' tokens, used only for content."""
        self._new_logprobs += logprobs
        if parts and not any(isinstance(part, Content) for part in parts):
            self._new_logprobs = []
        for part in self._blanks.read(parts):
            if isinstance(part, Thought):
                yield from self._append("reasoning", part.text)
            elif isinstance(part, Content):
                yield from self._append("message", part.text)
            elif isinstance(part, CallBegin):
                kind, prefix = ("custom_tool_call", "ctc") if isinstance(part, CustomBegin) else ("function_call", "fc")
                fields = {**self._tool_names.get(part.name, {"name": part.name}), part.form[1]: ""}
                yield from self.close()
                call_id = part.id if part.has_own_id else f"call_{self._unique}{len(self.items)}"
                yield from self._begin(kind, prefix, call_id=call_id, **fields)
            elif isinstance(part, Arguments):
                yield self._delta(part.text)
            elif isinstance(part, CallEnd):
                yield from self.close()

    def finish(self, *, is_whole: bool) -> Iterator[Event]:
        """Close the last item and yield its events. An incomplete answer without items gets an empty message."""
        if not (is_whole or self._type or self.items):
            yield from self._append("message", "")
        yield from self.close("completed" if is_whole else "incomplete")

    def close(self, status: str = "completed") -> Iterator[Event]:
        """Close the open item, if any, and yield its events. `status`: for a message or reasoning; a function call is
        incomplete if its arguments are not a JSON object, and any other call is completed."""
        if not self._type:
            return
        if self._type == "message" and self._new_logprobs:  # of tokens without a text of their own
            yield self._delta("")
        text, item = "".join(self._texts), self._open | {"status": status}
        where, done = self._where(), f"{_TEXT_EVENTS[self._type]}.done"
        if self._type == "reasoning":
            item["content"] = [{"type": "reasoning_text", "text": text}] if text else []
            yield done, {**where, "text": text}
        elif self._type == "message":
            item["content"] = [part := _text_part(text, self._logprobs)]
            yield done, {**where, "text": text, "logprobs": self._logprobs}
            yield "response.content_part.done", {**where, "part": part}
            self._logprobs = []
        else:
            field = "input" if "input" in item else "arguments"
            item |= {field: text, "status": "completed" if field == "input" or is_object(text) else "incomplete"}
            yield done, {**where, "name": item["name"], field: text}
        self.items.append(item)
        self._type = ""
        yield "response.output_item.done", {"output_index": len(self.items) - 1, "item": item}

    def _append(self, kind: str, text: str) -> Iterator[Event]:
        if self._type != kind and kind == "message":
            yield from self._begin(kind, "msg", role="assistant", content=[])
            yield "response.content_part.added", {**self._where(), "part": _text_part("", [])}
        elif self._type != kind:
            yield from self._begin(kind, "rs", summary=[], content=[])
        yield self._delta(text)

    def _begin(self, kind: str, prefix: str, **fields: object) -> Iterator[Event]:
        yield from self.close()
        self._open = {
            "type": kind,
            "id": f"{prefix}_{self._unique}{len(self.items)}",
            **fields,
            "status": "in_progress",
        }
        self._type, self._texts = kind, []
        yield "response.output_item.added", {"output_index": len(self.items), "item": self._open}

    def _delta(self, text: str) -> Event:
        self._texts.append(text)
        return f"{_TEXT_EVENTS[self._type]}.delta", {**self._where(), "delta": text, **self._take_logprobs()}

    def _take_logprobs(self) -> JsonObject:
        """Move new logprobs to the open message and return them as a field of an event; {} unless a message is open."""
        if self._type != "message":
            return {}
        taken, self._new_logprobs = self._new_logprobs, []
        self._logprobs += taken
        return {"logprobs": taken}

    def _where(self) -> JsonObject:
        place: JsonObject = {"content_index": 0} if "content" in self._open else {}
        return {"item_id": self._open["id"], "output_index": len(self.items), **place}


def _text_part(text: str, logprobs: list[JsonObject]) -> JsonObject:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
