"""Learn an AnswerForm from a chat template: render sentinels, and take the texts that stand between them.

The result is a guess until it is proved (prove.py): it says how this template writes the sentinels. Knows no server.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import partial
from itertools import pairwise

import msgspec

from ....ipc.codec import JsonObject
from ...forms.answer_forms.form import AnswerForm, CallForm
from ...forms.parsers.parts import is_object
from .call_readers import ObjectPaths, Place, json_places, object_places, spread_places
from .probe import CONTENT, IDS, KEYS, NAMED_ID, NAMES, ProbeAnswer, ProbeCall, call_id
from .renderings import SETTINGS, Renderings
from .spellings import with_spellings
from .thoughts import Thoughts, without_thought
from .whole_markers import common_prefix, common_suffix

_CALLS = (
    ProbeCall(NAMES[0], dict(zip(KEYS, ("Zqone", "Zqtwo"), strict=True))),
    ProbeCall(NAMES[1], dict(zip(KEYS, ("Zqthree", "Zqfour"), strict=True))),
    ProbeCall(NAMES[2], dict(zip(KEYS, ("Zqfive", "Zqsix"), strict=True))),
)
_EMPTY = tuple(ProbeCall(name, {}) for name in NAMES)
_OTHERS: tuple[tuple[str, object], ...] = (  # values that are no texts, by their types in JSON schemas
    ("number", 73571),
    ("boolean", True),
    ("array", [73571]),
    ("object", {"zqInner": 73571}),
    ("null", None),
)
_LONG_IDS = ("zqId_0000001",)  # longer than IDS
_NINE = "[A-Za-z0-9]{9}"
_PRINTED = "'function': {'name'"
_CLOSINGS = {"(": ")", "{": "}", "[": "]"}


class UnknownForm(Exception):
    """A template's form was not found. The message says why, in a few words."""


def learn(shown: Renderings, thoughts: Thoughts) -> AnswerForm:
    """Return the form of a template's answers. UnknownForm if the template shows no calls, or no form is found."""
    return AnswerForm(
        name="learned",
        thought=thoughts.texts,
        begins_inside=thoughts.begins_inside,
        content_open=thoughts.content_open,
        turn_end=shown.turn_end.strip(),
        calls=learn_calls(shown, thoughts),
    )


def learn_calls(shown: Renderings, thoughts: Thoughts) -> tuple[CallForm, ...]:
    """Return the form of calls; if headers of turns stand between content and calls, a second one whose start has them.
    UnknownForm if the template shows no calls, or shows them in a way that has no form."""
    for variables in SETTINGS:
        scenes = CallScenes(shown, thoughts, variables)
        if scenes.has_calls:
            form = scenes.with_ids(scenes.form())
            if not form.start.strip():
                raise UnknownForm("calls begin without a marker, or in the prompt")
            return form, *scenes.behind_content(form)
    raise UnknownForm(shown.refusal or "the template shows no calls")


