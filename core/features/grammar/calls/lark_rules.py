"""LarkRules: the rules of one grammar, with texts in which special tokens stand.

The library reads a quoted text as ordinary tokens and never as a special one, so each special token of a text is
written by its id. Knows no calls and no schema.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from .....ipc.params.call_form import first_marker, marker_before_place

_SPACE = r" /[\s\x1c-\x1f]*/ "  # that a reader takes for the white space in a marker


class Closing(NamedTuple):
    """The begin of a joint that ends a text: white space and a marker, which the text before it cannot contain."""

    space: str
    marker: str


class LarkRules:
    """Owner of the rules. `special_ids`: the tokens of the vocabulary that the library takes for special, by text;
    `end_ids`: those that end an answer."""

    def __init__(self, special_ids: Mapping[str, int], end_ids: Iterable[int]) -> None:
        self._special_ids, self._end_ids = special_ids, frozenset(end_ids)
        texts = sorted(special_ids, key=len, reverse=True)
        self._special = re.compile("(" + "|".join(map(re.escape, texts)) + ")") if texts else None
        self.name_by_definition: dict[str, str] = {}
        self._lines: list[str] = []

    def rule(self, definition: str, kind: str = "r") -> str:
        """Return the name of the rule with this definition, or of the terminal if `kind` is in capitals; add it if it
        is new."""
        known = self.name_by_definition
        return known.setdefault(definition, f"{kind}{len(known)}")

    def terminal(self, definition: str) -> str:
        return self.rule(definition, "T")

    def add(self, name: str, definition: str) -> None:
        """Add a rule that others name before it is defined."""
        self._lines.append(f"{name}: {definition}")

    def text(self, start: str, targets: Iterable[str] = ()) -> str:
        """Return the grammar of `start`. targets: further rules."""
        rules = [f"{name}: {definition}" for definition, name in self.name_by_definition.items()]
        return "\n".join([f"start: {start}", *self._lines, *targets, *rules])

    def exact(self, text: str) -> str:
        """Return an expression for a text; "" for none. It ends before a token that ends the answer."""
        pieces = list[str]()
        for piece in self._special.split(text) if self._special else [text]:
            token_id = self._special_ids.get(piece)
            if token_id in self._end_ids:
                break
            pieces += [f"<[{token_id}]>"] if token_id is not None else [quoted(piece)] if piece else []
        return " ".join(pieces)

    def first_special(self, text: str) -> str:
        """Return the special token that a text begins with; "" if there is none."""
        return found[0] if self._special and (found := self._special.match(text)) is not None else ""

    def specials_except(self, texts: Iterable[str]) -> str:
        """Return an expression for any special token but those in `texts` and those that end the answer; "" if there is
        none."""
        found = "".join(texts)
        left_out = {token_id for special, token_id in self._special_ids.items() if special in found}
        ids = sorted({*self._special_ids.values()} - self._end_ids - left_out)
        return f"<[{','.join(map(str, ids))}]>" if ids else ""

    def split(self, joint: str) -> tuple[Closing, str]:
        """Return how a joint begins, and the rest of it."""
        bare = joint.lstrip()
        space = joint[: len(joint) - len(bare)]
        marker = self.first_special(bare) or first_marker(bare)
        marker = marker_before_place(marker)
        return Closing(space, marker), bare[len(marker) :]

    def closed(self, terminal: str, closing: Closing) -> str:
        """Return an expression for a text of `terminal`, an expression without rules, and the closing behind it. The
        two are one terminal, since the library would otherwise take the begin of the closing for text, up to a special
        token in the closing: that ends the text in any case."""
        plain, *rest = self._special.split(closing.marker) if self._special else [closing.marker]
        begin = closing.space + plain
        body = f"({terminal}) {quoted(begin)}" if begin else terminal
        return f"{self.terminal(body)} {self.exact(''.join(rest))}".rstrip()


def quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def without(markers: Iterable[str]) -> str:
    """Return a terminal for texts that contain none of these, with whatever white space for theirs; any text, also
    none."""
    found = " | ".join(_SPACE.join(map(quoted, each.split())) for each in dict.fromkeys(markers) if each)
    return f"/(?s:.*)/ & ~(/(?s:.*)/ ({found}) /(?s:.*)/)" if found else "/(?s:.*)/"


def first_held(text: str, markers: Iterable[str]) -> re.Match[str] | None:
    """Return the first of these markers in a text, with whatever white space for theirs; None if it holds none."""
    found = "|".join(r"\s*".join(map(re.escape, each.split())) for each in markers if each)
    return re.search(found or "(?!)", text)
