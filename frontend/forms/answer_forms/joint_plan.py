"""JointPlan: the joints of a form that are looked for in each state of reading, and the state behind each of them.

A joint is a row of markers: <…>, […] or other text between them, with white space between them or none. Joints of a
form often begin with the same markers, such as </parameter>; these are looked for first, so that a value is certain
before the joint behind it is known. Knows no text of an answer.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, TypeAlias

from ....ipc.params.call_form import first_marker, markers_of
from .form import AnswerForm

Markers: TypeAlias = tuple[str, ...]
Forms: TypeAlias = tuple[int, ...]  # places in AnswerForm.calls
_VALUE = re.compile(r"\{(?:ID|INDEX|NUMBER|NAME|KEY)\}")
CDATA = "<![CDATA["
_MARKER = re.compile(r"<[^<>\s][^<>]*>|\[/?[A-Z_]{2,}\]")


class Joint(NamedTuple):
    """A joint that is looked for. `goal`: the state behind it. `before`, `after`: the white space around it in the
    form, which is not part of `text`."""

    text: str
    goal: str
    before: str = ""
    after: str = ""
    forms: Forms = ()  # of the call that it belongs to, or that stands behind it
    is_last: bool = False  # nothing of the form's `end` is missing
    value_type: str = ""  # type of the value behind it, if the joint shows it


class JointPlan:
    """The states of reading answers of one form."""

    def __init__(self, form: AnswerForm) -> None:
        self.form = form
        self._all = tuple(range(len(form.calls)))
        self._starts = [_joint(call.start, "head", (number,)) for number, call in enumerate(form.calls)]
        self._opens = [_opened(call.start) for call in form.calls if len(markers_of(call.start)) > 1]
        self._joints: dict[str, Callable[[Forms], Iterable[Joint]]] = {
            "opening": lambda _: self._thoughts("thought", 0),
            "begin": lambda _: [*self._thoughts("thought", 0), *self._thoughts("begun", 1), *self._contents()],
            "begun": lambda _: self._contents(),
            "thought": lambda _: [*self._thoughts("begun", 1), *self._starts * form.calls_end_thought],
            "outside": lambda _: [*self._starts, *self._opens],
            "failed": lambda forms: [*self._starts, *self._opens, *self._further(forms)],
            "closing": self._closing,
            "opened": lambda _: self._interrupted(),
            "name": lambda forms: [*self._names(forms), *self._restarts()],
            "arguments": self._without_arguments,
            "key": self._keys,
            "value": self._values,
            "between": self._between,
            "after": self._after,
        }

    def state(self, name: str, forms: Forms = ()) -> tuple[Joint, ...]:
        """Return the joints that end a state. `forms`: those of the call that is read, or that was read last."""
        return tuple(_merged(self._joints[name](forms)))

    @property
    def texts(self) -> tuple[str, ...]:
        """The markers in all joints of the form, cut at the values in them."""
        joints = [*(self.form.thought or ()), self.form.content_open]
        for call in self.form.calls:
            joints += (call.start, call.next, call.end, call.mid, call.first, call.pair, call.empty_next)
            joints += (call.empty_end, *call.mid_by_type.values(), call.close, call.quote)
        texts = (text for joint in joints for piece in _VALUE.split(joint) for text in markers_of(piece))
        return tuple(dict.fromkeys(text for text in texts if any(map(str.isalnum, text))))

    def related(self, forms: Forms) -> Forms:
        """Return the forms that a call of `forms` may be in, once it has begun: calls with tags are read in all such
        forms."""
        if any(self.form.calls[number].kind == "tagged" for number in forms):
            return tuple(sorted({*forms, *(i for i in self._all if self.form.calls[i].kind == "tagged")}))
        return forms

    def _restarts(self) -> list[Joint]:
        return [joint._replace(goal="restart") for joint in self._starts]

    def _thoughts(self, goal: str, side: int) -> list[Joint]:
        if self.form.thought is None:
            return []
        return [_joint(self.form.thought[side], goal)]

    def _contents(self) -> list[Joint]:
        return [_joint(self.form.content_open, "outside"), *self._starts, *self._opens]

    def _closing(self, forms: Forms) -> Iterable[Joint]:
        """Yield the joints behind a call: of the next call, or markers of its end that come late."""
        yield from self._starts
        yield from self._opens
        yield from self._further(forms)
        for number in forms:
            for joint in _parts(markers_of(self.form.calls[number].end), "late", number):
                if _MARKER.fullmatch(markers_of(joint.text)[0]):
                    yield joint

    def _further(self, forms: Forms) -> Iterable[Joint]:
        """Yield what begins a further call where it does not stand behind the end of the call before it."""
        for number in forms:
            call = self.form.calls[number]
            end = markers_of(call.end)
            following = markers_of(call.next)
            tail = following[_num_common((end, following)) :]
            if tail and _MARKER.fullmatch(tail[0]):
                yield Joint(" ".join(tail), "head", forms=(number,))

    def _interrupted(self) -> Iterable[Joint]:
        """Yield the joints that may follow the first marker of a start and other text."""
        yield from self._starts
        yield from self._opens
        for number, call in enumerate(self.form.calls):
            if rest := markers_of(call.start)[1:]:
                yield Joint(" ".join(rest), "head", after=_after(call.start), forms=(number,))
            for marker in markers_of(call.end):
                if _MARKER.fullmatch(marker):
                    yield Joint(marker, "outside")

    def _names(self, forms: Forms) -> Iterable[Joint]:
        for number in forms:
            call = self.form.calls[number]
            if call.kind == "json":
                yield (
                    _joint(call.mid, "arguments", (number,))
                    if call.mid.strip()
                    else Joint("{", "json", "", "", (number,))
                )
            elif call.kind == "literal":
                yield _joint(call.mid, "literal", (number,))
            elif call.kind == "tagged":
                joints = (call.first, call.empty_next, call.empty_end)
                yield from self._split(number, joints, "between")

    def _keys(self, forms: Forms) -> Iterable[Joint]:
        for number in forms:
            call = self.form.calls[number]
            for value_type, mid in call.mid_by_type.items():
                yield _joint(mid, "value", (number,))._replace(value_type=value_type)
            yield _joint(call.mid, "value", (number,))

    def _values(self, forms: Forms) -> Iterable[Joint]:
        for number in forms:
            call = self.form.calls[number]
            yield from self._split(number, (call.pair, call.next, call.end), "between")
        yield Joint(CDATA, "cdata")

    def _split(self, number: int, joints: tuple[str, str, str], common_goal: str) -> Iterable[Joint]:
        """Yield the joint that the joints to the next key, the next call and the end begin with; without one, those
        joints."""
        rows = [markers_of(joint) for joint in joints]
        before = _before(next(filter(None, joints), ""))
        if count := _num_common(rows):
            yield Joint(" ".join(next(filter(None, rows))[:count]), common_goal, before, "", (number,))
            return
        for row, joint, goal in zip(rows, joints, ("key", "head"), strict=False):
            if row:
                yield _joint(joint, goal, (number,))
        for part in _parts(rows[2], "end", number, is_begun=True):
            yield part._replace(before=before)

    def _between(self, forms: Forms) -> Iterable[Joint]:
        """Yield the joints behind a name or a value: of a key, the next call, or any part of the call's end."""
        for number in forms:
            call = self.form.calls[number]
            groups = ((call.first, call.empty_next, call.empty_end), (call.pair, call.next, call.end))
            for joints in groups:
                rows = [markers_of(joint) for joint in joints]
                key, following, end = (row[_num_common(rows) :] for row in rows)
                yield Joint(" ".join(key), "key", "", _after(joints[0]), (number,))
                yield Joint(" ".join(following), "head", "", "", (number,))
                yield from _parts(end, "end", number)
        yield from self._starts

    def _after(self, forms: Forms) -> Iterable[Joint]:
        """Yield the joints behind a complete call."""
        for number in forms:
            call = self.form.calls[number]
            yield _joint(call.next, "head", (number,))
            yield from _parts(markers_of(call.end), "end", number)
        yield from self._starts

    def _without_arguments(self, forms: Forms) -> Iterable[Joint]:
        """Yield the texts behind a name: the brace of its arguments, or those behind a call without arguments."""
        yield Joint("{", "json", "", "", forms)
        yield Joint("null", "null", "", "", forms)
        yield from self._after(forms)


