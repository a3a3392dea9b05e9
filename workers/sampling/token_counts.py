"""TokenCounts: the distinct tokens of a row and their counts in its output, for penalties.

Sparse, so that a step costs time by the distinct tokens of a row, not by the vocabulary. Made anew from the row's
tokens when the row is admitted again.
"""

from __future__ import annotations

import numpy as np

from ..machine.arrays import F32, I32, I64


class TokenCounts:
    """`token_ids[i]` occurs `counts[i]` times in the output; 0: only in the prompt."""

    def __init__(self, prompt: I32, outputs: I32) -> None:
        distinct = np.unique(np.concatenate([prompt, outputs]))
        self._size = len(distinct)
        self._token_ids: I64 = np.zeros(self._size + 64, np.int64)
        self._counts: F32 = np.zeros(self._size + 64, np.float32)
        self._token_ids[: self._size] = distinct
        self._counts[: self._size] = np.bincount(np.searchsorted(distinct, outputs), minlength=self._size)
        self._index_by_token = dict(zip(distinct.tolist(), range(self._size), strict=True))

    @property
    def token_ids(self) -> I64:
        return self._token_ids[: self._size]

    @property
    def counts(self) -> F32:
        return self._counts[: self._size]

    def append(self, token_id: int) -> None:
        """Count a token of the output, sampled or forced."""
        index = self._index_by_token.get(token_id)
        if index is None:
            index = self._index_by_token[token_id] = self._size
            if index == len(self._token_ids):
                self._token_ids = np.concatenate([self._token_ids, np.zeros_like(self._token_ids)])
                self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
            self._token_ids[index] = token_id
            self._size += 1
        self._counts[index] += 1
