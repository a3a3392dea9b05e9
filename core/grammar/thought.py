"""OpenThought: an answer that begins inside a thought. The grammar is not in force before its end."""

from __future__ import annotations

from ...ipc.codec import decode_ids


class OpenThought:
    """Gets each token of the answer in order, until `is_over`."""

    def __init__(self, end: bytes, tokens: bytes) -> None:
        """Both int32. end: tokens that end the thought; empty: there is no thought. tokens: of the answer so far."""
        self._end = decode_ids(end).tolist()
        self._recent: list[int] = []
        self.is_over = not end
        for token_id in decode_ids(tokens):
            if not self.is_over:
                self.append(token_id)

    def append(self, token_id: int) -> None:
        self._recent = [*self._recent, token_id][-len(self._end) :]
        self.is_over = self._recent == self._end


def tokens_after(end: bytes, tokens: bytes) -> bytes:
    """Return the tokens of an answer after the thought that it begins with, int32."""
    width = len(end)
    places = (place for place in range(width, len(tokens) + 1, 4) if tokens[place - width : place] == end)
    return tokens[next(places, len(tokens)) :]
