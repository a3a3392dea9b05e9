"""TokenTexts: a cache of the text and the bytes of each token, for logprobs."""

from __future__ import annotations

from .pieces import PieceTable


class TokenTexts(dict[int, str]):
    """Cache: token id → the text that the token adds after other text. A word keeps its leading space; a part of a
    character is U+FFFD.

    The bytes of consecutive tokens join to the bytes of their text, except for one space with which a text begins."""

    def __init__(self, pieces: PieceTable) -> None:
        """`pieces`: the pieces of all tokens, including special ones."""
        super().__init__()
        self._pieces = pieces

    def __missing__(self, token_id: int) -> str:
        piece = self._pieces[token_id]
        text = self[token_id] = piece if isinstance(piece, str) else piece.decode(errors="replace")
        return text

    def bytes_of(self, token_id: int) -> bytes:
        """Return the bytes of text for which a token stands; they may be a part of a character."""
        piece = self._pieces[token_id]
        return piece.encode() if isinstance(piece, str) else piece
