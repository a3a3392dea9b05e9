"""ShadowedWorker: a FakeWorker whose steps a real worker's rows take, too, so that core and workers agree.

The segments of states are computed on histories in place of states: each must continue the row's own tokens.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tokenloom.ipc.messages.workers import ModelRunnerOutput, SchedulerOutput
from tokenloom.tests.core.fake_cache import STATE
from tokenloom.tests.core.fake_worker import VOCAB_SIZE, FakeWorker
from tokenloom.workers.machine.arrays import ids_of
from tokenloom.workers.sampling.drafts import StepDrafts
from tokenloom.workers.step.input_batch import InputBatch
from tokenloom.workers.step.step_inputs import StepInputs

MAX_NUM_SEQS, MAX_MODEL_LEN = 16, 256


class ShadowedWorker(FakeWorker):
    """A worker for rows that bring one token, or as many as their drafts allow."""

    def __init__(self, *sizes: Any, **options: Any) -> None:
        super().__init__(*sizes, **options)
        windows = self.cache.windows
        num_blocks = self.cache.shape.all_blocks
        attention = [group for group, window in enumerate(windows) if window != STATE]
        self.num_checked = 0
        self.batch: InputBatch | None = None
        if attention:
            self.batch = InputBatch(
                MAX_NUM_SEQS,
                MAX_MODEL_LEN,
                self.cache.block_size,
                [num_blocks[group] for group in attention],
                vocab_size=VOCAB_SIZE,
                windows=[windows[group] for group in attention],
                num_state_blocks=num_blocks[-1] if self.has_states else 0,
            )
        self.histories: dict[int, list[int]] = {}  # tokens that the state in a block has seen

    def forget_rows(self) -> None:
        super().forget_rows()
        if self.batch is not None:
            self.batch.clear()

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        if self.batch is None:
            return super().execute(output)
        has_drafts = self._take(self.batch, output)
        result = super().execute(output)
        if result.rows:
            rows, token_ids = ids_of(result.rows), ids_of(result.token_ids).astype(np.int64)
            if has_drafts:
                self.batch.append_kept(np.repeat(rows, ids_of(result.counts)), token_ids)
            else:
                self.batch.append_tokens(rows, token_ids)
        return result

    def _take(self, batch: InputBatch, output: SchedulerOutput) -> bool:
        """Apply a step to the rows; return whether it has drafts."""
        batch.free(ids_of(output.freed_rows))
        for new_row in output.new_rows:
            batch.admit(new_row)
        appends, frees = (ids_of(each).reshape(-1, 3) for each in (output.block_appends, output.block_frees))
        batch.append_blocks(appends, frees)
        if output.state_moves:
            batch.move_states(ids_of(output.state_moves).reshape(-1, 4), ids_of(output.rows))
        if not output.rows:
            return False
        layout = batch.layout(output.rows, output.counts)
        drafts = StepDrafts.of(ids_of(output.drafts), layout.rows, VOCAB_SIZE) if output.drafts else None
        inputs = batch.prepare(layout, drafts)
        self._compute_states(inputs, [batch.token_ids(row) for row in layout.rows.tolist()])
        batch.advance(layout, drafts)
        return drafts is not None

    def _compute_states(self, inputs: StepInputs, tokens: list[list[int]]) -> None:
        if inputs.states is None:
            assert not self.has_states
            return
        starts, reads, writes = (each.tolist() for each in inputs.states)
        assert starts[0] == 0 and starts[-1] == len(inputs.token_ids) and len(starts) == len(reads) + 1
        for start, end, read, write in zip(starts[:-1], starts[1:], reads, writes, strict=True):
            row = int(np.searchsorted(inputs.query_starts, start, side="right")) - 1
            first, last = int(inputs.positions[start]), int(inputs.positions[end - 1])
            assert end <= inputs.query_starts[row + 1], "a segment has tokens of two rows"
            history = self.histories[read] if read >= 0 else []
            assert history == tokens[row][:first], "a row reads another state than its own"
            if write >= 0:
                self.histories[write] = tokens[row][: last + 1]
            self.num_checked += 1
