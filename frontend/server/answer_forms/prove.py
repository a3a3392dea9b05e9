"""Prove an AnswerForm: answers go into the chat template, and come out of the form's parsers again.

Knows no server; each probe is one rendering, read as a whole.
"""

from __future__ import annotations

import json
from typing import Literal, NamedTuple, TypeAlias

import msgspec

from ....ipc.codec import JsonObject
from ...forms.answer_forms.form import AnswerForm
from ...forms.answer_forms.named import THOUGHTS
from ...forms.parsers.names import new_parsers
from ...forms.parsers.parts import CallJoiner, Content, Part, Thought, parsed
from .probe import CONTENT, PROBES, THOUGHT, Probe, ProbeAnswer, ProbeCall, schemas
from .renderings import NO_VARIABLES, SETTINGS, Renderings

Outcome: TypeAlias = Literal["returned", "different", "not shown"]
MAX_SHOWN = 200  # characters of a text in a difference


class ProbeResult(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The result of one probe. `difference` and `text` are empty unless it is different."""

    probe: str
    outcome: Outcome
    difference: str = ""  # the parts that came back, and those that went in
    text: str = ""  # the answer as the template writes it


def prove(form: AnswerForm, shown: Renderings) -> list[ProbeResult]:
    """Return the results of all probes, in order. HostileTemplate if the template is."""
    return [_result(form, shown, probe) for probe in PROBES]


class ShownText(NamedTuple):
    """A template's text of an answer, and the variables with which it was rendered."""

    text: str
    variables: JsonObject


def shown_text(shown: Renderings, answer: ProbeAnswer) -> ShownText:
    """Return the text of an answer with the variables that show most of it; "" if the template shows nothing of it."""
    found = ShownText("", NO_VARIABLES)
    most = 0
    for variables in SETTINGS:
        text = shown.text_of(answer, variables)
        wanted = _shown_part(answer, text)
        count = bool(wanted.content) + bool(wanted.thought) + len(wanted.calls)
        if count > most:
            found = ShownText(text, variables)
            most = count
        if wanted == answer:
            break
    return found


def begins_inside(form: AnswerForm, text: str) -> bool:
    """Return whether a rendered probe begins inside a thought: it holds one without its opening marker."""
    if form.thought is None or THOUGHT not in text:
        return False
    opening = form.thought[0]
    return not opening or opening not in text.partition(THOUGHT)[0]


def read_answer(form: AnswerForm, answer: ProbeAnswer, pieces: list[str], *, is_inside_thought: bool) -> ProbeAnswer:
    """Return the parts that a form's parsers find in a text that comes in pieces. Arguments that are not a JSON object
    make a call content. `answer`: has the types of the arguments."""
    parsers = new_parsers(form, schemas(answer), is_inside_thought=is_inside_thought)
    parts: list[Part] = []
    for place, piece in enumerate(pieces, start=1):
        parts += parsed(parsers, piece, is_last=place == len(pieces))
    joiner = CallJoiner()
    uses = filter(None, map(joiner.read, parts))
    return ProbeAnswer(
        thought="".join(part.text for part in parts if isinstance(part, Thought)).strip(),
        content="".join(part.text for part in parts if isinstance(part, Content)).strip(),
        calls=tuple(ProbeCall(use.name, json.loads(use.arguments)) for use in uses),
    )


def _result(form: AnswerForm, shown: Renderings, probe: Probe) -> ProbeResult:
    text, variables = shown_text(shown, probe.answer)
    if form.reader == "harmony":  # an answer has several messages
        text = shown.text_of(probe.answer, variables, is_one_turn=False)
    text = _until_end(form, text)
    wanted = _shown_part(probe.answer, text)
    if wanted == ProbeAnswer() or (probe.answer.calls and not wanted.calls):
        return ProbeResult(probe=probe.name, outcome="not shown")
    read = read_answer(form, probe.answer, [text], is_inside_thought=begins_inside(form, text))
    if _spelled(read) == _spelled(wanted):
        return ProbeResult(probe=probe.name, outcome="returned")
    if _spelled(read)[2] == _spelled(wanted)[2] and _is_same_turn(form, shown, variables, read, text):
        return ProbeResult(probe=probe.name, outcome="returned")
    return ProbeResult(probe=probe.name, outcome="different", difference=_difference(read, wanted), text=text)


def _shown_part(answer: ProbeAnswer, text: str) -> ProbeAnswer:
    """Return the parts of an answer that a template shows."""
    return ProbeAnswer(
        thought=THOUGHT * (bool(answer.thought) and THOUGHT in text),
        content=CONTENT * (bool(answer.content) and CONTENT in text),
        calls=tuple(call for call in answer.calls if call.name in text),
    )


def _until_end(form: AnswerForm, text: str) -> str:
    """Return a text up to the end of its turn: some templates write an end, which ends an answer, between calls."""
    joints = "".join(f"{call.start}{call.next}{call.end}" for call in form.calls)
    if not form.turn_end or form.turn_end in joints + "".join(form.thought or ()):
        return text
    return text.partition(form.turn_end)[0]


def _is_same_turn(form: AnswerForm, shown: Renderings, variables: JsonObject, read: ProbeAnswer, text: str) -> bool:
    """Return whether content that came back as a thought is one to the template: it writes the content behind the text
    that opens thoughts, which it does not close, or writes the thought and the content alike."""
    if CONTENT not in read.thought or read.content:
        return False
    if form.thought is not None and form.thought in THOUGHTS.values():
        opening, closing = form.thought
        _, opened, behind = text.partition(CONTENT)[0].rpartition(opening)
        return bool(opened) and closing not in behind
    is_one_turn = form.reader != "harmony"
    return bool(read.calls) and shown.text_of(read, variables, is_one_turn=is_one_turn) == text


def _difference(read: ProbeAnswer, wanted: ProbeAnswer) -> str:
    for name, one, other in zip(("thought", "content", "calls"), _spelled(read), _spelled(wanted), strict=True):
        if one != other:
            return f"{name} came back as {one[:MAX_SHOWN]!r}, not {other[:MAX_SHOWN]!r}"
    return ""


def _spelled(answer: ProbeAnswer) -> tuple[str, str, str]:
    calls = [[call.name, call.arguments] for call in answer.calls]
    return answer.thought, answer.content, json.dumps(calls, ensure_ascii=False, sort_keys=True)
