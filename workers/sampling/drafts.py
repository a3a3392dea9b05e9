"""StepDrafts: the drafts of a step's rows, and the number of drawn tokens that a row keeps.

A row with n drafts draws n + 1 tokens: one after its last known token, and one after each draft. The draws are valid up
to and including the first that differs from its draft, since later ones were drawn after a token that the row does not
have.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ...ipc.errors import ProtocolError
from ..machine.arrays import I32, I64, Bools

NO_DRAFT = -1  # stands for the draft of a row's last draw, which has none, or of a draw that is not kept


class StepDrafts(NamedTuple):
    """Drafts of the n rows of a step, in compute order."""

    counts: I64  # [n]
    token_ids: I32  # [sum(counts)]

    @classmethod
    def of(cls, frame: I32, rows: I32, vocab_size: int) -> StepDrafts:
        """Decode SchedulerOutput.drafts. rows: [n], the step's rows. ProtocolError if the frame is malformed, or has
        other rows or ids outside the vocabulary."""
        drafts_by_row: dict[int, I32] = {}
        start = 0
        while start < len(frame):
            row, count = frame[start : start + 2].tolist() if start + 2 <= len(frame) else (-1, 0)
            token_ids = frame[start + 2 : start + 2 + count]
            if count < 1 or len(token_ids) < count or row in drafts_by_row:
                raise ProtocolError(f"row {row} has {count} drafts, of which there are {len(token_ids)}")
            if token_ids.min() < 0 or token_ids.max() >= vocab_size:
                raise ProtocolError(f"row {row} has the drafts {token_ids.tolist()}, ids are [0, {vocab_size})")
            drafts_by_row[row] = token_ids
            start += 2 + count
        found = [drafts_by_row.pop(row, frame[:0]) for row in rows.tolist()]
        if drafts_by_row:
            raise ProtocolError(f"rows {list(drafts_by_row)} have drafts, but are not in the step")
        return cls(np.array([len(each) for each in found], np.int64), np.concatenate(found))

    def check(self, rows: I32, samples: Bools) -> None:
        """Raise ProtocolError if a row has drafts that do not follow its last known token, or does not sample."""
        wrong = np.flatnonzero((self.counts > 0) & ~samples)
        if len(wrong):
            raise ProtocolError(f"row {rows[wrong[0]]} has drafts, which do not follow its last known token")

    def places(self, last_tokens: I64) -> I64:
        """Return the index of each draft among the step's tokens. last_tokens: [n], the index of each row's last
        token."""
        return spread(last_tokens + 1 - self.counts, self.counts)


def spread(starts: I64, counts: I64) -> I64:
    """Return, for each start, the `count` numbers start, start + 1, …, one after the other: [sum(counts)]."""
    firsts = np.cumsum(counts) - counts
    return np.repeat(starts - firsts, counts) + np.arange(int(counts.sum()))


def num_kept(drawn: I64, drafts: I32, is_masked: Bools) -> int:
    """Return how many of its draws a row keeps: those up to and including the first that differs from its draft. A draw
    without any allowed token ends them, and is itself kept only if it is the first, so that the row's next step reports
    it.

    drawn, drafts, is_masked: [n + 1]; the last draft is NO_DRAFT. is_masked: whether all tokens of the draw are masked.
    """
    kept = int((drawn != drafts).argmax()) + 1
    return max(int(is_masked.argmax()), 1) if is_masked[:kept].any() else kept
