"""Automaton of joints: its states are sets of places in the joints of a form.

White space in a joint matches any white space or none, {ID}, {INDEX}, {NUMBER}, {NAME} and {KEY} match a text of their
kind, and all else is exact. The automaton is built while texts are read, and shared. Knows no text that was read.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple, TypeAlias

MAX_STATES = 20_000  # states of one automaton; beyond, it is built anew
_ATOM = re.compile(r"\{(ID|INDEX|NUMBER|NAME|KEY)\}|(\s+)|([^\s{]+|\{)")
_LEADING = re.compile(r"\A(?:\{(?:ID|INDEX|NUMBER|NAME|KEY)\}|\s)++")
_NO_NAME = "<>[]{}()|\"'` \t\r\n"  # characters that no id and no name contains
_NUMBERS = ("INDEX", "NUMBER")
_OF_NAME = f"([^{re.escape(_NO_NAME)}]*?)"
_OF_VALUE = {"ID": _OF_NAME, "NAME": _OF_NAME, "KEY": _OF_NAME, "INDEX": "([0-9]*?)", "NUMBER": "([0-9]*?)"}
_OTHER = ""  # stands for all characters that no joint contains
_SPACE = " "

Atom: TypeAlias = str  # a character, _SPACE for any white space or none, or the name of a value
Places: TypeAlias = frozenset[tuple[int, int]]  # joints and places in them, all of one start in the text


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
