"""FormWalks: random answers under the constraints of a template's own form, each judged by three readers.

The form's parsers must find only calls that jsonschema accepts, with finite numbers. The template's own rendering of
these calls must equal the text: modulo white space, spellings of numbers and escapes of characters.
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, TypeAlias

from tokenloom.frontend.forms.answer_forms.form import AnswerForm
from tokenloom.frontend.forms.answer_forms.grammar import (
    begin_of_calls,
    forced_calls,
    form_behind_thought,
    other_calls,
    strict_calls,
)
from tokenloom.frontend.server.answer_forms.probe import VALUES, schema_of, tool
from tokenloom.frontend.server.answer_forms.renderings import SETTINGS, Render
from tokenloom.ipc.codec import JsonObject
from tokenloom.ipc.errors import RequestError
from tokenloom.ipc.messages.client import ChatMessage
from tokenloom.ipc.params.call_form import CallForm, first_marker, markers_of
from tokenloom.ipc.params.structured_outputs import StructuredOutputsParams
from tokenloom.tests.support.call_walks import (
    Answer,
    Walk,
    WalkedVocabulary,
    fault,
    phrases_of,
    read,
    special_markers,
)

Mode: TypeAlias = tuple[bool, bool]  # calls are forced, not strict under auto; with a thought
MODES: tuple[Mode, ...] = tuple(itertools.product((True, False), (False, True)))
SCHEMAS: dict[str, JsonObject] = {  # keys in alphabetical order, since some templates sort them
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer", "minimum": 1, "maximum": 16},
            "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 3},
            "unit": {"enum": ["celsius", "fahrenheit"]},
        },
        "required": ["city", "days"],
    },
    "find": {
        "type": "object",
        "properties": {
            "exact": {"type": "boolean"},
            "limit": {"type": ["integer", "null"]},
            "q": {"type": "string", "pattern": "^[a-z]{1,8}$"},
            "score": {"type": "number"},
        },
        "required": ["q"],
    },
    "get": {"type": "object", "properties": {}},
    "move": {
        "type": "object",
        "properties": {
            "more": {"type": "object", "additionalProperties": {"type": "number"}},
            "to": {"$ref": "#/$defs/Point"},
            "why": {"anyOf": [{"type": "string", "maxLength": 20}, {"type": "null"}]},
        },
        "required": ["to"],
        "$defs": {
            "Point": {
                "type": "object",
                "properties": {"name": {"const": "P"}, "x": {"type": "number"}, "y": {"type": "number", "minimum": 0}},
                "required": ["x", "y"],
                "additionalProperties": False,
            }
        },
    },
}
STRICT = ("get_weather", "find", "get")  # under auto; the other one takes any object
PLAIN = {name: SCHEMAS[name] for name in ("find", "get")}  # for templates that write lists and objects in another way
KEYS = ("city", "days", "unit", "tags", "q", "exact", "limit", "score", "to", "why", "more")
TOOLS = [tool(name, schema_of(dict.fromkeys(KEYS, VALUES["string"]))) for name in SCHEMAS]  # as templates show them
THOUGHTS = ("", "Hm.", ' 1 < 2, {"a": "b"}\n')
MAX_TRIES = 40  # walks for one whole answer
_WORDS = {"True": "true", "False": "false", "None": "null"}
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "/": "/"}
_ESCAPE = re.compile(r"<!\[CDATA\[|\]\]>|\\(?P<code>u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|x[0-9a-f]{2})|\\(?P<sign>[ntrbf/])")
_NUMBER = re.compile(r"(?<![\w.])-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?(?![\w.])|\b(?:True|False|None)\b")


class Judged(NamedTuple):
    """A whole answer. `fault`: found by the form's parsers or jsonschema. `difference`: between the calls and the
    template's rendering of them. "" where there is none."""

    text: str
    num_calls: int
    fault: str
    difference: str