def _joint(text: str, goal: str, forms: Forms = ()) -> Joint:
    return Joint(" ".join(markers_of(text)), goal, _before(text), _after(text), forms)


def _opened(start: str) -> Joint:
    """Return the first marker of a start, if it is one by itself, and the text behind it may be of another kind."""
    first = first_marker(start)
    is_alone = _MARKER.fullmatch(first) is not None
    return Joint(first * is_alone, "opened", _before(start))


def _parts(end: Markers, goal: str, number: int, *, is_begun: bool = False) -> Iterable[Joint]:
    """Yield rows of an end's markers that may stand for it: any that follow one another, of which the first is no
    other text; with `is_begun` only those with the end's first marker."""
    for begin, last in itertools.combinations(range(len(end) + 1), 2):
        if begin == 0 or (not is_begun and _MARKER.fullmatch(end[begin])):
            yield Joint(" ".join(end[begin:last]), goal, "", "", (number,), is_last=last == len(end))


def _num_common(rows: Sequence[Markers]) -> int:
    """Return how many markers all rows begin with, except empty ones; at least one of each stays. Of one row alone it
    is one at most."""
    given = [row for row in rows if row]
    most = min((len(row) - 1 for row in given), default=0)
    if len(given) == 1:
        return min(most, 1)
    same = itertools.takewhile(lambda each: len(set(each)) == 1, zip(*given, strict=False))
    return min(most, sum(1 for _ in same))


def _merged(joints: Iterable[Joint]) -> Iterable[Joint]:
    """Return the joints by their texts; of those with the same text the first counts, for the forms of all that lead to
    the same state."""
    merged: dict[str, Joint] = {}
    for joint in joints:
        known = merged.get(joint.text)
        if known is None:
            merged[joint.text] = joint
        elif known.goal == joint.goal:
            forms = tuple(dict.fromkeys((*known.forms, *joint.forms)))
            merged[joint.text] = known._replace(forms=forms, is_last=known.is_last and joint.is_last)
    merged.pop("", None)
    return merged.values()


def _before(text: str) -> str:
    return text[: len(text) - len(text.lstrip())]


def _after(text: str) -> str:
    return text[len(text.rstrip()) :]
