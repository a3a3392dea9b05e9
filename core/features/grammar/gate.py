"""ConstraintGate: the parts of an answer to which its grammar applies.

    free ──a begin──▶ constrained ──the grammar allows no further token──▶ free up to the next begin, or the answer ends

A begin is a sequence of tokens in free text, such as the end of a thought or the start of a call. Of several that end
at one token the longest counts. A trigger is a token that is a begin by itself: with it the text of a marker may begin.
If an answer has both, its triggers count behind its first begin alone, which is the end of its thought. A token of a
free part costs one look-up. Knows no helper and no step.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from ....ipc.codec import decode_ids
from ....ipc.messages.core import ConstraintBegin
from ...request import Ids


class ConstraintGate:
    """Position of one answer. `start`: index of the first output token of its open constrained part; None in free text.
    `last_ids`: the tokens at which to look for a begin."""

    def __init__(self, begins: Sequence[ConstraintBegin], triggers: Collection[int] = ()) -> None:
        """Without begins and triggers the whole answer is constrained."""
        decoded = [(decode_ids(begin.token_ids).tolist(), begin.is_included) for begin in begins]
        self._begins = sorted(decoded, key=lambda begin: -len(begin[0]))
        self._triggers = triggers
        self.last_ids: Collection[int] = frozenset(token_ids[-1] for token_ids, _ in decoded) or triggers
        self.start: int | None = None
        self._free_from = 0
        if not self.last_ids:
            self.start = 0

    @property
    def is_free(self) -> bool:
        return self.start is None

    def enter(self, outputs: Ids, first: int) -> bool:
        """Look for a begin that ends at index `first` of the output tokens or later, in free text; return whether there
        is one. Then the constrained part starts with its tokens, or behind them."""
        place = self._begin_in(outputs, first) if self._begins else first
        if place is not None and self._triggers:
            self._begins, self.last_ids = [], self._triggers
            self._free_from = place
            place = next(iter(self._ends_in(outputs, place)), None)
        self.start = place
        return place is not None

    def leave(self, end: int) -> None:
        """Let text be free from index `end` of the output tokens on."""
        self.start = None
        self._free_from = end

    def _begin_in(self, outputs: Ids, first: int) -> int | None:
        """Return where the part behind the first begin starts that ends at index `first` or later; None if there is
        no begin."""
        for index in self._ends_in(outputs, first):
            for token_ids, is_included in self._begins:
                place = index + 1 - len(token_ids)
                if place >= self._free_from and outputs[place : index + 1].tolist() == token_ids:
                    return place if is_included else index + 1
        return None

    def _ends_in(self, outputs: Ids, first: int) -> list[int]:
        """Return the indices from `first` on at which one of `last_ids` stands."""
        return (np.flatnonzero(np.isin(outputs[first:], list(self.last_ids))) + first).tolist()
