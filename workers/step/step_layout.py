"""Parts of a step's inputs: the layout of rows and token counts, the sampling parameters, and the inputs of media.

Most steps compute the same rows as the step before, one token each, so InputBatch keeps the layout and the sampling
parameters while the batch is unchanged.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from torch import Tensor

from ...kernels.contract import CrossStep, StepMedia
from ..machine.arrays import I32, I64, Bools
from ..sampling.logprobs import LogprobTargets
from ..sampling.row_processors import RowProcessors
from ..sampling.sampling_columns import SamplingColumns


@dataclass(frozen=True, eq=False)
class StepLayout:
    """Rows and token counts of a step: n rows in compute order (rows with one token first), T tokens."""

    rows: I32  # [n]
    counts: I32  # [n] tokens of each
    message_order: I64 | None  # [n] index in compute order of each row of the message; None: the orders are equal
    query_starts: I32  # [n + 1] tokens of row r are [query_starts[r], query_starts[r + 1])
    last_tokens: I64  # [n] index into the T tokens of each row's last
    num_decode_rows: int  # rows with exactly one token
    can_sample: Bools | None  # [n] rows that sample, as pooled ones do not; None: all
    token_slots: I32 | None  # [T] slot of each token's adapter; None: all 0

    @classmethod
    def of(cls, rows: I32, counts: I32, can_sample: Bools, adapter_slots: I32) -> StepLayout:
        """Make the layout; all arguments are [n] in the order of the message."""
        is_decode = counts == 1
        num_decode_rows = int(np.count_nonzero(is_decode))
        message_order = None
        if num_decode_rows < len(rows):
            order = np.argsort(~is_decode, kind="stable")
            message_order = np.argsort(order)
            rows, counts, can_sample = rows[order], counts[order], can_sample[order]
            adapter_slots = adapter_slots[order]
        query_starts = np.zeros(len(rows) + 1, np.int32)
        np.cumsum(counts, out=query_starts[1:])
        return cls(
            rows=rows,
            counts=counts,
            message_order=message_order,
            query_starts=query_starts,
            last_tokens=query_starts[1:].astype(np.int64) - 1,
            num_decode_rows=num_decode_rows,
            can_sample=None if can_sample.all() else can_sample,
            token_slots=np.repeat(adapter_slots, counts) if adapter_slots.any() else None,
        )

    def tokens(self, firsts: I64) -> tuple[I32, I64]:
        """Return row and position of each of the T tokens. firsts: [n] position of each row's first token."""
        if self.num_decode_rows == len(self.rows):
            return self.rows, firsts
        spread = np.repeat(firsts - self.query_starts[:-1], self.counts)
        return np.repeat(self.rows, self.counts), np.arange(self.query_starts[-1]) + spread


@dataclass(frozen=True, eq=False)
class SamplingMetadata:
    """Sampling parameters of s rows, fixed at admission, and their processors, which are updated with each token."""

    rows: I32  # [s]
    sampling: SamplingColumns
    processors: dict[int, RowProcessors]  # by index of the row; rows whose logits stay unchanged are left out
    logprob_indices: I64  # [l] indices of the rows that want logprobs
    logprob_targets: list[LogprobTargets]  # [l] tokens to score beside each sampled one


class RowColumns(NamedTuple):
    """Columns of all rows of a worker."""

    token_ids: I32  # [max_num_seqs, most tokens]
    num_tokens: I64
    num_slots: I64  # tokens that the blocks hold
    block_tables: I32
    sampling: SamplingColumns


class MediaInputs(NamedTuple):
    """Inputs of a step with media, which replace those of text; tensors are on the device."""

    is_behind_spans: bool  # all rows compute tokens behind their last spans, so that one shift a row is all
    positions: I64 | None = None  # [T] of AttentionMetadata; None: indices of tokens
    cos_sin: Tensor | None = None  # of AttentionMetadata, as is see_until
    see_until: Tensor | None = None
    media: StepMedia | None = None  # None: no placeholder is computed
    cross: CrossStep | None = None  # None: layers leave cross attention out
