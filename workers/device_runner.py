"""DeviceRunner: steps that a GPU runs to the sampled tokens by itself, so that the next can follow without a wait.

    arrays of what changed → one copy → rows → graph of the padded size, or kernel by kernel → tokens → (side stream)

Decode steps run as graphs; steps with prompts in them kernel by kernel. Either way a row's sampled token is its next
input before the host knows it. Takes what needs no host between two steps: rules, logprobs and masks are the
ModelRunner's.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .cuda_graphs import SIZES_AT_START, DecodeGraphs, Model, Recorder
from .device_rows import DeviceRows
from .input_batch import StepInputs
from .model_runner import step_metadata
from .sampling_columns import SamplingColumns
from .staging import Staging
from .token_return import TokenReturn, TokensInFlight


class DeviceRunner:
    """Owns the rows on the device and what copies to it and back. Nothing in `start` waits for the device."""

    def __init__(
        self,
        model: Model,
        kv_cache: Tensor,
        max_num_seqs: int,
        max_model_len: int,
        recorder: Recorder | None,
        sizes_at_start: tuple[int, ...] = SIZES_AT_START,
    ) -> None:
        """`recorder`: who makes graphs of decode steps; None: they run kernel by kernel as well."""
        self._model = model
        self._kv_cache = kv_cache
        device, block_size = kv_cache.device, kv_cache.shape[4]
        self._rows = DeviceRows(max_num_seqs, -(-max_model_len // block_size), block_size, device)
        self._staging = Staging(device)
        self._return = TokenReturn(max_num_seqs, device)
        self._graphs: DecodeGraphs | None = None
        if recorder is not None:
            self._graphs = DecodeGraphs(
                model, kv_cache, self._rows, max_num_seqs, max_model_len, recorder, sizes_at_start
            )

    def forget(self, rows: npt.NDArray[np.int32]) -> None:
        """These rows were freed."""
        self._rows.forget(rows)

    def clear(self) -> None:
        """All rows were freed."""
        self._rows.clear()

    @torch.inference_mode()
    def start(self, inputs: StepInputs, columns: SamplingColumns) -> TokensInFlight:
        """Launch a step; columns: of inputs.sampled_rows, whose tokens come back."""
        return self._return.send(self.launch(inputs, columns))

    def launch(self, inputs: StepInputs, columns: SamplingColumns) -> Tensor:
        """`start`, but the tokens [s] int64 stay on the device, where the next step may overwrite them."""
        sampled = inputs.sampled_tokens
        changes = self._rows.changes(inputs.sampled_rows, inputs.positions[sampled], inputs.token_ids[sampled], columns)
        is_decode = inputs.num_decode_rows == len(inputs.rows) == len(sampled)
        if is_decode and self._graphs is not None:
            return self._decode(self._graphs, inputs, changes)
        return self._compute(inputs, changes)

    def _decode(self, graphs: DecodeGraphs, inputs: StepInputs, changes: list[npt.NDArray[np.generic]]) -> Tensor:
        num_rows = len(inputs.rows)
        row_ids = np.full(graphs.size_for(num_rows), -1, np.int64)
        row_ids[:num_rows] = inputs.rows
        ids, cells, block_ids, *changed = self._staging.send([row_ids, *self._rows.new_blocks(inputs), *changes])
        self._rows.write(changed)
        self._rows.write_blocks(cells, block_ids)
        return graphs.run(ids)[:num_rows]

    def _compute(self, inputs: StepInputs, changes: list[npt.NDArray[np.generic]]) -> Tensor:
        """The same kernel by kernel, for rows with any number of tokens."""
        arrays = (inputs.positions, inputs.slots, inputs.query_starts, inputs.seq_lens, inputs.block_tables)
        rows, positions = inputs.sampled_rows.astype(np.int64), inputs.sampled_positions.astype(np.int32)
        sampled = (inputs.sampled_tokens, rows, positions)
        token_ids, *rest = self._staging.send([inputs.token_ids, *arrays, *sampled, *changes])
        self._rows.write(rest[8:])
        metadata = step_metadata(inputs, *rest[:5])
        hidden = self._model.forward_mixed(token_ids, self._rows.columns, metadata, self._kv_cache)
        index, row_ids, next_positions = rest[5:8]
        if not len(row_ids):
            return row_ids
        self._rows.columns.num_computed[row_ids] = next_positions
        return self._rows.sample(self._model.compute_logits(hidden[index]), row_ids, next_positions)
