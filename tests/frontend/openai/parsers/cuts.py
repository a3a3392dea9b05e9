"""An answer's text, fed to parsers whole or in pieces, and what came of it."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence

from tokenloom.frontend.openai.parsers.parts import Arguments, CallBegin, Content, Parser, Part, Thought, whole_calls

Parsed = tuple[str, str, list[tuple[str, object]]]  # thought, content, calls by name and arguments


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
    """Neighbours of a kind as one; ids left out."""
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


def same_however_it_is_cut(new_parser: Callable[[], Parser], text: str, places: Sequence[int]) -> None:
    whole, pieces = parts_of(new_parser(), [text]), parts_of(new_parser(), cut(text, places))
    assert joined(pieces) == joined(whole)
    assert whole_calls(pieces)[0] == whole_calls(whole)[0]
    for part in (*whole, *pieces):
        assert not isinstance(part, Content | Thought | Arguments) or part.text