class FormWalks:
    """Walker of one form. Owns two vocabularies, one that has the form's markers as special tokens."""

    def __init__(self, folder: Path, form: AnswerForm, render: Render, *, has_nested: bool = True) -> None:
        """folder: an empty one. render: see Renderings. has_nested: lists and objects come back from the template."""
        self._form, self._render = form, render
        self._schemas = SCHEMAS if has_nested else PLAIN
        self._counts = _counts_of(form.calls[0])
        self._marker = first_marker(form.calls[0].start)
        self._phrases = phrases_of(form)
        self._vocabularies = []
        for name, markers in (("plain", []), ("special", special_markers(form))):
            (folder / name).mkdir()
            self._vocabularies.append(WalkedVocabulary(folder / name, markers))

    def answers(self, mode: Mode, count: int, seed: int) -> Iterator[Judged]:
        """Yield whole answers, in turn with the markers as text and as special tokens; AssertionError if MAX_TRIES
        walks do not end by themselves."""
        draw = random.Random(seed)
        for number in range(count):
            vocabulary = self._vocabularies[number % 2]
            for _ in range(MAX_TRIES):
                walk, is_inside = self._walk(vocabulary, mode, draw)
                if walk.is_whole:
                    break
            else:
                raise AssertionError(f"no answer ends: {walk.text[:400]!r}")
            yield self._judged(walk.text, mode, is_inside=is_inside)

    def _walk(self, vocabulary: WalkedVocabulary, mode: Mode, draw: random.Random) -> tuple[Walk, bool]:
        """Return an answer, and whether it begins inside a thought."""
        is_forced, has_thought = mode
        form, thought, before, is_inside = self._form, self._form.thought, "", False
        begun = ""
        if has_thought and thought is not None and (form.begins_inside or draw.random() < 0.5):
            before, is_inside = draw.choice(THOUGHTS) + thought[1], True  # the constraint begins behind it
        may_think = has_thought and not is_inside
        if is_forced:
            params = forced_calls(form, self._schemas, has_one_call=draw.random() < 0.2, may_think=may_think)
        else:
            is_token = bool(begin_of_calls(form, vocabulary.is_token)) and not other_calls(form)
            params = self._strict(has_text=not is_token, has_one_call=draw.random() < 0.2)
            if is_token:  # it begins the constrained part
                own = "".join(thought).replace(thought[1], draw.choice(THOUGHTS) + thought[1]) if thought else ""
                before += own * may_think + draw.choice(("", "I look.\n", "{1}"))
            elif draw.random() < 0.5:  # random text hardly ever goes on to calls
                begun = form.calls[0].start.partition("{")[0]
        walk = vocabulary.walk(params, self._phrases, draw, begun)
        return walk._replace(text=before + walk.text), is_inside

    def _strict(self, *, has_text: bool, has_one_call: bool) -> StructuredOutputsParams:
        strict = [name for name in STRICT if name in self._schemas]
        return strict_calls(self._form, self._schemas, strict, has_one_call=has_one_call, has_text=has_text)

    def _judged(self, text: str, mode: Mode, *, is_inside: bool) -> Judged:
        form = form_behind_thought(self._form, self._marker) if is_inside else self._form
        answer = read(form, self._schemas, text, is_inside_thought=is_inside)
        names = self._schemas if mode[0] else STRICT
        found = fault(answer, self._schemas, names, is_forced=mode[0])
        return Judged(text, len(answer.calls), found, self._difference(answer, text))

    def _difference(self, answer: Answer, text: str) -> str:
        """Return the difference between the calls in a text and the template's rendering of them; "" if there is
        none."""
        form, wanted = self._form.calls[0], self._canonical(text)
        begin, place, _ = form.start.partition("{")
        start = wanted.find(self._canonical(begin))
        if not answer.calls:
            return f"{begin} begins no call" if start >= 0 and not place else ""
        if answer.has_other_keys or start < 0:  # text may go on to calls in another form
            return ""
        if self._form.thought is not None and self._canonical(self._form.thought[1]) in wanted[start:]:
            return ""  # templates cut texts at it
        last = self._canonical((*markers_of(form.end), "")[-2:][0])
        for variables in SETTINGS:
            shown = self._rendered(answer, variables)
            if wanted[start:].removesuffix(last) in self._canonical(shown):  # some close no list of one call
                return ""
        return f"the template writes {shown[-len(text) - 80 :]!r}"

    def _canonical(self, text: str) -> str:
        """Return a text without white space, each number, word and escape in one spelling, places of calls left out.
        Quotes are left out where texts of arguments have none, or may have two kinds, or stand as they are in texts."""
        for count in self._counts:
            text = count.sub("", text)
        text = _ESCAPE.sub(_unescaped, text).encode("utf-16", "surrogatepass").decode("utf-16")  # \u escapes are pairs
        text = "".join(_NUMBER.sub(_spelled, text).split())
        call = self._form.calls[0]
        has_other_quotes = call.kind == "tagged" or len(call.quote) == 1
        return re.sub(r"""["'\\]""", "", text) if has_other_quotes else text

    def _rendered(self, answer: Answer, variables: JsonObject) -> str:
        calls = [
            {"id": own_id, "type": "function", "function": {"name": name, "arguments": arguments}}
            for own_id, (name, arguments) in zip(answer.ids, answer.calls, strict=True)
        ]
        messages = [ChatMessage("user", "Hi"), ChatMessage("assistant", None, {"tool_calls": calls})]
        try:
            return self._render(messages, variables | {"tools": TOOLS, "add_generation_prompt": False})
        except RequestError as error:
            return str(error)


def _counts_of(form: CallForm) -> list[re.Pattern[str]]:
    """Return expressions for the places of calls among those of the turn, which models count in their own way."""
    found = [rf'"{re.escape(form.id_path[-1])}":\s*"?\d+"?'] if form.id_path else []
    for joint in (form.start, form.next, form.mid, form.first, form.empty_end, form.shape):
        for before, behind in re.findall(r"([^{}]*)\{(?:INDEX|NUMBER)\}([^{}]*)", joint):
            found.append(rf"(?<={re.escape(before[-1:])})\d+(?={re.escape(behind[:1])})" if before + behind else r"\d+")
    return [re.compile(each) for each in dict.fromkeys(found)]


def _unescaped(found: re.Match[str]) -> str:
    if found["code"]:
        return chr(int(found["code"][1:], 16))
    return _ESCAPES.get(found["sign"], "")


def _spelled(found: re.Match[str]) -> str:
    return _WORDS.get(found[0]) or repr(float(found[0]) or 0.0)
