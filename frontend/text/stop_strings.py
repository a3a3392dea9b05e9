"""StopChecker: finds stop strings in text that comes in pieces, and says how much of it may be shown already.

The rule, whatever the cuts between pieces: the occurrence that ends first wins, among those that end together the
longest. Text is kept back only while it is the beginning of a stop string. One pass over the characters
(Aho & Corasick, 1975), so that a token costs its length and not the number of stop strings.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple


class StopMatch(NamedTuple):
    """What a piece of text brings: `text` may be shown; `stop` is the string that ended the answer, if one did."""

    text: str
    stop: str | None


class StopChecker:
    """The state of one answer, up to its first stop string; replaying its text rebuilds it."""

    def __init__(self, stops: tuple[str, ...], is_included: bool) -> None:
        """`is_included`: the stop string is part of the answer, so nothing need be kept back."""
        self._node = compile_stops(stops)
        self._is_included = is_included
        self._held = ""

    def append(self, text: str, may_stop: bool = True) -> StopMatch:
        """Take the next `text`; where not `may_stop` (min_tokens), an occurrence that ends in it counts for nothing."""
        node = self._node
        for position, character in enumerate(text, 1):
            while node.length and character not in node.children:
                node = node.fallback
            node = node.children.get(character, node)
            if may_stop and (stop := node.match) is not None:
                seen = self._held + text[:position]
                return StopMatch(seen if self._is_included else seen[: len(seen) - len(stop)], stop)
        self._node = node
        seen = self._held + text
        num_held = 0 if self._is_included else node.num_held
        cut = len(seen) - num_held
        self._held = seen[cut:]
        return StopMatch(seen[:cut], None)

    def finish(self) -> str:
        """The text that was kept back, when the answer ends without a stop string."""
        text, self._held = self._held, ""
        return text


class Node:
    """A prefix of the stop strings; the root is the empty one."""

    __slots__ = ("children", "fallback", "length", "match", "num_held")

    def __init__(self, length: int) -> None:
        self.length = length
        self.children: dict[str, Node] = {}
        self.fallback = self  # the longest proper suffix of this prefix that is a node; the root is its own
        self.match: str | None = None  # the longest stop string that ends here
        self.num_held = 0  # length of the longest suffix that begins a stop string without being the whole of it


@lru_cache(maxsize=32)
def compile_stops(stops: tuple[str, ...]) -> Node:
    """The root for `stops`, shared by the answers that ask for the same ones."""
    root = Node(0)
    for stop in stops:
        node = root
        for character in stop:
            node = node.children.setdefault(character, Node(node.length + 1))
        node.match = stop
    queue = [root]
    for node in queue:  # breadth first, so that a node's fallback, which is shorter, is complete before it
        for character, child in node.children.items():
            before = node.fallback
            while before.length and character not in before.children:
                before = before.fallback
            child.fallback = root if node is root else before.children.get(character, before)
            child.match = child.match or child.fallback.match
            child.num_held = child.length if child.children else child.fallback.num_held
            queue.append(child)
    return root
