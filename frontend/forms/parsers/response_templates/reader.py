"""ResponseTemplateParser: reads an answer by transformers' own reader of response templates.

It is for templates that no AnswerForm describes, with regular expressions around their fields. Text and thoughts come
as they are read; a call comes whole at its end, or as content if its region is no call. transformers finds the regions;
the text of a call is parsed here at its end, by the field's own rules. The expressions are the checkpoint's: a search
that takes longer than SEARCH_S ends the parsing, and the rest is content.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

import msgspec

from .....ipc.codec import JsonObject
from ..argument_types import ArgumentTypes
from ..parts import Part, Thought, call, content, is_object

CALLS = "tool_calls"
CONTENT = "content"
SEARCH_S = 0.25
_OPENING = "tokenloom_opening"  # the group around what opens a call
_SPECIAL = re.compile(r"\\\w|\(\?(?:P<\w+>|<?[=!]|:)?")  # parts of a pattern that end a run of literal characters
_LITERAL = re.compile(r"(?:\\\W|[^\\()[\]{}.*+?|^$\s])+")


class ResponseTemplateParser:
    """Parser of one answer."""

    def __init__(self, template: str, schemas: Mapping[str, JsonObject], *, is_inside_thought: bool) -> None:
        """`template`: a response template as JSON; `schemas`: name of a tool → schema of its arguments. ImportError if
        transformers has no such reader, ValueError if it refuses the template."""
        from transformers.utils.chat_parsing import ResponseParser  # takes a second

        regions, self._fields = _compiled(template)
        self._types = {name: ArgumentTypes(schema) for name, schema in schemas.items()}
        self.markers = _markers(template)
        prefix = ""
        for name, field in self._fields.items():
            if is_inside_thought and name not in (CALLS, CONTENT) and field.open_literals:
                prefix = field.open_literals[0]
        self._reader = ResponseParser(regions, prefix=prefix)
        self._raw: str | None = None  # the region of the open call
        self._opening = ""  # of the open call
        self._space = ""  # held: white space at the end of a region is not part of it
        self._is_fresh = True  # the region has had white space alone
        self._is_lost = False  # an expression took too long

    def append(self, text: str) -> list[Part]:
        if self._is_lost:
            return content(text)
        num_read = self._reader._pos
        try:
            return self._parts(self._reader.feed(text))
        except TimeoutError:
            return self._give_up(num_read)

    def finish(self) -> list[Part]:
        if self._is_lost:
            return []
        num_read = self._reader._pos
        try:
            return self._parts(self._reader.finalize()[1])
        except TimeoutError:
            return self._give_up(num_read)

    def _give_up(self, num_read: int) -> list[Part]:
        """Return as content all text that no part has. `num_read`: characters before the last piece that the reader had
        read; it alone has the text behind them, and the opening text of a call."""
        self._is_lost = True
        held = self._space
        if self._raw is not None:
            held += self._opening + self._raw
        return content(held + self._reader._buffer[num_read:])

    def _parts(self, events: list[dict[str, Any]]) -> list[Part]:
        parts: list[Part] = []
        for event in events:
            if event["type"] == "region_open":
                self._open(event["field"])
            elif event["type"] == "region_chunk":
                parts += self._text(event["field"], event["text"])
            elif event["field"] == CALLS:
                self._raw = None
                parts += self._calls(event["value"])
        if self._raw is not None:
            self._opening = self._reader._captures[_OPENING]
        return parts

    def _open(self, name: str) -> None:
        self._raw = None
        if name == CALLS:
            self._raw = ""
        self._space = ""
        self._is_fresh = True

    def _text(self, name: str, text: str) -> list[Part]:
        """Return the parts of the next text of a region."""
        if self._raw is not None:
            self._raw += text
            return []
        text = self._stripped(text)
        if name == CONTENT or not text:
            return content(text)
        return [Thought(text)]

    def _stripped(self, text: str) -> str:
        """Return the next text of a region without the white space at the region's ends."""
        text = self._space + text
        if self._is_fresh:
            text = text.lstrip()
        kept = text.rstrip()
        self._is_fresh = self._is_fresh and not kept
        self._space = text[len(kept) :]
        return kept

    def _calls(self, region: dict[str, str]) -> list[Part]:
        """Return the calls of a region, or the region as content."""
        from transformers.utils.chat_parsing.content_parsers import process_field

        field = self._fields[CALLS]
        raw = region["opening"] + region["body"] + "".join((field.close_literals or [])[:1])
        opened = field.open_re.fullmatch(region["opening"], timeout=SEARCH_S)
        if opened is None:  # it looks beyond its own text
            return content(raw)
        groups = {name: text for name, text in opened.groupdict().items() if text is not None}
        try:
            found = process_field(region["body"], field, groups)
        except (ValueError, KeyError, RecursionError):
            return content(raw)
        if not isinstance(found, list):
            found = [found]
        parts: list[Part] = []
        for each in found:
            named = self._call(each)
            if named is None:
                return content(raw)
            parts += call(*named, raw)
        return parts or content(raw)

    def _call(self, found: object) -> tuple[str, str] | None:
        """Return the name of a call, and its arguments as JSON text; None if it is none."""
        if isinstance(found, dict):
            found = found.get("function", found)
        if not isinstance(found, dict) or not isinstance(found.get("name"), str):
            return None
        given = found.get("arguments") or {}
        if isinstance(given, dict):
            given = "{" + ", ".join(self._pairs(found["name"], given)) + "}"
        if not isinstance(given, str) or not is_object(given):
            return None
        return found["name"], given

    def _pairs(self, name: str, given: JsonObject) -> Iterator[str]:
        types = self._types.get(name) or ArgumentTypes({})
        is_untyped = self._fields[CALLS].content != "json"
        for key, value in given.items():
            written = json.dumps(value, ensure_ascii=False)
            if is_untyped and isinstance(value, str):
                written = types.written(key, value)
            yield f"{json.dumps(key, ensure_ascii=False)}: {written}"


