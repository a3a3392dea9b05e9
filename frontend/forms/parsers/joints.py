"""JointFinder: finds the joints of an answer's form in streamed text, and holds back text that may belong to one.

White space in a joint matches any white space or none, {ID}, {INDEX}, {NUMBER}, {NAME} and {KEY} match a text of their
kind, and all else is exact. The first joint is found or, of those that begin together, the longest: a joint that
another one continues is held until it is certain which of the two it is. The automaton is built while texts are read,
and shared: its states are sets of places in the joints. Each character is read once, so the same joints are found
however a text is cut.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple, TypeAlias

import msgspec

from ..answer_forms.form import AnswerForm
from ..answer_forms.joint_plan import Forms, Joint, JointPlan
from .json_calls import CallShape

MAX_SPACE = 1024  # most white space that is held before a joint
MAX_HELD = 2048  # most characters of a joint in a text
MAX_STATES = 20_000  # states of one automaton; beyond, it is built anew
_ATOM = re.compile(r"\{(ID|INDEX|NUMBER|NAME|KEY)\}|(\s+)|([^\s{]+|\{)")
_LEADING = re.compile(r"\A(?:\{(?:ID|INDEX|NUMBER|NAME|KEY)\}|\s)++")
_NO_NAME = "<>[]{}()|\"'` \t\r\n"  # characters that no id and no name contains
_NUMBERS = ("INDEX", "NUMBER")
_OF_NAME = f"([^{re.escape(_NO_NAME)}]*?)"
_OF_VALUE = {"ID": _OF_NAME, "NAME": _OF_NAME, "KEY": _OF_NAME, "INDEX": "([0-9]*?)", "NUMBER": "([0-9]*?)"}
_TAKING_SPACE = (
    "thought",
    "outside",
    "closing",
    "failed",
)  # states with text that loses white space before a joint that has some
_NEW = (-1,)  # kept groups where one begins, and no other goes on
_OTHER = ""  # stands for all characters that no joint contains
_SPACE = " "

Atom: TypeAlias = str  # a character, _SPACE for any white space or none, or the name of a value
Places: TypeAlias = frozenset[tuple[int, int]]  # joints and places in them, all of one start in the text


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


class Move(NamedTuple):
    """Move of one character. `kept`: the groups of places that go on, by their number before, -1 for one that begins
    here; `is_same`: these are all there were, and no other. `joint`: one that is complete now, with the `group` that it
    belongs to."""

    node: Node
    is_same: bool
    kept: tuple[int, ...]
    joint: int | None
    group: int


class Run(NamedTuple):
    """The `text` that must follow a state if its joints go on, up to where it is not the same for all of them, and the
    state behind each character. "": several characters may follow."""

    text: str
    nodes: tuple[Node, ...]


class Node:
    """State of the automaton: groups of places, by their starts in the text, the first start first. Not `is_open`: no
    further group may begin, since a joint is complete or must come at once. `run`: None until it is asked for."""

    __slots__ = ("groups", "is_open", "moves", "run")

    def __init__(self, groups: tuple[Places, ...], is_open: bool) -> None:
        self.groups = groups
        self.is_open = is_open
        self.moves: dict[str, Move] = {}
        self.run: Run | None = None


class Automaton:
    """Automaton of joints, given without white space around them. A value at the begin of a joint belongs to the text
    before it. `takes_space`: see JointFinder."""

    def __init__(self, joints: Sequence[str], takes_space: frozenset[int]) -> None:
        joints = [_LEADING.sub("", joint) for joint in joints]
        self._atoms = [_atoms(joint) for joint in joints]
        self._patterns = [_pattern(joint) for joint in joints]
        self.takes_space = takes_space
        self._alphabet = {atom for atoms in self._atoms for atom in atoms if len(atom) == 1 and atom != _SPACE}
        self.has_values = any("{" in joint for joint in joints)
        if self.has_values:
            self._alphabet.update(_NO_NAME.strip(), "0123456789")
        self._begin: Places = frozenset(
            place for joint, atoms in enumerate(self._atoms) if atoms for place in self._closure(joint, 0)
        )
        firsts = {self._atoms[joint][place] for joint, place in self._begin}
        self.first = re.compile("|".join(map(re.escape, sorted(firsts))) or r"(?!)")
        self._nodes: dict[tuple[tuple[Places, ...], bool], Node] = {}
        self.root = self._node((), True)
        self.begun = self._node((self._begin,), False)

    def values(self, joint: int, text: str) -> dict[str, str]:
        """Return the texts in place of {ID} and its like in the text of a joint."""
        pattern, names = self._patterns[joint]
        if not names:
            return {}
        match = pattern.fullmatch(text)
        assert match is not None, "the automaton has found it"
        return dict(zip(names, match.groups(), strict=True))

    def move(self, node: Node, character: str) -> Move:
        """Return the move of `character` in a state."""
        if character not in self._alphabet:
            character = _SPACE if character.isspace() else _OTHER
        move = node.moves.get(character)
        if move is None:
            move = node.moves[character] = self._new_move(node, character)
        return move

    def run(self, node: Node) -> Run:
        """Return the run of a state."""
        if node.run is None:
            characters: list[str] = []
            nodes: list[Node] = []
            last = node
            while (character := self._only_character(last)) and (move := self.move(last, character)).is_same:
                last = move.node
                characters.append(character)
                nodes.append(last)
            node.run = Run("".join(characters), tuple(nodes))
        return node.run

    def _only_character(self, node: Node) -> str:
        """Return the character with which all joints of a state go on; "" if there is none."""
        atoms = {self._atoms[joint][place] for group in node.groups for joint, place in group}
        if len(atoms) != 1 or not atoms <= self._alphabet:
            return ""
        return atoms.pop()

    def without_first(self, node: Node) -> Node:
        """Return the state without the group that began first, which has become too long."""
        return self._node(node.groups[1:], node.is_open)

    def _new_move(self, node: Node, character: str) -> Move:
        numbered = list(enumerate(node.groups))
        if node.is_open:
            numbered.append((-1, self._begin))
        groups: list[Places] = []
        kept: list[int] = []
        for number, begun in numbered:
            places = self._stepped(begun, character)
            done = [joint for joint, place in places if place == len(self._atoms[joint])]
            going = frozenset(place for place in places if place[1] < len(self._atoms[place[0]]))
            if going:
                groups.append(going)
                kept.append(number)
            if done:  # places that begin later cannot come first
                return Move(self._node(tuple(groups), False), False, tuple(kept), min(done), number)
        is_same = kept != [] and kept == list(range(len(node.groups)))
        return Move(self._node(tuple(groups), node.is_open), is_same, tuple(kept), None, -1)

    def _stepped(self, places: Places, character: str) -> Places:
        stepped: set[tuple[int, int]] = set()
        for joint, place in places:
            atom = self._atoms[joint][place]
            if atom == character:
                stepped |= self._closure(joint, place + (atom != _SPACE))
            elif len(atom) > 1 and _is_of_value(atom, character):
                stepped |= self._closure(joint, place)
        return frozenset(stepped)

    def _closure(self, joint: int, place: int) -> set[tuple[int, int]]:
        """Return a place and those behind it that are reached without a character."""
        reached = {(joint, place)}
        atoms = self._atoms[joint]
        while place < len(atoms) and (atoms[place] == _SPACE or len(atoms[place]) > 1):
            place += 1
            reached.add((joint, place))
        return reached

    def _node(self, groups: tuple[Places, ...], is_open: bool) -> Node:
        key = (groups, is_open)
        found = self._nodes.get(key)
        if found is None:
            if len(self._nodes) >= MAX_STATES:
                kept = {((), True): self.root, ((self._begin,), False): self.begun}
                for node in self._nodes.values():
                    node.moves.clear()
                    node.run = None
                self._nodes = kept
            found = self._nodes[key] = Node(groups, is_open)
        return found


@lru_cache(maxsize=512)
def compile_joints(joints: tuple[str, ...], takes_space: frozenset[int] = frozenset()) -> Automaton:
    """Return the automaton of joints."""
    return Automaton(joints, takes_space)


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


def joint_table(form: AnswerForm) -> JointTable:
    """Return the table of a form; the same one for equal forms."""
    return _joint_table(msgspec.json.encode(form))


@lru_cache(maxsize=64)
def _joint_table(form: bytes) -> JointTable:
    return JointTable(msgspec.json.decode(form, type=AnswerForm))


def _atoms(joint: str) -> list[Atom]:
    atoms: list[Atom] = []
    for value, space, text in _ATOM.findall(joint):
        if value or space:
            atoms.append(value or _SPACE)
        else:
            atoms += text
    return atoms


def _pattern(joint: str) -> tuple[re.Pattern[str], list[str]]:
    """Return an expression that matches the text of a joint, and the names of its groups."""
    pieces: list[str] = []
    values: list[str] = []
    for value, space, text in _ATOM.findall(joint):
        if value:
            values.append(value)
            pieces.append(_OF_VALUE[value])
        elif space:
            pieces.append(r"\s*+")
        else:
            pieces.append(re.escape(text))
    return re.compile("".join(pieces)), values


def _is_of_value(name: Atom, character: str) -> bool:
    """Return whether a character may stand in a value."""
    if name in _NUMBERS:
        return character.isascii() and character.isdigit()
    return character != _SPACE and (character == _OTHER or character not in _NO_NAME)
