"""MarkerFinder: finds markers in streamed text, and holds back text that may be the start of one.

Markers are stop strings and the tags around reasoning and tool calls. The first occurrence to end is found or, of those
that end together, the longest, however the text is cut into pieces. The search is one pass over the characters (Aho &
Corasick, 1975): its cost depends on the length of the text, not on the number of markers.
"""

from __future__ import annotations

import re
from functools import lru_cache

MAX_SPACE = 1024  # most white space before a marker at the start of an answer


class MarkerFinder:
    """Finder of markers in one streamed text. Its state is the text since the last marker."""

    def __init__(self, *markers: str, is_included: bool = False) -> None:
        """`is_included`: returned text contains the markers, so that no text needs to be held back."""
        self._root, self._first = compile_markers(markers)
        self._node = self._root
        self._is_included = is_included
        self._held = ""

    def feed(self, text: str, may_match: bool = True) -> tuple[str, str, str]:
        """Read the next `text`. Return the text before a marker, the marker, and the text after it; if no marker is
        found, return the text that cannot belong to one, "" and "". If not `may_match`, markers that end in `text` are
        ignored."""
        node, root, position = self._node, self._root, 0
        while position < len(text):
            if node is root:
                begin = self._first.search(text, position)
                if begin is None:
                    break
                position = begin.start()
            character = text[position]
            position += 1
            while node.length and character not in node.children:
                node = node.fallback
            node = node.children.get(character, node)
            if may_match and (marker := node.match) is not None:
                seen = self._held + text[:position]
                self._node, self._held = root, ""
                return seen if self._is_included else seen[: len(seen) - len(marker)], marker, text[position:]
        self._node = node
        seen = self._held + text
        cut = len(seen) - (0 if self._is_included else node.num_held)
        self._held = seen[cut:]
        return seen[:cut], "", ""

    def finish(self) -> str:
        """Return the text that was held back; to be called at the end of the stream."""
        text, self._held = self._held, ""
        return text


class Node:
    """Node of the automaton: a prefix of one or more markers; the root is the empty prefix."""

    __slots__ = ("children", "fallback", "length", "match", "num_held")

    def __init__(self, length: int) -> None:
        self.length = length
        self.children: dict[str, Node] = {}
        self.fallback = self  # node of this prefix's longest proper suffix; the root's is itself
        self.match: str | None = None  # the longest marker that ends here
        self.num_held = 0  # length of the longest suffix that is a proper prefix of a marker


@lru_cache(maxsize=64)
def compile_markers(markers: tuple[str, ...]) -> tuple[Node, re.Pattern[str]]:
    """Build the automaton of `markers`. Return its root, and a pattern of the first characters of markers."""
    root = Node(0)
    for marker in markers:
        node = root
        for character in marker:
            node = node.children.setdefault(character, Node(node.length + 1))
        node.match = marker
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
    return root, re.compile(f"[{''.join(map(re.escape, root.children))}]")


def split_marker(text: str, marker: str) -> tuple[str, str] | None:
    """Split `text` after its leading white space and `marker`; return ("", text) if it does not start so. None if more
    text may complete the marker. After more than MAX_SPACE characters of white space it gives up, so that repeated
    calls for a growing text stay cheap."""
    begun = text.lstrip()
    if begun.startswith(marker):
        end = len(text) - len(begun) + len(marker)
        return text[:end], text[end:]
    return None if marker.startswith(begun) and len(text) <= MAX_SPACE + len(marker) else ("", text)
