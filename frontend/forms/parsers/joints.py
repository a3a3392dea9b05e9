"""JointFinder: finds the joints of an answer's form in streamed text, and holds back text that may belong to one.

The first joint is found or, of those that begin together, the longest: a joint that another one continues is held until
it is certain which of the two it is. Each character is read once, so the same joints are found however a text is cut.
JointTable has the joints of a form by the states in which they are looked for.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import msgspec

from ....ipc.params.call_form import markers_of
from ..answer_forms.form import AnswerForm
from ..answer_forms.joint_plan import Forms, Joint, JointPlan
from .joint_automaton import Automaton, compile_joints
from .json_calls import CallShape

MAX_SPACE = 1024  # most white space that is held before a joint
MAX_HELD = 2048  # most characters of a joint in a text
_NEW = (-1,)  # kept groups where one begins, and no other goes on
_TAKING_SPACE = (
    "thought",
    "outside",
    "closing",
    "failed",
)  # states with text that loses white space before a joint that has some


class Found(NamedTuple):
    """A joint in a text. `text`: with the white space before it that belongs to it. `values`: the texts in
    place of {ID} and its like, by name."""

    joint: int
    text: str
    values: dict[str, str]


class JointFinder:
    """Finder of joints in one streamed text. Its state is the text since the last joint.

    With `is_next` the joint must come at once, behind white space at most; otherwise `has_failed` becomes True, and all
    text is returned as the rest. `takes_space`, by joint: white space before the joint belongs to it."""

    __slots__ = ("_automaton", "_best", "_held", "_is_next", "_node", "_starts", "has_failed")

    def __init__(self, automaton: Automaton, *, is_next: bool = False) -> None:
        self._automaton = automaton
        self._is_next = is_next
        self._node = automaton.root
        self._starts: list[int] = []  # where the groups of the node's places begin in the held text
        self._best: tuple[int, int, int] | None = None  # a joint that may go on as another one, its start and end
        self._held = ""
        self.has_failed = False

    def feed(self, text: str, *, is_last: bool = False) -> tuple[str, Found | None, str]:
        """Read the next `text`. Return the text before a joint, the joint and the text after it. If none is found,
        return the text that cannot belong to one, None and "". `is_last`: no text will follow."""
        position = len(self._held)
        if position:
            text = self._held + text
        elif not self._is_next:
            automaton = self._automaton
            if automaton.first.search(text) is None and not (automaton.takes_space and text[-1:].isspace()):
                return text, None, ""
        if self._is_next and self._node is self._automaton.root:
            position = len(text) - len(text.lstrip())
            if position > MAX_SPACE:
                return self._fail(text)
            if position < len(text):
                if self._automaton.first.match(text, position) is None:
                    self.has_failed = True
                    self._held = ""
                    return "", None, text
                self._node = self._automaton.begun
                self._starts = [position]
        if self._scan(text, position) or is_last:
            return self._end(text)
        return self._hold(text)

    def taken(self, found: Found | None) -> str:
        """Return the text of the joint that was found or, without one, the text that is held back. Begin anew."""
        held = self._held
        self._reset()
        if found is None:
            return held
        return found.text

    @property
    def next_joints(self) -> set[int]:
        """The joints of which one is found in any case, whatever text follows, where the held text begins; empty if
        none is certain, or if it may begin elsewhere."""
        if self._best is None or any(start != self._best[1] for start in self._starts):
            return set()
        return {self._best[0], *(joint for group in self._node.groups for joint, _ in group)}

    def _scan(self, text: str, position: int) -> bool:
        """Read the characters from `position` on. Return whether it is certain which joint comes first, or that none
        comes."""
        automaton = self._automaton
        node = self._node
        starts = self._starts
        root = automaton.root
        size = len(text)
        while position < size:
            if node is root:
                if self._is_next or (begin := automaton.first.search(text, position)) is None:
                    break
                position = begin.start()
            run = node.run or automaton.run(node)
            if run.text:
                ahead = text[position : position + len(run.text)]
                if run.text.startswith(ahead) and position + len(ahead) - starts[0] < MAX_HELD:
                    position += len(ahead)
                    node = run.nodes[len(ahead) - 1]
                    continue
            move = node.moves.get(text[position]) or automaton.move(node, text[position])
            position += 1
            node, is_same, kept, joint, group = move
            if is_same and position - starts[0] < MAX_HELD:
                continue
            if kept == _NEW and joint is None:
                starts = [position - 1]
            elif joint is not None or len(kept) != len(starts) or -1 in kept:
                starts.append(position - 1)  # -1 stands for a group that begins here
                if joint is not None:
                    self._best = (joint, starts[group], position)
                starts = [starts[each] for each in kept]
            if starts and position - starts[0] >= MAX_HELD:
                node = automaton.without_first(node)
                starts = starts[1:]
            if not starts and (self._best is not None or self._is_next):
                return True
        self._node = node
        self._starts = starts
        return False

    def _hold(self, text: str) -> tuple[str, Found | None, str]:
        if self._is_next:
            self._held = text
            return "", None, ""
        cut = len(text)
        if self._best is not None:
            cut = self._best[1]
        if self._starts:
            cut = min(cut, self._starts[0])
        held_from = cut
        if self._automaton.takes_space:
            held_from = self._without_space(text, cut)
        self._held = text[held_from:]
        if held_from:
            self._starts = [start - held_from for start in self._starts]
            if self._best is not None:
                joint, start, end = self._best
                self._best = (joint, start - held_from, end - held_from)
        return text[:held_from], None, ""

    def _end(self, text: str) -> tuple[str, Found | None, str]:
        if self._best is None:
            if self._is_next:
                return self._fail(text)
            self._reset()
            return text, None, ""
        joint, start, end = self._best
        begin = start
        if joint in self._automaton.takes_space:
            begin = self._without_space(text, start)
        values: dict[str, str] = {}
        if self._automaton.has_values:
            values = self._automaton.values(joint, text[start:end])
        found = Found(joint, text[begin:end], values)
        self._reset()
        return text[:begin], found, text[end:]

    def _fail(self, text: str) -> tuple[str, Found | None, str]:
        self._reset()
        self.has_failed = True
        return "", None, text

    def _reset(self) -> None:
        self._node = self._automaton.root
        self._starts = []
        self._best = None
        self._held = ""

    @staticmethod
    def _without_space(text: str, end: int) -> int:
        """Return where the white space before `end` begins, of which MAX_SPACE characters count."""
        begin = max(0, end - MAX_SPACE)
        return begin + len(text[begin:end].rstrip())


class Kinds(NamedTuple):
    """Forms by the way in which their calls begin: `objects` with an object of `shape`, `others` with a name, and
    `related` are all that may follow that name."""

    objects: Forms
    others: Forms
    related: Forms
    shape: CallShape


class JointTable:
    """The joints of a form's states, compiled, and the kinds of its calls. `texts`: see JointPlan."""

    def __init__(self, form: AnswerForm) -> None:
        self.plan = JointPlan(form)
        self.texts = self.plan.texts
        self._calls = form.calls
        self._states: dict[tuple[str, Forms], tuple[tuple[Joint, ...], Automaton]] = {}
        self._kinds: dict[Forms, Kinds] = {}

    def kinds(self, forms: Forms) -> Kinds:
        found = self._kinds.get(forms)
        if found is None:
            objects = tuple(number for number in forms if self._calls[number].kind == "object")
            others = tuple(number for number in forms if number not in objects)
            form = self._calls[(objects or forms)[0]]
            shape = CallShape(form.name_path, form.arguments_path, form.id_path)
            found = self._kinds[forms] = Kinds(objects, others, self.plan.related(others), shape)
        return found

    def state(self, name: str, forms: Forms) -> tuple[tuple[Joint, ...], Automaton]:
        """Return the joints of a state, and their automaton. `forms`: see JointPlan."""
        found = self._states.get((name, forms))
        if found is None:
            joints = self.plan.state(name, forms)
            spaced = (number for number, joint in enumerate(joints) if joint.before and name in _TAKING_SPACE)
            automaton = compile_joints(tuple(joint.text for joint in joints), frozenset(spaced))
            found = self._states[name, forms] = (joints, automaton)
        return found

    def parted(self, forms: Forms, between: str) -> tuple[str, str]:
        """Split the text between two calls, of which the first is of `forms`, into what closes the first and what opens
        the second: each call's raw text has its own."""
        for number in forms:
            closing = markers_of(self._calls[number].end)[-1:]
            if closing and closing[0] in between:
                opening = between.partition(closing[0])[2].lstrip()
                return between[: len(between) - len(opening)], opening
        return "", between


def joint_table(form: AnswerForm) -> JointTable:
    """Return the table of a form; the same one for equal forms."""
    return _joint_table(msgspec.json.encode(form))


@lru_cache(maxsize=64)
def _joint_table(form: bytes) -> JointTable:
    return JointTable(msgspec.json.decode(form, type=AnswerForm))
