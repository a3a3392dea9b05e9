"""Batches: makes the batch of each step: the last one again, or a new one with drafts in it."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ..request import Ids
from .drafting import Draft, Drafting
from .step.batch import Batch
from .step.rows import Rows
from .step.table_growth import TableGrowth


class Batches:
    """Owner of the last batch and the drafts that are proposed for the next step. Call `repeated` once for each
    step."""

    def __init__(self, rows: Rows, growth: TableGrowth, counts: Ids, budget: int) -> None:
        """counts: [max_num_seqs] tokens of the step by row, to which drafts are added. budget: largest number of tokens
        in a step."""
        self.drafting = Drafting(rows, growth)
        self._rows, self._counts, self._budget = rows, counts, budget
        self._last: Batch | None = None
        self._drafts: Mapping[int, Draft] = {}

    def repeated(self) -> Batch | None:
        """Return the last batch if the next step can use it again; None if rows have changed or get drafts, the batch
        has had all its steps, or there is none."""
        self._drafts = self.drafting.propose()
        if self._last is None or self._drafts or not self._last.repeats(self._rows):
            return None
        return self._last

    def new(self) -> Batch | None:
        """Return a new batch of the rows that have tokens in the step, with their drafts; None if no row has tokens."""
        placed = self.drafting.place(self._drafts, self._counts, self._budget) if self._drafts else None
        rows = np.flatnonzero(self._counts)
        self._last = Batch(self._rows, rows, self._counts[rows], placed) if len(rows) else None
        return self._last

    def empty(self) -> Batch:
        """Return the batch of a step without rows."""
        return Batch(self._rows, np.empty(0, np.intp), np.empty(0, np.int32))
