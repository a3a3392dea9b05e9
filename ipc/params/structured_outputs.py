"""StructuredOutputsParams: the constraint on the text of an answer, validated at construction.

Knows no grammar language: core/features/grammar/compiler.py finds errors in a schema, regex or grammar.
"""

from __future__ import annotations

import json as json_module
import re
from typing import Literal, TypeAlias

import msgspec

from ..codec import JSON_STRING
from ..errors import RequestError
from .public_struct import PublicStruct

GrammarKind: TypeAlias = Literal["json", "compact_json", "regex", "choice", "lark", "calls", "behind_thought"]
ThoughtEdges: TypeAlias = tuple[str, str]  # that open and close a thought

MAX_GRAMMAR_CHARACTERS = 1 << 18  # in a schema, regex, grammar, or all choices together
MAX_CHOICES = 4096
MAX_SCHEMA_DEPTH = 124  # nested objects and lists: the compiler reads up to 127 levels, 3 of which it adds itself

_BRACKETS = re.compile(rf"{JSON_STRING}|([\[{{])|[\]}}]")  # a string is one match, so that brackets in it do not count
_ANY_OBJECT = '{"type":"object"}'


class StructuredOutputsParams(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True, metaclass=PublicStruct
):
    """A constraint of exactly one kind, with vLLM's names; construction converts `json` to text."""

    json: str | dict[str, object] | None = None  # JSON schema that the answer must satisfy
    json_object: bool = False  # the answer is any JSON object
    regex: str | None = None  # the whole answer matches it; syntax of Rust's regex crate
    choice: list[str] | None = None  # the answer is one of these
    grammar: str | None = None  # Lark, or llama.cpp's EBNF (GBNF)
    disable_any_whitespace: bool = False  # no whitespace in JSON outside of its strings
    disable_additional_properties: bool = False  # no effect: schemas are closed unless they say otherwise
    calls: str | None = None  # the text of a CallsConstraint, which frontends make; no request may give it
    includes_thought: bool = False  # constrain the whole output, not only the text after the reasoning
    begin: str = ""  # an added token, or text between two, that constrained text starts with; it ends reasoning
    thought: ThoughtEdges | None = None  # around a thought that may come first
    repeats: bool = False  # only text from a `begin` to the constraint's end is constrained, each time that one comes

    def __post_init__(self) -> None:
        if isinstance(self.json, dict):
            msgspec.structs.force_setattr(self, "json", _json_text(self.json))
        given = [name for name in _ALL_NAMES if getattr(self, name)]
        if len(given) != 1:
            found = ", ".join(given) or "none that is not empty"
            raise RequestError(f"structured_outputs needs exactly one of {', '.join(_NAMES)}; it has {found}")
        for name in ("json", "regex", "grammar", "calls"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                raise RequestError(f"structured_outputs.{name} must be text, got {type(value).__name__}")
        if self.choice is not None:
            _check_choice(self.choice)
        if len(self._inner_text) > MAX_GRAMMAR_CHARACTERS:
            raise RequestError(
                f"structured_outputs.{given[0]} has {len(self._inner_text)} characters, at most "
                f"{MAX_GRAMMAR_CHARACTERS} are allowed: split or simplify it"
            )
        nested = self.json or self.calls
        if isinstance(nested, str) and (depth := _depth(nested)) > MAX_SCHEMA_DEPTH:
            raise RequestError(
                f"structured_outputs.{given[0]} is nested {depth} levels deep, at most {MAX_SCHEMA_DEPTH} can be "
                "compiled: use fewer levels, or $ref to schemas in $defs"
            )
        if self.thought is not None and not all(each.strip() for each in self.thought):
            raise RequestError(
                "structured_outputs.thought must be two texts that are not empty: leave it out or give both"
            )
        if self.repeats and (not self.begin or self.includes_thought):
            raise RequestError("structured_outputs.repeats needs begin, and no includes_thought: give begin alone")

    @classmethod
    def of(cls, value: StructuredOutputsParams | dict[str, object]) -> StructuredOutputsParams:
        """Return `value`, converted if it is a dict of fields; RequestError if these are invalid."""
        if isinstance(value, cls):
            return value
        if isinstance(value, dict) and "calls" in value:
            raise RequestError("structured_outputs.calls is made by the engine alone: give tools and tool_choice")
        try:
            return msgspec.convert(value, cls)
        except msgspec.ValidationError as error:
            raise RequestError(str(error.__cause__ or f"structured_outputs: {error}")) from None

    @property
    def kind(self) -> GrammarKind:
        """Language of `text`."""
        if self.thought is not None:
            return "behind_thought"
        return self._inner_kind

    @property
    def text(self) -> str:
        """The constraint in the language `kind`; choices are a JSON list, and `behind_thought` is an AnswerGrammar."""
        if self.thought is not None:
            grammar = AnswerGrammar(kind=self._inner_kind, text=self._inner_text, thought=self.thought)
            return msgspec.json.encode(grammar).decode()
        return self._inner_text

    @property
    def _inner_kind(self) -> GrammarKind:
        if self.regex is not None:
            return "regex"
        if self.choice is not None:
            return "choice"
        if self.grammar is not None:
            return "lark"
        if self.calls is not None:
            return "calls"
        return "compact_json" if self.disable_any_whitespace else "json"

    @property
    def _inner_text(self) -> str:
        if self.choice is not None:
            return json_module.dumps(self.choice)
        if self.json_object:
            return _ANY_OBJECT
        text = self.json or self.regex or self.grammar or self.calls
        assert isinstance(text, str)
        return text


class AnswerGrammar(msgspec.Struct, frozen=True, kw_only=True):
    """A grammar of an answer or, if there are texts around a thought, of the text behind a thought that may come."""

    kind: GrammarKind
    text: str
    thought: ThoughtEdges | None = None

    @classmethod
    def of(cls, kind: GrammarKind, text: str) -> AnswerGrammar:
        """Read the `kind` and the `text` of StructuredOutputsParams."""
        if kind == "behind_thought":
            return msgspec.json.decode(text, type=cls)
        return cls(kind=kind, text=text)


_NAMES = ("json", "json_object", "regex", "choice", "grammar")
_ALL_NAMES = (*_NAMES, "calls")


def _json_text(schema: dict[str, object]) -> str:
    try:
        return json_module.dumps(schema, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"structured_outputs.json is not a JSON schema: {error}") from None


def _depth(text: str) -> int:
    """Return the nesting depth of a JSON text, or 0 if it has too few brackets to exceed MAX_SCHEMA_DEPTH."""
    if text.count("{") + text.count("[") <= MAX_SCHEMA_DEPTH:
        return 0
    depth = deepest = 0
    for found in _BRACKETS.finditer(text):
        if found[1]:
            depth += 1
            deepest = max(deepest, depth)
        elif found[0] in "]}":
            depth -= 1
    return deepest


def _check_choice(choice: list[str]) -> None:
    if not isinstance(choice, list) or len(choice) > MAX_CHOICES:
        raise RequestError(f"structured_outputs.choice must be a list of 1 to {MAX_CHOICES} strings")
    for each in choice:
        if not isinstance(each, str) or not each:
            raise RequestError(f"structured_outputs.choice holds {repr(each)[:80]}: each must be a non-empty string")
