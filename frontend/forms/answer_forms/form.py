"""AnswerForm: how a model writes thoughts and calls, as data: texts that stand around names, keys and values.

A form is learned from a chat template, read from a checkpoint or named. Reading, streaming and grammars use the same
one. Its texts, called joints, are exact as the template renders them, except that white space in them matches any
white space or none, since models vary line breaks. {ID}, {INDEX} and {NAME} in a joint stand for a call's id, for its
place among the calls of the turn, from 0, and for its name once more. Knows no template and no text of an answer.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

CallKind: TypeAlias = Literal["object", "json", "tagged", "literal"]
Reader: TypeAlias = Literal["machine", "llama", "harmony", "response_template"]


class CallForm(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How the calls of an answer are written. The fields below `end` belong to the kinds that are named beside them.

    The first call stands behind `start`, each further one behind `next`, and `end` follows the last. What stands there:

    - object: one JSON object that holds the name and the arguments: `<tool_call>{"name": "f", "arguments": {…}}`.
    - json: the name, `mid`, and the arguments as a JSON object: `[TOOL_CALLS]f[ARGS]{…}`.
    - tagged: the name, and each argument by itself: NAME `first` KEY `mid` VALUE `pair` KEY `mid` VALUE. Behind the
      last value comes `next` or `end`; behind the name of a call without arguments `empty_next` or `empty_end`.
      Texts have no quotes there.
    - literal: the name, `mid`, arguments as in a programming language, and `close`: `f(a='x', b=[1])`, or
      `call:f{a:<|"|>x<|"|>}`.
    """

    kind: CallKind
    start: str
    next: str
    end: str
    name_path: tuple[str, ...] = ()  # object: keys that lead to the name; (): the name is the object's only key
    arguments_path: tuple[str, ...] = ()  # object: keys that lead to the arguments
    id_path: tuple[str, ...] = ()  # object: keys that lead to the call's id; (): it has none
    mid: str = ""  # json, literal: name → arguments; tagged: key → value, unless `mid_by_type` has one for its type
    first: str = ""  # tagged: name → first key
    pair: str = ""  # tagged: value → next key; literal: between two arguments
    mid_by_type: dict[str, str] = {}  # tagged: joint for values of a type, "string" or "other"
    empty_next: str = ""  # tagged: name of a call without arguments → next name
    empty_end: str = ""  # tagged: name of a last call without arguments → what follows the calls
    assign: str = ""  # literal: key → value
    close: str = ""  # literal: behind the arguments
    quote: str = ""  # literal: around a text


class AnswerForm(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How an answer is written: a thought or none, content, calls. `AnswerForm()` is content alone."""

    name: str = "none"  # of --tool-call-parser, or "learned"
    reader: Reader = "machine"
    thought: tuple[str, str] | None = None  # the texts that open and close a thought
    begins_inside: bool = False  # answers begin inside the thought, though no prompt opens it
    content_open: str = ""  # a header that may stand between a thought or the begin and the content
    turn_end: str = ""  # what the template writes behind an answer
    calls: tuple[CallForm, ...] = ()  # grammars write the first; all are read, where several are in use
    response_template: str = ""  # JSON, for the reader of that name
