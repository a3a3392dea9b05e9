"""OpenThought: an answer that begins inside a thought. The grammar is not in force before its end."""

from __future__ import annotations

from ...ipc.codec import decode_ids


class OpenThought:
    """Detector of a thought's end: `append` gets each token of the answer in order, until `is_over`."""

    def __init__(self, end: bytes, tokens: bytes) -> None:
        """Both int32. end: tokens that end the thought; empty: there is no thought. tokens: of the answer so far."""
        self._end = decode_ids(end).tolist()
        self._recent: list[int] = []
        self.is_over = not end
        self.num_tokens = 0  # of the thought so far, with its end
        for token_id in decode_ids(tokens):
            if not self.is_over:
                self.append(token_id)

    def append(self, token_id: int) -> None:
        self.num_tokens += 1
        self._recent = [*self._recent, token_id][-len(self._end) :]
        self.is_over = self._recent == self._end
