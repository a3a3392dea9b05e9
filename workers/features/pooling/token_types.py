"""TokenTypes: the types of the tokens of pairs, whose second text has type 1. All ranks of an encoder need them."""

from __future__ import annotations

import numpy as np

from ....ipc.messages.workers import SchedulerOutput
from ...machine.arrays import ids_of
from ...step.runner_feature import RunnerFeature
from ...step.step_inputs import StepInputs


class TokenTypes(RunnerFeature):
    """Owner of the number of tokens before the second text of each row with a pair. Other steps cost nothing."""

    def __init__(self) -> None:
        self._num_first_by_row: dict[int, int] = {}

    def update(self, step: SchedulerOutput) -> None:
        """Forget freed rows, and record the new rows with pairs."""
        if self._num_first_by_row:
            for row in ids_of(step.freed_rows).tolist():
                self._num_first_by_row.pop(row, None)
        for new_row in step.new_rows:
            if new_row.pooling is not None and new_row.pooling.first_type_tokens is not None:
                self._num_first_by_row[new_row.row] = new_row.pooling.first_type_tokens

    def clear(self) -> None:
        self._num_first_by_row.clear()

    def prepare(self, inputs: StepInputs) -> StepInputs:
        rows = inputs.rows.tolist()
        if self._num_first_by_row.keys().isdisjoint(rows):
            return inputs
        counts = np.diff(inputs.query_starts)
        never = np.iinfo(np.int32).max
        num_first = np.array([self._num_first_by_row.get(row, never) for row in rows])
        types = inputs.positions >= np.repeat(num_first, counts)
        return inputs._replace(token_types=types.astype(np.int32))
