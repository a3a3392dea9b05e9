"""ConstraintGate: the parts of an answer to which its grammar applies.

    free ──a begin──▶ constrained ──the grammar allows no further token──▶ free up to the next begin, or the answer ends

A begin is a sequence of tokens in free text, such as the end of a thought or the start of a call. Of several that end
at one token the longest counts. A token of a free part costs one look-up. Knows no helper and no step.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ....ipc.codec import decode_ids
from ....ipc.messages.core import ConstraintBegin
from ...request import Ids


class ConstraintGate:
    """Position of one answer. `start`: index of the first output token of its open constrained part; None in free
    text."""

    def __init__(self, begins: Sequence[ConstraintBegin]) -> None:
        """begins: without any, the whole answer is constrained."""
        decoded = [(decode_ids(begin.token_ids).tolist(), begin.is_included) for begin in begins]
        self._begins = sorted(decoded, key=lambda begin: -len(begin[0]))
        self.last_ids = frozenset(token_ids[-1] for token_ids, _ in decoded)
        self.start: int | None = None
        self._free_from = 0
        if not begins:
            self.start = 0

    @property
    def is_free(self) -> bool:
        return self.start is None

    def enter(self, outputs: Ids, first: int) -> bool:
        """Look for a begin that ends at index `first` of the output tokens or later, in free text; return whether there
        is one. Then the constrained part starts with its tokens, or behind them."""
        is_last = np.isin(outputs[first:], list(self.last_ids))
        for index in (np.flatnonzero(is_last) + first).tolist():
            for token_ids, is_included in self._begins:
                place = index + 1 - len(token_ids)
                if place >= self._free_from and outputs[place : index + 1].tolist() == token_ids:
                    self.start = place if is_included else index + 1
                    return True
        return False

    def leave(self, end: int) -> None:
        """Let text be free from index `end` of the output tokens on."""
        self.start = None
        self._free_from = end
