"""Write answers, models and times in Ollama's form."""

from __future__ import annotations

import datetime
import hashlib
from collections.abc import Iterable, Iterator

import msgspec

from ....ipc.codec import JsonObject
from ....ipc.messages.client import RequestMetrics
from ..parsers.parts import CallEnd, CallJoiner, Content, Part, Thought
from ..parsers.white_space import BlankFilter

NS = 1_000_000_000
_REASONS = {"stop": "stop", "length": "length"}  # others keep the engine's name


def time_text(seconds: float) -> str:
    """Return a time, in unix seconds, as RFC 3339."""
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


class AnswerWriter:
    """Writer of one answer. Its text is in `message` if `is_chat`, otherwise in `response`. A call is written once it
    is complete."""

    def __init__(self, model: str, *, is_chat: bool) -> None:
        self._model = model
        self._is_chat = is_chat
        self._calls = CallJoiner()
        self._blanks = BlankFilter(keeps_first=not is_chat)
        self._num_calls = 0

    def lines(self, parts: Iterable[Part], now: float) -> Iterator[JsonObject]:
        """Yield an object of a stream for each part that has something to show; `now` in unix seconds."""
        for part in self._blanks.read(parts):
            if fields := self._fields(part):
                if (call := fields.get("tool_calls")) is not None:
                    fields["tool_calls"] = [call]
                yield self._head(now) | self._shown(fields) | {"done": False}

    def whole(self, parts: Iterable[Part], now: float) -> JsonObject:
        """Return the object of a whole answer, without the fields of `ending`."""
        texts: dict[str, list[str]] = {"content": [], "thinking": []}
        calls: list[object] = []
        for part in self._blanks.read(parts):
            for name, value in self._fields(part).items():
                if isinstance(value, str):
                    texts[name].append(value)
                else:
                    calls.append(value)
        shown: JsonObject = {"content": "".join(texts["content"])}
        if texts["thinking"]:
            shown["thinking"] = "".join(texts["thinking"])
        if calls:
            shown["tool_calls"] = calls
        return self._head(now) | self._shown(shown)

    def empty(self, now: float) -> JsonObject:
        """Return the last object of a stream, which has no text, without the fields of `ending`."""
        return self._head(now) | self._shown({"content": ""})

    def _fields(self, part: Part) -> JsonObject:
        """Return the field that a part adds to: a text, or one call."""
        if isinstance(part, Content):
            return {"content": part.text}
        if isinstance(part, Thought):
            return {"thinking": part.text}
        call = self._calls.read(part)
        if call is None:  # arguments that are no JSON object are content
            return {"content": part.raw} if isinstance(part, CallEnd) else {}
        self._num_calls += 1
        arguments = msgspec.json.decode(call.arguments or "{}")
        function = {"index": self._num_calls - 1, "name": call.name, "arguments": arguments}
        return {"tool_calls": {"id": call.id, "function": function}}

    def _head(self, now: float) -> JsonObject:
        return {"model": self._model, "created_at": time_text(now)}

    def _shown(self, fields: JsonObject) -> JsonObject:
        if self._is_chat:
            return {"message": {"role": "assistant", "content": "", **fields}}
        text = fields.pop("content", "")
        return {"response": text, **fields}


def ending(reason: str, metrics: RequestMetrics, num_prompt: int, num_answer: int, now: float) -> JsonObject:
    """Return the fields that end an answer: the finish reason, token counts, and durations in nanoseconds."""
    begun = metrics.arrival_time or now
    scheduled = metrics.first_scheduled_time or begun
    first = metrics.first_token_time or now
    ended = metrics.finished_time or now
    return {
        "done": True,
        "done_reason": _REASONS.get(reason, reason),
        "total_duration": _ns(begun, ended),
        "load_duration": _ns(begun, scheduled),
        "prompt_eval_count": num_prompt,
        "prompt_eval_duration": _ns(scheduled, first),
        "eval_count": num_answer,
        "eval_duration": _ns(first, ended),
    }


def _ns(begin: float, end: float) -> int:
    return max(round((end - begin) * NS), 0)


def digest_of(text: str) -> str:
    """Return a digest by which clients tell models apart."""
    return hashlib.sha256(text.encode()).hexdigest()
