"""What a step's inputs owe to which rows it computes and to how many tokens of each, whatever tokens these are.

Most steps compute the rows of the step before, one token each: what is here is made once for all of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .sampling.logprobs import Others
from .sampling.row_processors import RowProcessors
from .sampling.sampling_columns import SamplingColumns

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class StepLayout:
    """n rows in compute order (those with one token first), T tokens."""

    rows: I32  # [n]
    counts: I32  # [n] tokens of each
    places: I64 | None  # [n] where the rows stand in compute order, in the order of the message; None: as there
    query_starts: I32  # [n + 1] tokens of row r are [query_starts[r], query_starts[r + 1])
    last_tokens: I64  # [n] index into the T tokens of each row's last
    num_decode_rows: int  # rows with exactly one token
    are_drawn: npt.NDArray[np.bool_] | None  # [n] rows that are not embedded; None: all

    @classmethod
    def of(cls, rows: I32, counts: I32, are_drawn: npt.NDArray[np.bool_]) -> StepLayout:
        """All [n] in the order of the message."""
        is_decode = counts == 1
        num_decode_rows = int(np.count_nonzero(is_decode))
        places = None
        if num_decode_rows < len(rows):
            order = np.argsort(~is_decode, kind="stable")
            places = np.argsort(order)
            rows, counts, are_drawn = rows[order], counts[order], are_drawn[order]
        query_starts = np.zeros(len(rows) + 1, np.int32)
        np.cumsum(counts, out=query_starts[1:])
        return cls(
            rows=rows,
            counts=counts,
            places=places,
            query_starts=query_starts,
            last_tokens=query_starts[1:].astype(np.int64) - 1,
            num_decode_rows=num_decode_rows,
            are_drawn=None if are_drawn.all() else are_drawn,
        )

    def tokens(self, firsts: I64) -> tuple[I32, I64]:
        """Row and position of each of the T tokens. firsts: [n] position of each row's first."""
        if self.num_decode_rows == len(self.rows):
            return self.rows, firsts
        spread = np.repeat(firsts - self.query_starts[:-1], self.counts)
        return np.repeat(self.rows, self.counts), np.arange(self.query_starts[-1]) + spread


@dataclass(frozen=True, eq=False)
class SamplingMetadata:
    """What s rows want of their next tokens, from their admission on."""

    rows: I32  # [s]
    sampling: SamplingColumns
    rules: dict[int, RowProcessors]  # by place; rows whose logits stay as they are are left out
    asking: I64  # [a] places of those that want logprobs
    others: list[Others]  # [a] whose logprobs they want beside that of the sampled token
