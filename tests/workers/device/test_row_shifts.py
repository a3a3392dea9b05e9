"""The shift of a row's positions is on the device when the row decodes, and goes with the row."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tokenloom.tests.workers.paged_run import CPU
from tokenloom.tests.workers.random_schedule import frame, new_row
from tokenloom.workers.device.device_batch import DeviceBatch
from tokenloom.workers.machine.parallel import ParallelGroup
from tokenloom.workers.sampling.sampling_columns import SamplingColumns
from tokenloom.workers.step.input_batch import InputBatch

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy: 32-bit words wrap in the interpreter


@pytest.mark.parametrize("has_adapters", [False, True])
def test_shifts_follow_the_rows(has_adapters: bool) -> None:
    shifts = np.zeros(4, np.int64)
    batch = InputBatch(4, 16, 4, [17])
    rows = DeviceBatch(4, 4, 4, CPU, ParallelGroup(), has_adapters, shifts)

    def run(*numbers: int) -> list[int]:
        """Compute the prompts of new rows."""
        for row in numbers:
            batch.admit(new_row(row, [5, 6, 7]))
            batch.append_blocks(np.array([[row, 0, 1 + row]], np.int32))
        inputs = batch.prepare(batch.layout(frame(*numbers), frame(*[3] * len(numbers))))
        rows.write(
            [torch.from_numpy(each) for each in rows.changes(inputs, SamplingColumns.greedy(len(numbers)), False)]
        )
        assert rows.columns.rope_deltas is not None
        deltas: list[int] = rows.columns.rope_deltas.tolist()
        return deltas

    shifts[1], shifts[2] = -7, -3
    assert run(0, 1, 2) == [0, -7, -3, 0]
    batch.free(np.array([1], np.int32))
    rows.forget(np.array([1], np.int32))
    shifts[1] = 0
    assert run(1) == [0, 0, -3, 0]
