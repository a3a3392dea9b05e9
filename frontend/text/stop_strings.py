"""StopChecker: finds stop strings in streamed text, and holds back text that may begin one.

The occurrence that ends first wins, of those that end together the longest, however the text is cut into deltas. One
pass over the characters (Aho & Corasick, 1975), so that a token costs its length and not the number of stop strings.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple


class StopMatch(NamedTuple):
    """Result of one delta: the `text` to show, and the stop string that ended the answer, if any."""

    text: str
    stop: str | None


class StopChecker:
    """State of one answer up to its first stop string; replaying its text rebuilds it."""

    def __init__(self, stops: tuple[str, ...], is_included: bool) -> None:
        """`is_included`: include_stop_str_in_output, which needs no text held back."""
        self._node = compile_stops(stops)
        self._is_included = is_included
        self._held = ""

    def append(self, text: str, may_stop: bool = True) -> StopMatch:
        """Append the next `text`. If not `may_stop` (min_tokens), an occurrence that ends in it is ignored."""
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
        """Return the text held back, if the answer ends without a stop string."""
        text, self._held = self._held, ""
        return text


class Node:
    """A node of the automaton: a prefix of the stop strings; the root is the empty prefix."""

    __slots__ = ("children", "fallback", "length", "match", "num_held")

    def __init__(self, length: int) -> None:
        self.length = length
        self.children: dict[str, Node] = {}
        self.fallback = self  # node of this prefix's longest proper suffix; the root's is itself
        self.match: str | None = None  # the longest stop string that ends here
        self.num_held = 0  # length of the longest suffix that is a proper prefix of a stop string


@lru_cache(maxsize=32)
def compile_stops(stops: tuple[str, ...]) -> Node:
    """Build the automaton of `stops` and return its root, which answers with equal stop strings share."""
    root = Node(0)
    for stop in stops:
        node = root
        for character in stop:
            node = node.children.setdefault(character, Node(node.length + 1))
        node.match = stop
    queue = [root]
    for node in queue:  # breadth first: a node's fallback is shorter, hence complete before it
        for character, child in node.children.items():
            before = node.fallback
            while before.length and character not in before.children:
                before = before.fallback
            child.fallback = root if node is root else before.children.get(character, before)
            child.match = child.match or child.fallback.match
            child.num_held = child.length if child.children else child.fallback.num_held
            queue.append(child)
    return root
