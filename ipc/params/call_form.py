"""CallForm: how a model writes its calls, as data: texts that stand around names, keys and values.

Frontends read answers by it, and the core compiles grammars of it. Its texts, called joints, are exact as the chat
template renders them. {ID}, {INDEX}, {NUMBER}, {NAME} and {KEY} in a joint stand for a call's id, for its place among
the calls of the turn, from 0 and from 1, for its name once more, and for the key of the value before the joint once
more. Knows no template and no text of an answer.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Literal, TypeAlias

import msgspec

PLACE = re.compile(r"\{(NAME|KEY|ID|INDEX|NUMBER|ARGUMENTS)\}")  # places of values in a joint
_EDGE = re.compile(r"(?=<)|(?<=>)|(?=\[/?[A-Z_]{2,}\])|(?<=\])")  # between two markers

CallKind: TypeAlias = Literal["object", "json", "tagged", "literal"]
Spelling: TypeAlias = Literal["own", "json", "python"]


class CallForm(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How the calls of an answer are written. The fields below `end` belong to the kinds that are named beside them.

    The first call stands behind `start`, each further one behind `next`, and `end` follows the last. Without a `next` a
    turn shows one call. What stands there:

    - object: one JSON object that holds the name and the arguments: `<tool_call>{"name": "f", "arguments": {…}}`.
    - json: the name, `mid`, and the arguments as a JSON object: `[TOOL_CALLS]f[ARGS]{…}`.
    - tagged: the name, and each argument by itself: NAME `first` KEY `mid` VALUE `pair` KEY `mid` VALUE. Behind the
      last value comes `next` or `end`; behind the name of a call without arguments `empty_next` or `empty_end`.
      Texts have no quotes there.
    - literal: the name, `mid`, arguments as in a programming language, and `close`: `f(a='x', b=[1])`, or
      `call:f{a:<|"|>x<|"|>}`. `texts`, `lists` and `objects` are the spellings of values that stand in no other one: as
      JSON or as Python writes them, with all that is in them, or in the form's own way: texts without escapes between
      two quotes, and the values in a list or an object as the arguments are.
    """

    kind: CallKind
    start: str
    next: str
    end: str
    name_path: tuple[str, ...] = ()  # object: keys that lead to the name; (): the name is the object's only key
    arguments_path: tuple[str, ...] = ()  # object: keys that lead to the arguments
    id_path: tuple[str, ...] = ()  # object: keys that lead to the call's id; (): it has none
    id_text: str = ""  # a call's id where its parts are written, not {ID}: "functions.{NAME}:{INDEX}"
    shape: str = ""  # object: one as JSON text, for the order of its keys and for other fields; "": name, arguments, id
    id_pattern: str = "[A-Za-z0-9_-]{1,64}"  # of ids that the template accepts, where the form has them
    mid: str = ""  # json, literal: name → arguments; tagged: key → value, unless `mid_by_type` has one for its type
    first: str = ""  # tagged: name → first key
    pair: str = ""  # tagged: value → next key; literal: between two arguments
    mid_by_type: dict[str, str] = {}  # tagged: joint for texts, "string", and for others by JSON type or all, "other"
    empty_next: str = ""  # tagged: name of a call without arguments → next name
    empty_end: str = ""  # tagged: name of a last call without arguments → what follows the calls
    assign: str = ""  # literal: key → value
    close: str = ""  # literal: behind the arguments
    quote: str = ""  # literal: around a text
    texts: Spelling = "own"
    lists: Spelling = "own"
    objects: Spelling = "own"
    words: tuple[str, ...] = ()  # literal: null, false and true outside of JSON's and Python's; (): of either
    has_bare_keys: bool = False  # literal: no quotes around the keys of an `own` object


def markers_of(joint: str) -> tuple[str, ...]:
    """Return the markers of a joint, <…>, […] or other text between them, in order, without the white space around
    them."""
    return tuple(text for piece in _EDGE.split(joint) if (text := piece.strip()))


def first_marker(joint: str) -> str:
    """Return the first marker of a joint; "" if it has none."""
    return next(iter(markers_of(joint)), "")


def marker_before_place(marker: str) -> str:
    """Return a marker up to the first place of a value behind its first character."""
    place = PLACE.search(marker, 1)
    return marker if place is None else marker[: place.start()]


def shortest_begin(form: CallForm, tokens: Iterable[str]) -> str:
    """Return the shortest text that a reader or a grammar may take for the first marker of a form's calls: one of
    `tokens`, or that of `first_marker`. "" if calls begin without one. All of these begin with it."""
    bare = form.start.partition("{NAME}")[0].lstrip()
    found = [token for token in tokens if token and bare.startswith(token)]
    return min([marker_before_place(first_marker(bare)), *found], key=len)