class _Bounded:
    """A compiled expression, searches of which end with TimeoutError after SEARCH_S."""

    def __init__(self, pattern: Any) -> None:
        self._pattern = pattern

    def search(self, text: str, position: int, *, partial: bool = False) -> Any:
        return self._pattern.search(text, position, partial=partial, timeout=SEARCH_S)


@lru_cache(maxsize=16)
def _compiled(template: str) -> tuple[Any, dict[str, Any]]:
    """Return a template that finds the regions and leaves the text of calls as it is, for transformers' reader, and the
    compiled fields of the given one. ImportError, ValueError: see ResponseTemplateParser."""
    from transformers.utils.chat_parsing.response_templates import load_response_template

    given = msgspec.json.decode(template)
    fields = load_response_template(given).fields
    if CALLS in given["fields"]:
        field = given["fields"][CALLS]
        replaced = {
            "open_pattern": f"(?P<{_OPENING}>{fields[CALLS].open_re.pattern})",
            "content": "text",
            "content_args": {"strip": False},
            "transform": {"opening": f"{{{_OPENING}}}", "body": "{content}"},
            "repeats": True,
        }
        kept = {key: field[key] for key in ("close", "close_pattern") if key in field}
        given["fields"][CALLS] = kept | replaced
    regions = load_response_template(given)
    for each in regions.fields.values():
        each.open_re = each.open_re and _Bounded(each.open_re)
        each.close_re = each.close_re and _Bounded(each.close_re)
    return regions, fields


@lru_cache(maxsize=16)
def _markers(template: str) -> tuple[str, ...]:
    """Return the literal texts in what opens and closes the fields of a template."""
    markers: dict[str, None] = {}
    for field in msgspec.json.decode(template)["fields"].values():
        for key in ("open", "close"):
            literals = field.get(key) or []
            if isinstance(literals, str):
                literals = [literals]
            markers |= dict.fromkeys(literals)
            runs = _LITERAL.findall(_SPECIAL.sub(" ", field.get(f"{key}_pattern") or ""))
            markers |= dict.fromkeys(re.sub(r"\\(.)", r"\1", run) for run in runs)
    return tuple(markers)
