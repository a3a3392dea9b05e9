"""DeviceBatch: the state of the running rows on a GPU, kept up to date by differences.

The host records which state the device has of each row, and sends only changes: new rows, rows that the host sampled,
appended blocks. Tokens sampled on the device become the rows' last tokens without leaving it.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ...kernels.contract import BatchColumns
from ...kernels.gpu.rows import write_rows
from ...kernels.gpu.sampling.sampling import sample
from ..machine.arrays import I32, I64
from ..machine.parallel import ParallelGroup
from ..sampling.sampling_columns import SamplingColumns
from ..step.step_inputs import StepInputs

_NO_CELLS, _NO_BLOCKS = np.empty(0, np.int64), np.empty(0, np.int32)
_UNKNOWN = -1  # stands for the number of computed tokens of a row that is not on the device


class DeviceBatch:
    """Owner of the device's entry for each row: position, last token, blocks, adapter and position shift (`columns`;
    for steps without adapters `plain_columns`), and the sampling parameters."""

    def __init__(
        self,
        max_num_seqs: int,
        max_blocks_per_row: int,
        block_size: int,
        device: torch.device,
        group: ParallelGroup,
        has_adapters: bool = False,
        shifts: I64 | None = None,
        num_groups: int = 1,
    ) -> None:
        """`shifts`: for each row, the position minus the index of the tokens after its media. The caller changes an
        entry only while the row is not in use. None: all are 0. `num_groups`: of KV groups."""
        self._shifts = shifts
        self._block_size = block_size
        self._group = group
        self.has_adapters = has_adapters

        def zeros(dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.zeros((max_num_seqs, *shape), dtype=dtype, device=device)

        tables = torch.zeros((num_groups, max_num_seqs, max_blocks_per_row), dtype=torch.int32, device=device)
        self.columns = BatchColumns(zeros(torch.int64), zeros(torch.int32), tables)
        if shifts is not None:
            self.columns = replace(self.columns, rope_deltas=zeros(torch.int32))
        self.plain_columns = self.columns
        if has_adapters:
            slots = torch.zeros(max_num_seqs + 1, dtype=torch.int32, device=device)
            self.columns = replace(self.columns, adapter_slots=slots)
        self._drawing = [torch.from_numpy(array).to(device) for array in SamplingColumns.greedy(max_num_seqs).arrays]
        self._known_computed: I64 = np.full(max_num_seqs, _UNKNOWN, np.int64)
        self._known_blocks: I64 = np.zeros(max_num_seqs, np.int64)  # of each group
        self._known_freed: I64 = np.zeros((num_groups, max_num_seqs), np.int64)

    def forget(self, rows: I32) -> None:
        """Record that the device has no state of these rows: `changes` will send everything of the next requests in
        them."""
        self._known_computed[rows] = _UNKNOWN
        self._known_blocks[rows] = 0
        self._known_freed[:, rows] = 0

    def clear(self) -> None:
        """Record that all rows were freed."""
        self._known_computed[:] = _UNKNOWN
        self._known_blocks[:] = 0
        self._known_freed[:] = 0

    def changes(
        self, inputs: StepInputs, columns: SamplingColumns, is_counted_there: bool
    ) -> list[npt.NDArray[np.generic]]:
        """Return the arrays that `write` needs before the step, [] for none, and record them as sent. columns: sampling
        parameters, one row per sampled row.

        A row whose last token the host does not know was sampled by the device in the previous step, so it is
        unchanged. The first two arrays are rows and their numbers of computed tokens. If the step counts its tokens on
        the device (`is_counted_there`), these are the changed rows, with their numbers before the step; else all
        sampled rows, with their numbers after it.
        """
        rows, positions = inputs.sampled_rows, inputs.positions[inputs.sampled_tokens]
        changed = np.flatnonzero(self._known_computed[rows] != positions)
        self._known_computed[rows] = inputs.sampled_positions
        blocks = self._new_blocks(inputs)
        if is_counted_there and not len(changed) and not len(blocks[0]):
            return []
        changed_rows = rows[changed].astype(np.int64)
        return [
            changed_rows if is_counted_there else rows.astype(np.int64),
            (positions[changed] if is_counted_there else inputs.sampled_positions).astype(np.int32),
            changed_rows,
            inputs.token_ids[inputs.sampled_tokens[changed]].astype(np.int64),
            *columns.take(changed).arrays,
            *blocks,
            *self._slots_of(inputs, changed),
            *([] if self._shifts is None else [self._shifts[changed_rows].astype(np.int32)]),
        ]

    def _slots_of(self, inputs: StepInputs, changed: I64) -> list[I32]:
        """Return, in a list, the adapter slots of the sampled rows with the indices `changed`; [] without adapters."""
        if not self.has_adapters:
            return []
        if inputs.token_slots is None:
            return [np.zeros(len(changed), np.int32)]
        return [inputs.token_slots[inputs.sampled_tokens[changed]]]

    def forget_tokens(self, rows: I32) -> None:
        """Record that the device lacks the tokens that the host samples for these rows: `changes` will send them."""
        self._known_computed[rows] = _UNKNOWN

    def write(self, changes: list[Tensor]) -> None:
        """Write the arrays of `changes`, which the caller has copied to the device, to the columns."""
        columns = self.columns
        targets = (columns.num_computed, columns.last_tokens, *self._drawing, columns.block_tables)
        write_rows(changes, targets, columns.adapter_slots, columns.rope_deltas)

    def _new_blocks(self, inputs: StepInputs) -> list[npt.NDArray[np.generic]]:
        """Return the cells of the flattened block tables that the device lacks for this step, and their block ids.
        Record them as sent."""
        rows = inputs.rows.astype(np.int64)
        known, needed = self._known_blocks[rows], -(-inputs.seq_lens // self._block_size)
        spans = [] if (needed == known).all() else [(group, known, needed) for group in range(len(inputs.groups))]
        for group, each in enumerate(inputs.groups):
            if each.num_freed is not None:
                freed = self._known_freed[group, rows]
                if (each.num_freed != freed).any():
                    spans.append((group, freed, np.minimum(each.num_freed, known)))  # later blocks are sent anyway
                    self._known_freed[group, rows] = each.num_freed
        if not spans:
            return [_NO_CELLS, _NO_BLOCKS]
        self._known_blocks[rows] = needed
        cells, block_ids = [], []
        for group, starts, ends in spans:
            counts = np.maximum(ends - starts, 0)
            entries = np.repeat(np.arange(len(rows)), counts)
            columns = np.arange(len(entries)) + np.repeat(starts - np.cumsum(counts) + counts, counts)
            _, num_rows, width = self.columns.block_tables.shape
            cells.append((group * num_rows + rows[entries]) * width + columns)
            block_ids.append(inputs.groups[group].block_tables[entries, columns])
        return [np.concatenate(cells), np.concatenate(block_ids)]

    def sample(self, logits: Tensor, row_ids: Tensor, positions: Tensor, output: Tensor | None = None) -> Tensor:
        """Sample a token for each of the rows row_ids [n], −1 = padding, at `positions` [n] int32; it becomes the row's
        last token.

        Returns [n] int64, in `output` if given. All ranks must call; only rank 0's logits [n, vocab] are used.
        """
        last_tokens = self.columns.last_tokens
        if self._group.rank > 0:
            return torch.take(self._group.broadcast(last_tokens), row_ids, out=output)
        drawn = sample(logits.contiguous(), row_ids, self._drawing, positions, last_tokens, output)
        self._group.broadcast(last_tokens)  # one call for all rows; rows that were not sampled are equal already
        return drawn