class CallScenes:
    """Answers with calls as one template shows them with some variables."""

    def __init__(self, shown: Renderings, thoughts: Thoughts, variables: JsonObject) -> None:
        self._shown = shown
        self._thoughts = thoughts
        self._variables = variables
        self._ids: tuple[str, ...] = IDS
        if shown.has_named_ids:
            self._ids = tuple(call_id(index, name) for index, name in enumerate(NAMES))
        texts = (self._text(_CALLS[:count]) for count in (3, 2, 1))
        self._whole = next(filter(_has_call, texts), "")  # the most calls that the template shows
        self._beside = self._text(_CALLS[:1], content=CONTENT)

    @property
    def has_calls(self) -> bool:
        return bool(self._whole)

    def form(self) -> CallForm:
        """Return the form of the calls. UnknownForm if no reader finds it."""
        if _PRINTED in self._whole:
            raise UnknownForm("the template prints calls as Python does")
        found = object_places(self._whole, _CALLS, self._ids)
        if found is not None:
            return self._object_form(found.places, found.paths)
        places = json_places(self._whole, _CALLS)
        if places:
            return self._json_form(places)
        places = spread_places(self._whole, _CALLS)
        if places:
            return self._spread_form(places)
        raise UnknownForm("the arguments are written in a way that is not known")

    def with_ids(self, form: CallForm) -> CallForm:
        """Return a form with the pattern of the ids that the template takes: nine letters and digits if it refuses
        others."""
        if not form.id_path and not any("{ID}" in each for each in (form.start, form.next, form.mid, form.end)):
            return form
        if self._shown.takes_ids(ProbeAnswer(calls=_CALLS[:1]), _LONG_IDS, self._variables):
            return form
        return msgspec.structs.replace(form, id_pattern=_NINE)

    def behind_content(self, form: CallForm) -> list[CallForm]:
        """Return the form with the start that it has behind content, if the template makes turns of the two, with the
        headers of turns between them."""
        whole = self._shown.answer(ProbeAnswer(content=CONTENT, calls=_CALLS[:1]), self._variables)
        behind = whole.rpartition(CONTENT)[2]
        places = self._places(behind)
        if not places:
            return []
        start = self._joint(behind[: places[0].begin]).lstrip()
        if not start.endswith(form.start) or not start.removesuffix(form.start).strip():
            return []
        return [msgspec.structs.replace(form, start=start)]

    # ── the kinds ────────────────────────────────────────────────────────────────────────────────────────────────

    def _object_form(self, places: list[Place], paths: ObjectPaths) -> CallForm:
        start, following, end = self._around(places)
        return CallForm(
            kind="object",
            start=start,
            next=following,
            end=end,
            name_path=paths.name,
            arguments_path=paths.arguments,
            id_path=paths.id,
            shape=self._shape(places),
        )

    def _shape(self, places: list[Place]) -> str:
        """Return the first object, with {INDEX} or {NUMBER} in a text of it that is the call's place in the turn."""
        first = _CALLS[0]
        shapes = list[str]()
        for place, call, own_id in zip(places, _CALLS, self._ids, strict=False):
            values = tuple(map(str, call.arguments.values()))
            shape = _replaced(self._whole[place.begin : place.end], (call.name,), first.name)
            for value, of_first in zip(values, first.arguments.values(), strict=True):
                shape = _replaced(shape, (value,), str(of_first))
            shapes.append(_replaced(shape, (own_id,), self._ids[0]))
        counted = _with_index(shapes)[0]
        if is_object(counted):
            return counted
        return shapes[0]

    def _json_form(self, places: list[Place]) -> CallForm:
        start, following, end = self._around(places)
        mid = self._behind_name(places)
        before, behind = NAMED_ID.split("{NAME}")
        is_id = start.endswith(before) and mid.startswith(behind)
        return CallForm(kind="json", start=start, next=following, end=end, mid=mid, id_text=NAMED_ID * is_id)

    def _spread_form(self, places: list[Place]) -> CallForm:
        first = self._behind_name(places)
        mid, pair = self._argument_joints(places[0])
        by_type = self._mids_by_type(pair)
        start, following, end = self._around(places)
        assign = by_type.get("number", mid)
        quote = mid.removeprefix(assign)
        if mid.startswith(assign) and quote and pair.startswith(quote):
            closing = _CLOSINGS.get(first.strip()[-1:], "")
            form = CallForm(
                kind="literal",
                start=start,
                next=following.removeprefix(quote).removeprefix(closing),
                end=end.removeprefix(quote).removeprefix(closing),
                mid=first,
                assign=assign,
                pair=pair.removeprefix(quote),
                close=closing,
                quote=quote,
            )
            return with_spellings(form, partial(self._written, form))
        if set(by_type.values()) <= {mid}:
            by_type = {}
        elif len(set(by_type.values())) == 1:
            by_type = {"string": mid, "other": assign}
        else:
            by_type = {"string": mid, **by_type}
        empty_next, empty_end = self._empty_joints()
        return CallForm(
            kind="tagged",
            start=start,
            next=following,
            end=end,
            first=first,
            mid=mid,
            pair=pair,
            mid_by_type=by_type,
            empty_next=empty_next,
            empty_end=empty_end,
        )

    # ── joints ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _around(self, places: list[Place]) -> tuple[str, str, str]:
        """Return the joints before the first call, between calls, and behind the last. Nothing stands between calls if
        the template shows one alone."""
        text = self._whole
        joints = [self._joint(text[: places[0].begin])]
        joints += [self._joint(text[one.end : other.begin]) for one, other in pairwise(places)]
        joints = _with_index(joints)
        start = self._start(without_thought(joints[0], self._thoughts.texts).lstrip())
        end = self._end(text[places[-1].end :])
        return start, (*joints[1:], "")[0], end

    def _start(self, alone: str) -> str:
        """Return the joint before the first call: the shorter of `alone`, without content, and that behind content."""
        _, content, behind = self._beside.rpartition(CONTENT)
        places = self._places(behind)
        if not content or not places:  # there is no content, or it stands behind the calls
            return alone.removeprefix(self._thoughts.content_open)
        other = self._joint(behind[: places[0].begin])
        return common_suffix(alone, other).lstrip() or alone

    def _end(self, tail: str) -> str:
        """Return the joint behind the last call. Where content follows the calls, it goes up to the content."""
        before, content, _ = self._beside.rpartition(CONTENT)
        places = self._places(before)
        if content and places:
            tail = common_prefix(tail, before[places[-1].end :] + "\0")
        return self._joint(tail.rstrip())

    def _places(self, text: str) -> list[Place]:
        """Return the place of the first call in a text; none if it is not there."""
        found = object_places(text, _CALLS[:1], self._ids)
        if found is not None:
            return found.places
        return json_places(text, _CALLS[:1]) or spread_places(text, _CALLS[:1])

    def _joint(self, text: str) -> str:
        """Return a joint with {ID}, {NAME} and {KEY} in place of the sentinels, which change from call to call."""
        if not self._shown.has_named_ids:
            text = _replaced(text, IDS, "{ID}")
        return _replaced(_replaced(text, NAMES, "{NAME}"), KEYS, "{KEY}")

    def _behind_name(self, places: list[Place]) -> str:
        """Return the joint between name and arguments."""
        return _with_index([self._joint(self._whole[each.name_end : each.arguments_begin]) for each in places])[0]

    def _argument_joints(self, place: Place) -> tuple[str, str]:
        """Return the joints between a key and its text, and between a text and the next key."""
        key, next_key = KEYS
        text = self._whole[place.arguments_begin + len(key) :]
        mid, _, rest = text.partition(str(_CALLS[0].arguments[key]))
        return mid, self._joint(_up_to_key(rest, next_key))

    def _mids_by_type(self, pair: str) -> dict[str, str]:
        """Return the joint between key and value for each type of value other than text. `pair`: the joint behind a
        text."""
        behind = pair.replace("{KEY}", KEYS[0])
        mids = dict[str, str]()
        for kind, value in _OTHERS:
            text = self._text((ProbeCall(NAMES[0], {KEYS[0]: value, KEYS[1]: "Zqtwo"}),))
            between = _up_to_key(text.partition(NAMES[0])[2].partition(KEYS[0])[2], KEYS[1])
            for spelling in _spellings(value):
                mid, found, rest = between.rpartition(spelling)
                if found and behind.endswith(rest):
                    mids[kind] = mid
                    break
        return mids

    def _written(self, form: CallForm, value: object) -> str:
        """Return the text of an argument in a literal form; empty if the template does not show it."""
        text = self._text((ProbeCall(NAMES[0], {KEYS[0]: value, KEYS[1]: "Zqtwo"}),))
        behind = text.partition(NAMES[0])[2].partition(KEYS[0] + form.assign)[2]
        return behind.rpartition(form.pair + KEYS[1])[0]

    def _empty_joints(self) -> tuple[str, str]:
        """Return the joints between the names of calls without arguments, and behind the last of them."""
        text = self._text(_EMPTY) or self._text(_EMPTY[:1])
        ends = [text.rfind(name) + len(name) for name in NAMES if name in text]
        if not ends:
            return "", ""
        behind = [
            self._joint(text[end : other - len(name)])
            for (end, other), name in zip(pairwise(ends), NAMES[1:], strict=False)
        ]
        behind.append(self._end(text[ends[-1] :]))
        behind = _with_index(behind, 0, 1)
        return ("", *behind[:-1])[-1], behind[-1]

    def _text(self, calls: tuple[ProbeCall, ...], content: str = "") -> str:
        return self._shown.text_of(ProbeAnswer(content=content, calls=calls), self._variables)


def _has_call(text: str) -> bool:
    call = _CALLS[0]
    return call.name in text and all(str(value) in text for value in call.arguments.values())


def _replaced(text: str, sentinels: Sequence[str], name: str) -> str:
    for each in sentinels:
        text = text.replace(each, name)
    return text


def _up_to_key(text: str, key: str) -> str:
    return text.partition(key)[0]


def _spellings(value: object) -> list[str]:
    return [json.dumps(value), json.dumps(value, separators=(",", ":")), repr(value), json.dumps(value, indent=4)]


def _with_index(joints: list[str], one: int = -2, other: int = -1) -> list[str]:
    """Return joints, of the first call to those of the last, with {INDEX} or {NUMBER} in place of the call's number if
    the joints `one` and `other` differ in it alone."""
    if len(joints) < 2 or joints[one] == joints[other]:
        return joints
    for base, name in enumerate(("{INDEX}", "{NUMBER}")):
        numbered = [
            re.sub(rf"(?<![0-9A-Za-z]){index + base}(?![0-9A-Za-z])", name, each) for index, each in enumerate(joints)
        ]
        if numbered[one] == numbered[other]:
            return numbered
    return joints
