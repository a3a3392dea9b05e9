"""ProseWatch: whether the constrained part of an answer with prose may still become a call.

    unread ──a token with which a marker may begin──▶ awaited ──the marker is complete──▶ called
                                                         └──no marker may begin at the text's end──▶ left

Such a part opens at a trigger (gate.py): a token that ends with the begin of a marker. While the marker is incomplete,
masks let no token complete it and go on wrongly. Once it cannot become complete, the part ends, and prose goes on
without masks. Knows the bytes of tokens, no grammar.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ....ipc.params.text_markers import TextMarkers


@dataclass
class ProseWatch:
    """Owner of the end of the text with which a marker may begin, `kept`: b"" before the first token."""

    markers: TextMarkers
    bytes_of: Callable[[int], bytes]  # of a token
    spelled: Callable[[bytes], Sequence[int]]  # tokens that make some bytes
    kept: bytes | None = b""  # None: the text holds a marker
    is_unread: bool = True

    @property
    def has_left(self) -> bool:
        return self.kept == b"" and not self.is_unread

    def take(self, token_id: int) -> Sequence[int]:
        """Advance by a token of the part; return the tokens by which its grammar is to advance. For the first they
        spell what is kept of it alone: the grammar takes any prose before that, but no torn character."""
        if self.kept is None:
            return [token_id]
        piece, was_unread = self.bytes_of(token_id), self.is_unread
        kept, self.is_unread = self.kept, False
        self.kept = self.markers.after(kept, piece)
        if not was_unread or self.kept is None or self.kept == piece:
            return [token_id]
        spelling = self.spelled(self.kept)
        is_exact = b"".join(map(self.bytes_of, spelling)) == self.kept
        return spelling if is_exact else [token_id]

    def begins(self, token_id: int) -> bool:
        """Return whether a marker may begin with a token in free text."""
        return self.markers.after(b"", self.bytes_of(token_id)) != b""
