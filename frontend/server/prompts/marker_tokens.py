"""MarkerTokens: the tokens of a vocabulary with which markers may begin in an answer.

Knows no form and no request.
"""

from __future__ import annotations

from functools import cached_property

from ....ipc.codec import encode_ids
from ....ipc.params.text_markers import TextMarkers
from ..text.pieces import PieceTable, comes_in_pieces, find_probe
from ..text.token_bytes import spellings_of
from ..text.token_texts import TokenTexts
from ..text.tokenizer import Tokenizer

MAX_MARKERS = 16  # tuples of markers whose tokens are kept: those of the model, and of requests' own templates


class MarkerTokens:
    """Owner of the tokens that were found."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._found: dict[tuple[str, ...], bytes] = {}

    def leading_to(self, markers: tuple[str, ...]) -> bytes:
        """Return the ids, as int32, of the tokens that end with the begin of a marker, or with one. b"" if these do not
        suffice to find markers before text stands behind them: if a token holds a marker and more, or if the text of
        an answer is not that of its tokens."""
        if markers not in self._found:
            while len(self._found) >= MAX_MARKERS:
                del self._found[next(iter(self._found))]
            self._found[markers] = self._search(markers)
        return self._found[markers]

    @cached_property
    def _texts(self) -> TokenTexts | None:
        """The bytes of tokens; None if they do not join to a text."""
        probe = find_probe(self._tokenizer)
        if probe is None or not comes_in_pieces(self._tokenizer):
            return None
        return TokenTexts(PieceTable(self._tokenizer, probe, frozenset()))

    def _search(self, markers: tuple[str, ...]) -> bytes:
        texts, found = self._texts, list[int]()
        if texts is None or not markers:
            return b""
        search = TextMarkers(markers)
        for token_id in self._candidates(markers):
            piece = texts.bytes_of(token_id)
            kept = search.after(b"", piece)
            if kept is None and (search.first_end(piece) < len(piece) or is_torn(piece)):
                return b""
            if kept != b"":
                found.append(token_id)
        return encode_ids(sorted(found))

    def _candidates(self, markers: tuple[str, ...]) -> list[int]:
        """Return the tokens with the first byte of a marker in them: few of all."""
        backend = self._tokenizer.backend
        assert backend is not None, "tokens that join to a text have one"
        signs = {sign for marker in markers for sign in (marker[0], *spellings_of(marker.encode()[0]))}
        vocabulary = backend.get_vocab(with_added_tokens=True)
        return [token_id for spelling, token_id in vocabulary.items() if any(sign in spelling for sign in signs)]


def is_torn(piece: bytes) -> bool:
    """Return whether bytes are not whole characters."""
    try:
        piece.decode()
    except UnicodeDecodeError:
        return True
    return False
