"""Feed the text of an answer to parsers, whole or in pieces, and collect the parts."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from hypothesis import strategies as st

from tokenloom.frontend.forms.answer_forms.named import named_form
from tokenloom.frontend.forms.openai.text import AnswerStyle, AnswerText
from tokenloom.frontend.forms.parsers.names import new_parsers
from tokenloom.frontend.forms.parsers.parts import Arguments, CallBegin, Content, Parser, Part, Thought, whole_calls
from tokenloom.ipc.codec import JsonObject
from tokenloom.ipc.messages.client import Delta

Parsed = tuple[str, str, list[tuple[str, object]]]  # thought, content, calls by name and arguments
PLACES = st.lists(st.integers(0, 200), max_size=8)
CALL = '<tool_call>{"name": "f", "arguments": {"a": [1, {"b": "x"}]}}</tool_call>'
ANSWER_TEXTS = (
    "plain text, with a line\nbreak",
    "  \n leading space",
    "<think>why\nnot</think>\n\n  so: yes",
    f"<think>why</think>\nI look. {CALL}\n{CALL}  \n",
    f"{CALL} \n and then {CALL}",
    f"<think>never closed {CALL}",
    CALL[:55],
    f"said {CALL[:57]}",
    "",
)
ANSWERS = st.sampled_from(ANSWER_TEXTS)


def cut(text: str, places: Sequence[int]) -> list[str]:
    edges = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[start:end] for start, end in itertools.pairwise(edges)]


def parts_of(parser: Parser, pieces: Sequence[str]) -> list[Part]:
    return [part for piece in pieces for part in parser.append(piece)] + parser.finish()


def parse(parser: Parser, pieces: Sequence[str]) -> Parsed:
    parts = parts_of(parser, pieces)
    content, calls = whole_calls(parts)
    thought = "".join(part.text for part in parts if isinstance(part, Thought))
    return thought, content, [(call.name, json.loads(call.arguments)) for call in calls]


def joined(parts: Sequence[Part]) -> list[tuple[str, str]]:
    """Return kinds and texts of parts, without ids, with neighbours of the same kind joined."""
    kinds = [
        (type(part).__name__, part.name if isinstance(part, CallBegin) else getattr(part, "text", "")) for part in parts
    ]
    found: list[tuple[str, str]] = []
    for kind, text in kinds:
        if found and found[-1][0] == kind and kind in ("Content", "Thought", "Arguments"):
            found[-1] = (kind, found[-1][1] + text)
        else:
            found.append((kind, text))
    return found


def check_cuts(new_parser: Callable[[], Parser], text: str, places: Sequence[int]) -> None:
    """Fail unless the parts are equal whether `text` comes whole or cut at `places`."""
    whole, pieces = parts_of(new_parser(), [text]), parts_of(new_parser(), cut(text, places))
    assert joined(pieces) == joined(whole)
    assert whole_calls(pieces)[0] == whole_calls(whole)[0]
    for part in (*whole, *pieces):
        assert not isinstance(part, Content | Thought | Arguments) or part.text


def call_parser(name: str, schemas: Mapping[str, JsonObject] | None = None) -> Parser:
    """The parser of the calls of a named form."""
    (parser,) = new_parsers(named_form(name, "none"), schemas or {}, is_inside_thought=False)
    return parser


def thought_parser(name: str, *, is_open: bool) -> Parser:
    """The parser of the thoughts of a named form. `is_open`: the answer begins inside one."""
    (parser,) = new_parsers(named_form("none", name), {}, is_inside_thought=is_open)
    return parser


def new_style(**changes: Any) -> AnswerStyle:
    """The style of answers in Hermes' form with thoughts between <think> and </think>."""
    form = named_form(changes.pop("tool_parser", "hermes"), changes.pop("reasoning_parser", "think"))
    style: dict[str, Any] = {"form": form, "schemas": {}, "is_forced": False}
    style |= {"forced_name": None, "is_inside_thought": False, "max_calls": None}
    return AnswerStyle(**style | changes)


def new_answer_text(**changes: Any) -> AnswerText:
    """A reader of answers of a style."""
    return AnswerText(new_style(**changes))


def read_deltas(pieces: Sequence[str], **changes: Any) -> Iterator[list[Part]]:
    """The parts of each delta if the answer's text comes in `pieces`, one a delta."""
    text = new_answer_text(**changes)
    for position, piece in enumerate(pieces):
        finish_reason = "stop" if position == len(pieces) - 1 else None
        yield text.read(Delta(request_id="r", text=piece, finish_reason=finish_reason))
