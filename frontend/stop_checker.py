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
        self._automaton = compile_stops(stops)
        self._is_included = is_included
        self._node = 0
        self._held = ""

    def append(self, text: str, may_stop: bool = True) -> StopMatch:
        """Take the next `text`; where not `may_stop` (min_tokens), an occurrence that ends in it counts for nothing."""
        automaton = self._automaton
        children, fallbacks, matches = automaton.children, automaton.fallbacks, automaton.matches
        node = self._node
        for position, character in enumerate(text, 1):
            while node and character not in children[node]:
                node = fallbacks[node]
            node = children[node].get(character, 0)
            if may_stop and (stop := matches[node]) is not None:
                seen = self._held + text[:position]
                return StopMatch(seen if self._is_included else seen[: len(seen) - len(stop)], stop)
        self._node = node
        seen = self._held + text
        num_held = 0 if self._is_included else automaton.num_held[node]
        cut = len(seen) - num_held
        self._held = seen[cut:]
        return StopMatch(seen[:cut], None)

    def finish(self) -> str:
        """The text that was kept back, when the answer ends without a stop string."""
        text, self._held = self._held, ""
        return text


class Automaton:
    """Nodes are the prefixes of the stop strings, 0 the empty one; lists are indexed by node."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self.children: list[dict[str, int]] = [{}]
        self.fallbacks = [0]  # the longest proper suffix of this prefix that is a node
        self.matches: list[str | None] = [None]  # the longest stop string that ends here
        self.num_held = [0]  # length of the longest suffix that begins a stop string without being the whole of it
        self._depths = [0]
        for stop in stops:
            self._add(stop)
        self._link()

    def _add(self, stop: str) -> None:
        node = 0
        for character in stop:
            child = self.children[node].get(character)
            if child is None:
                child = len(self.children)
                self.children[node][character] = child
                self.children.append({})
                self.fallbacks.append(0)
                self.matches.append(None)
                self.num_held.append(0)
                self._depths.append(self._depths[node] + 1)
            node = child
        self.matches[node] = stop

    def _link(self) -> None:
        """Breadth first, so that a node's fallback, which is shorter, is complete before it."""
        queue = [0]
        for node in queue:
            for character, child in self.children[node].items():
                if node:
                    fallback = self.fallbacks[node]
                    while fallback and character not in self.children[fallback]:
                        fallback = self.fallbacks[fallback]
                    self.fallbacks[child] = self.children[fallback].get(character, 0)
                fallback = self.fallbacks[child]
                if self.matches[child] is None:
                    self.matches[child] = self.matches[fallback]
                self.num_held[child] = self._depths[child] if self.children[child] else self.num_held[fallback]
                queue.append(child)


@lru_cache(maxsize=32)
def compile_stops(stops: tuple[str, ...]) -> Automaton:
    """The automaton of `stops`, shared by the answers that ask for the same ones."""
    return Automaton(stops)
