"""TurnShape: how a chat template expects earlier answers, found by rendering a conversation with a tool call.

Templates differ. Some join the arguments of a call as JSON text to other text, others read them as an object. Some show
calls only if the content is null, others fail on null or print it, or drop the text of a turn with calls. Knows
nothing of Jinja.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeAlias

import msgspec

from ....ipc.codec import JsonObject
from ....ipc.messages.client import ChatMessage, MediaPart
from ...forms.parsers.parts import is_object
from .calls import calls_of, short_id

THOUGHT_NAMES = (
    "reasoning_content",
    "reasoning",
    "thinking",
    "thought",
)  # fields with reasoning; a template reads one of them
_NAME, _KEY, _VALUE, _SAID = "probe_name", "probe_key", "probe value", "probe text"
_ARGUMENTS: JsonObject = {_KEY: _VALUE}
_SHORT_ID = "probe0001"
_LONG_ID = "call_0123456789abcdef01234567"
_MORE: JsonObject = {_KEY: _VALUE, "probe_list": [1, None, "ü"]}
_SCHEMA: JsonObject = {
    "type": "object",
    "properties": {"other_key": {"type": "string", "description": "other"}},
    "required": ["other_key"],
}
_TOOL: JsonObject = {
    "type": "function",
    "function": {"name": "other_name", "description": "other", "parameters": _SCHEMA},
}


class TurnShape(NamedTuple):
    """Form in which a chat template expects assistant messages with tool calls. Found by `find_turn_shape`."""

    has_text_arguments: bool = False  # arguments are JSON text; otherwise objects
    keeps_text_arguments: bool = False  # text stays text: the template shows it as it would show the object
    keeps_null: bool = True  # null content stays null; otherwise it becomes ""
    keeps_empty: bool = True  # empty content stays empty; otherwise it becomes null
    keeps_text: bool = True  # text is in the turn with the calls; otherwise in a turn before it
    has_short_ids: bool = False  # ids of calls have nine characters, otherwise any number

    def turns(self, message: ChatMessage, content: str | list[JsonObject]) -> list[JsonObject]:
        """Return a message as the turns to give to a template. `content`: the message's text or parts, as the template
        expects."""
        more = _with_thought(message)
        turn: JsonObject = {"role": message.role, "content": content, **more}
        if self.has_short_ids and isinstance(call_id := more.get("tool_call_id"), str):
            turn["tool_call_id"] = short_id(call_id)
        if not (calls := calls_of(message)):
            return [turn]
        turn["tool_calls"] = list(map(self._call, calls))
        if message.text or any(isinstance(part, MediaPart) for part in message.parts):
            if self.keeps_text:
                return [turn]
            del more["tool_calls"]
            null = None if self.keeps_null else ""
            called = {"role": message.role, "content": null, "tool_calls": turn["tool_calls"]}
            return [{"role": message.role, "content": content, **more}, called]
        is_null = message.content is None
        stays = self.keeps_null if is_null else self.keeps_empty
        return [turn | {"content": None if is_null == stays else content}]

    def _call(self, call: object) -> object:
        """Return a call with its id and its arguments in this form. If the template expects an object, text that is not
        a JSON object becomes {}: a call that was cut off does not make the conversation fail."""
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(call, Mapping) or not isinstance(function, Mapping):
            return call
        given = function.get("arguments")
        if self.keeps_text_arguments and isinstance(given, str) and is_object(given):
            arguments: object = given
        elif self.has_text_arguments:
            text = given if isinstance(given, str) else json.dumps({} if given is None else given, ensure_ascii=False)
            arguments = text if text.strip() else "{}"
        else:
            arguments = _object(given) if isinstance(given, str | None) else given
        written: JsonObject = {**call, "function": {**function, "arguments": arguments}}
        if self.has_short_ids and isinstance(call_id := call.get("id"), str):
            written["id"] = short_id(call_id)
        return written


AS_GIVEN = TurnShape()
UNSHOWN = TurnShape(keeps_null=False)  # for templates that show no calls
Render: TypeAlias = Callable[[list[ChatMessage], JsonObject, TurnShape], str]


def find_turn_shape(render: Render) -> TurnShape:
    """Return the form in which a template shows tool calls. `render` renders messages with variables and a form; it may
    raise any exception."""
    trials: tuple[JsonObject, JsonObject] = {}, {"tools": [_TOOL]}
    for variables in trials:
        for has_text_arguments in (False, True):
            probe = _Probe(render, variables)
            shape = TurnShape(has_text_arguments)
            null, empty, said = (probe.shown(shape, content) for content in (None, "", _SAID))
            prints_null = bool(null) and null.count("None") > (empty or said).count("None")
            if (null and not prints_null) or empty:
                shape = shape._replace(keeps_null=bool(null) and not prints_null, keeps_empty=bool(empty))
                if _SAID not in said:
                    split = shape._replace(keeps_text=False)
                    parted = probe.shown(split, _SAID)
                    if parted and (not said or _SAID in parted):
                        shape = split
                return shape._replace(
                    has_short_ids=not probe.shown(shape, _SAID, _LONG_ID), keeps_text_arguments=probe.takes_both(shape)
                )
    return UNSHOWN


class _Probe(NamedTuple):
    """A template, and the variables for the conversations that are tried."""

    render: Render
    variables: JsonObject

    def shown(self, shape: TurnShape, content: str | None, call_id: str = _SHORT_ID) -> str:
        """Return the rendered text of a conversation with a call if it shows the call, as JSON or in another form; else
        ""."""
        text = self._rendered(shape, content, call_id, _ARGUMENTS)
        as_text, as_python = json.dumps(_ARGUMENTS), f"{{'{_KEY}'"
        is_right = as_text in text if shape.has_text_arguments else as_python not in text
        return text if is_right and _NAME in text and _VALUE in text else ""

    def takes_both(self, shape: TurnShape) -> bool:
        """Return whether the template shows arguments in the same form if they are objects and if they are text."""
        if shape.has_text_arguments:
            return False
        kept = shape._replace(keeps_text_arguments=True)
        as_object = self._rendered(kept, _SAID, _SHORT_ID, _MORE)
        as_text = self._rendered(kept, _SAID, _SHORT_ID, json.dumps(_MORE, ensure_ascii=False))
        return bool(as_object) and as_object == as_text

    def _rendered(self, shape: TurnShape, content: str | None, call_id: str, arguments: object) -> str:
        """Return the rendered text of a conversation with a call; "" if the template refuses it."""
        call: JsonObject = {"id": call_id, "type": "function", "function": {"name": _NAME, "arguments": arguments}}
        messages = [
            ChatMessage("user", "probe"),
            ChatMessage("assistant", content, {"tool_calls": [call]}),
            ChatMessage("tool", "probe", {"tool_call_id": call_id, "name": _NAME}),
        ]
        with contextlib.suppress(Exception):  # a template may fail in any way that Python can
            return self.render(messages, self.variables, shape)
        return ""


def _with_thought(message: ChatMessage) -> JsonObject:
    """Return the other fields of a message, with its reasoning under each of THOUGHT_NAMES. `thinking` is left out next
    to text and calls, since gpt-oss's template refuses it there."""
    more = dict(message.more)
    thought = next((more[name] for name in THOUGHT_NAMES if more.get(name) is not None), None)
    if message.role == "assistant" and thought is not None:
        more = dict.fromkeys(THOUGHT_NAMES, thought) | more
        if message.text and calls_of(message):
            del more["thinking"]
    return more


def _object(text: str | None) -> JsonObject:
    try:
        value = msgspec.json.decode(text or "{}")
    except (msgspec.DecodeError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
