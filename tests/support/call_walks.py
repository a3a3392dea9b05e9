"""Random answers through the masks of a constraint on calls, as a model with random weights would give them.

A walk draws each token from the mask. Uniform draws hardly ever end a text, so that with PHRASE_CHANCE a walk tries a
phrase: a marker of the form, a bracket, or the end of the answer. It takes one if the masks allow all of its tokens.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jsonschema
import numpy as np
import tokenizers

from tokenloom.core.features.grammar.compiler import GrammarCompiler, Matcher
from tokenloom.frontend.forms.answer_forms.form import AnswerForm
from tokenloom.frontend.forms.parsers.names import new_parsers
from tokenloom.frontend.forms.parsers.parts import Content, Part, Thought, whole_calls
from tokenloom.ipc.codec import JsonObject
from tokenloom.ipc.params.structured_outputs import StructuredOutputsParams

DEMO = Path(__file__).resolve().parents[2] / "demo"
EOS = 1
MAX_TOKENS = 400  # of a walk; a longer one is cut off
PHRASE_CHANCE = 0.35
_SIGNS = ('"', '",', '": ', "}", "]", "}}", ", ", "'", ")", "\n", "1", "0", "true", "a", " ")


class Walk(NamedTuple):
    """One answer. `text`: with the special tokens in it, without the end token. Not `is_whole`: it was cut off."""

    text: str
    is_whole: bool


class WalkedVocabulary:
    """The demo's vocabulary with further tokens; `compiler` and `tokenizer` share it."""

    def __init__(self, folder: Path, markers: Iterable[str]) -> None:
        """folder: an empty one. markers: texts that become special tokens."""
        described = json.loads((DEMO / "tokenizer.json").read_text())
        known = {each["content"] for each in described["added_tokens"]}
        size = 1 + max(*described["model"]["vocab"].values(), *(each["id"] for each in described["added_tokens"]))
        for marker in dict.fromkeys(markers):
            if marker not in known:
                flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
                described["added_tokens"].append({"id": size, "content": marker, "special": True, **flags})
                size += 1
        (folder / "tokenizer.json").write_text(json.dumps(described))
        self._specials = {each["content"] for each in described["added_tokens"]}
        self.compiler = GrammarCompiler(folder, size, [EOS])
        self.tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))

    def is_token(self, text: str) -> bool:
        """Return whether a text is a special token."""
        return text in self._specials

    def walk(
        self, params: StructuredOutputsParams, phrases: Sequence[str], draw: random.Random, begin: str = ""
    ) -> Walk:
        """Return a random answer under a constraint, that goes on from `begin`; AssertionError if some mask allows no
        token."""
        matcher = self.compiler.compile(params.kind, params.text)
        taken: list[int] = list(self.tokenizer.encode(begin, add_special_tokens=False).ids)
        assert matcher.inner.try_consume_tokens(taken) == len(taken), begin
        while len(taken) < MAX_TOKENS and not matcher.is_complete:
            words = np.zeros(self.compiler.num_words, np.uint32)
            matcher.fill(words)
            allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist()
            assert matcher.error is None and allowed, (matcher.error, self._text(taken))
            if EOS in allowed and (len(allowed) == 1 or draw.random() < PHRASE_CHANCE):
                return Walk(self._text(taken), is_whole=True)
            step = self._phrase(matcher, phrases, draw) if draw.random() < PHRASE_CHANCE else []
            step = step or [draw.choice([each for each in allowed if each != EOS])]
            matcher.consume(step)
            taken += step
        return Walk(self._text(taken), matcher.is_complete)

    def _phrase(self, matcher: Matcher, phrases: Sequence[str], draw: random.Random) -> list[int]:
        """Return the tokens of a random phrase; [] if the masks forbid one of them."""
        ids = self.tokenizer.encode(draw.choice(phrases), add_special_tokens=False).ids
        trial = matcher.copy()
        is_allowed = trial.inner.try_consume_tokens(ids) == len(ids) and trial.error is None
        return list(ids) if is_allowed else []

    def _text(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=False))


def phrases_of(form: AnswerForm) -> list[str]:
    """Return the phrases for walks through a form's constraints: its markers and joints, and signs that end values."""
    joints = [
        value for call in form.calls for value in (*_texts(call), *call.mid_by_type.values(), call.quote, call.close)
    ]
    joints += [] if form.thought is None else form.thought
    found = [each for joint in joints for each in (joint, joint.lstrip(), *markers_in(joint))]
    return [each for each in dict.fromkeys(found) if each and "{" not in each] * 2 + list(_SIGNS)


def markers_in(joint: str) -> list[str]:
    """Return the markers of a joint, <…> and […], which may be special tokens of a vocabulary."""
    return re.findall(r"<[^<>\s{}]+>|\[/?[A-Z_]{2,}\]", joint)


def special_markers(form: AnswerForm) -> list[str]:
    """Return the texts of a form that are single tokens in the vocabularies of such models."""
    joints = [each for call in form.calls for each in (*_texts(call), call.quote)] + list(form.thought or ())
    return [marker for joint in joints for marker in markers_in(joint)]


def _texts(call: object) -> list[str]:
    names = ("start", "next", "end", "mid", "first", "pair", "empty_next", "empty_end")
    return [getattr(call, name) for name in names]


class Answer(NamedTuple):
    """The parts of an answer as the parsers of a form read it."""

    thought: str
    content: str
    calls: list[tuple[str, Any]]  # names and arguments
    ids: list[str]  # of the calls
    has_other_keys: bool  # repeated ones or unsorted ones, which a template may write in another way


def read(form: AnswerForm, schemas: Mapping[str, JsonObject], text: str, *, is_inside_thought: bool = False) -> Answer:
    """Read a whole answer with the parsers of a form."""
    parts: list[Part] = [Content(text)] if text else []
    for parser in new_parsers(form, schemas, is_inside_thought=is_inside_thought):
        found: list[Part] = []
        for part in parts:
            found += parser.append(part.text) if isinstance(part, Content) else [part]
        parts = [*found, *parser.finish()]
    content, calls = whole_calls(parts)
    thought = "".join(part.text for part in parts if isinstance(part, Thought))
    are_others: list[bool] = []

    def from_pairs(pairs: list[tuple[str, Any]]) -> JsonObject:
        are_others.append([key for key, _ in pairs] != sorted(dict(pairs), key=str.lower))
        return dict(pairs)

    named = [(call.name, json.loads(call.arguments, object_pairs_hook=from_pairs)) for call in calls]
    return Answer(thought, content, named, [call.id for call in calls], any(are_others))


def fault(answer: Answer, schemas: Mapping[str, JsonObject], strict_names: Collection[str], *, is_forced: bool) -> str:
    """Return the fault of an answer that ended by itself; "" if there is none. Each call must be of a known tool,
    and those of `strict_names` must conform; a forced answer has calls and no content."""
    if is_forced and (answer.content.strip() or not answer.calls):
        return f"{len(answer.calls)} calls and the content {answer.content!r:.80}"
    for name, arguments in answer.calls:
        if name not in schemas:
            return f"a call of {name!r:.80}"
        if "Infinity" in json.dumps(arguments):
            return f"{name}: a number beyond float64"
        validator = jsonschema.Draft202012Validator(
            closed(schemas[name]) if name in strict_names else {"type": "object"}
        )
        if (error := next(validator.iter_errors(arguments), None)) is not None:
            return f"{name}: {error.message[:200]}"
    return ""


def closed(schema: JsonObject) -> JsonObject:
    """Return a schema that allows no other keys, unless it says so, as grammars do."""
    return {"additionalProperties": False} | schema if "properties" in schema else schema
