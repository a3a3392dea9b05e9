"""TextMarkers: the search for markers in a text that comes piece by piece, with no more memory than a marker's begin.

Knows no tokens: pieces are bytes, and may end inside a character.
"""

from __future__ import annotations

from collections.abc import Iterable


class TextMarkers:
    """Owner of the markers, none empty."""

    def __init__(self, markers: Iterable[str]) -> None:
        self._markers = tuple(marker.encode() for marker in markers)
        self._begins = frozenset(marker[:end] for marker in self._markers for end in range(1, len(marker)))
        self._longest = max(map(len, self._markers), default=1) - 1

    def after(self, kept: bytes, piece: bytes) -> bytes | None:
        """Return the longest end of a text with which a marker may begin, b"" if there is none; None if the text holds
        a marker. kept: the result for the text before `piece`."""
        text = kept + piece
        if self.first_end(text):
            return None
        for length in range(min(len(text), self._longest), 0, -1):
            if text[-length:] in self._begins:
                return text[-length:]
        return b""

    def first_end(self, text: bytes) -> int:
        """Return the length of a text up to the first end of a marker in it; 0 if it holds none."""
        ends = [place + len(marker) for marker in self._markers if (place := text.find(marker)) >= 0]
        return min(ends, default=0)
