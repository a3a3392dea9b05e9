"""DeviceRows: what a GPU remembers of the running rows, and the one copy per step that keeps it up to date.

The host knows each row's last state on the device and sends differences only: rows that came or ran elsewhere, blocks
that were appended. Tokens that a step samples become the rows' last tokens without leaving the device.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .input_batch import StepInputs
from .sampling_columns import SamplingColumns

I64 = npt.NDArray[np.int64]

_UNKNOWN = -1  # tokens computed of a row that the device does not know


class DeviceRows:
    """Columns by row. The last entry of each belongs to no row: what padding (row −1) writes lands there."""

    def __init__(self, max_num_seqs: int, max_blocks_per_row: int, block_size: int, device: torch.device) -> None:
        self._block_size = block_size
        num_entries = max_num_seqs + 1
        self.last_tokens = torch.zeros(num_entries, dtype=torch.int64, device=device)
        self.num_computed = torch.zeros(num_entries, dtype=torch.int64, device=device)
        self.block_tables = torch.zeros((num_entries, max_blocks_per_row), dtype=torch.int32, device=device)
        self.temperatures = torch.zeros(num_entries, dtype=torch.float32, device=device)
        self.top_ks = torch.zeros(num_entries, dtype=torch.int32, device=device)
        self.top_ps = torch.ones(num_entries, dtype=torch.float64, device=device)
        self.min_ps = torch.zeros(num_entries, dtype=torch.float64, device=device)
        self.seeds = torch.zeros((num_entries, 2), dtype=torch.int32, device=device)
        self._known_computed: I64 = np.full(num_entries, _UNKNOWN, np.int64)
        self._known_blocks: I64 = np.zeros(num_entries, np.int64)

    def forget(self, rows: npt.NDArray[np.int32]) -> None:
        """These rows were freed: whoever gets them next is somebody else."""
        self._known_computed[rows] = _UNKNOWN
        self._known_blocks[rows] = 0

    def clear(self) -> None:
        self._known_computed[:] = _UNKNOWN
        self._known_blocks[:] = 0

    def update(self, inputs: StepInputs, columns: SamplingColumns, row_ids: Tensor) -> None:
        """Bring the rows of a decode step up to date and write them, padded with −1, to `row_ids`, in one copy."""
        rows = inputs.rows.astype(np.int64)
        padded = np.full(row_ids.shape[0], -1, np.int64)
        padded[: len(rows)] = rows
        changed = np.flatnonzero(self._known_computed[rows] != inputs.positions)
        cells, block_ids = self._new_blocks(rows, inputs)
        parts = [padded, *_row_parts(rows, changed, inputs, columns), cells, block_ids]
        on_device = self._copy(np.concatenate(parts))
        pieces = torch.split(on_device, [len(part) for part in parts])
        row_ids.copy_(pieces[0])
        if len(changed):
            self._write_rows(pieces[1:-2])
        if len(cells):
            self.block_tables.view(-1)[pieces[-2]] = pieces[-1].to(torch.int32)
        self._known_computed[rows] = inputs.positions + 1

    def _new_blocks(self, rows: I64, inputs: StepInputs) -> tuple[I64, I64]:
        """Cells of the flattened block tables that the device lacks for this step, and what belongs there."""
        known = self._known_blocks[rows]
        needed = -(-inputs.seq_lens.astype(np.int64) // self._block_size)
        counts = np.maximum(needed - known, 0)
        entries = np.repeat(np.arange(len(rows)), counts)
        ordinals = np.arange(len(entries)) - np.repeat(np.cumsum(counts) - counts, counts)
        table_columns = known[entries] + ordinals
        self._known_blocks[rows] = np.maximum(needed, known)
        cells = rows[entries] * self.block_tables.shape[1] + table_columns
        return cells, inputs.block_tables[entries, table_columns].astype(np.int64)

    def _copy(self, words: I64) -> Tensor:
        host = torch.from_numpy(words)
        if self.last_tokens.device.type == "cpu":
            return host
        # The allocator of pinned memory gives a block out again only once the stream is past the copy.
        return host.pin_memory().to(self.last_tokens.device, non_blocking=True)

    def _write_rows(self, pieces: tuple[Tensor, ...]) -> None:
        rows, computed, tokens, top_ks, seed_low, seed_high, temperatures, top_ps, min_ps = pieces
        self.num_computed[rows] = computed
        self.last_tokens[rows] = tokens
        self.top_ks[rows] = top_ks.to(torch.int32)
        self.seeds[rows] = torch.stack((seed_low, seed_high), dim=1).to(torch.int32)
        self.temperatures[rows] = temperatures.view(torch.float64).to(torch.float32)
        self.top_ps[rows] = top_ps.view(torch.float64)
        self.min_ps[rows] = min_ps.view(torch.float64)


def _row_parts(rows: I64, changed: npt.NDArray[np.intp], inputs: StepInputs, columns: SamplingColumns) -> list[I64]:
    """The changed rows, column after column, each as 64-bit words."""
    taken = columns.take(changed)
    seeds = taken.seeds.view(np.int32).astype(np.int64)
    return [
        rows[changed],
        inputs.positions[changed],
        inputs.token_ids[changed].astype(np.int64),
        taken.top_k.astype(np.int64),
        seeds[:, 0],
        seeds[:, 1],
        taken.temperature.astype(np.float64).view(np.int64),
        taken.top_p.view(np.int64),
        taken.min_p.view(np.int64),
    ]
