"""DeviceRunner: runs steps through sampling on the GPU, so that the next step follows without a wait.

    changes of rows → one copy → DeviceBatch → CUDA graph of the padded size, or kernel by kernel → tokens → host

Decode steps run as graphs, steps with prompt chunks kernel by kernel. A sampled token is its row's next input before
the host knows it. For decode steps that the host samples, a graph computes the logits; masks, processors and logprobs
are left to the ModelRunner. All ranks run the same steps, so their collectives match.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..machine.arrays import I64
from ..machine.parallel import ParallelGroup
from ..machine.staging import Staging
from ..sampling.sampling_columns import SamplingColumns
from ..step.model_step import Model, StepContext, cache_groups, cross_of, decoder_of, media_of, step_arrays
from ..step.step_inputs import StepInputs
from .cuda_graphs import SIZES_AT_START, DecodeGraphs, Recorder
from .device_batch import DeviceBatch
from .token_copy import AsyncTokenCopy, PendingTokens


class DeviceRunner:
    """Runner of steps that are sampled on the device. Owns the `rows` on the device and the copies in both directions.
    `start` does not wait for the previous step."""

    def __init__(
        self,
        model: Model,
        kv_caches: Sequence[Tensor],
        max_num_seqs: int,
        max_model_len: int,
        group: ParallelGroup,
        recorder: Recorder | None,
        sizes_at_start: tuple[int, ...] = SIZES_AT_START,
        has_adapters: bool = False,
        shifts: I64 | None = None,
    ) -> None:
        """kv_caches: of each KV group. `recorder` makes graphs of decode steps; None: decode steps run kernel by kernel
        as well. `has_adapters`: whether rows may have adapters. `shifts`: see DeviceBatch."""
        self._model = model
        self._kv_caches = kv_caches
        device, block_size = kv_caches[0].device, kv_caches[0].shape[4]
        max_blocks_per_row = -(-max_model_len // block_size)
        self.rows = DeviceBatch(
            max_num_seqs, max_blocks_per_row, block_size, device, group, has_adapters, shifts, len(kv_caches)
        )
        self._staging = Staging(device)
        self._return = AsyncTokenCopy(max_num_seqs, device)
        self._graphs: DecodeGraphs | None = None
        if recorder is not None:
            self._graphs = DecodeGraphs(
                model, kv_caches, self.rows, max_num_seqs, max_model_len, recorder, sizes_at_start
            )

    def start(self, inputs: StepInputs, columns: SamplingColumns) -> PendingTokens:
        """Launch a step and the copy of its tokens to the host, and return the pending tokens. Call it in inference
        mode. columns: sampling parameters, one row per sampled row."""
        return self._return.send(self.launch(inputs, columns))

    def launch(self, inputs: StepInputs, columns: SamplingColumns) -> Tensor:
        """Launch a step; return the sampled tokens [s] int64 on the device, where the next step may overwrite them."""
        graphs = self._graphs_for(inputs)
        if graphs is None:
            return self._compute(inputs, columns)
        return graphs.run(inputs.rows, self._send_changes(graphs, inputs, columns), inputs.token_slots is not None)

    def decode_logits(self, inputs: StepInputs, columns: SamplingColumns) -> Tensor | None:
        """Compute by graph the logits of a decode step that the host samples: [n, vocab] float32 on rank 0, [0, vocab]
        on the others. The caller may overwrite them; the next such step does.

        None if there are no graphs, or the step is not one in which every row decodes one token behind its media and
        samples.
        """
        graphs = self._graphs_for(inputs)
        if graphs is None:
            return None
        row_ids = self._send_changes(graphs, inputs, columns)
        logits = graphs.run_to_logits(inputs.rows, row_ids, inputs.token_slots is not None)
        self.rows.forget_tokens(inputs.rows)
        return logits

    def _graphs_for(self, inputs: StepInputs) -> DecodeGraphs | None:
        is_decode = inputs.num_decode_rows == len(inputs.rows) == len(inputs.sampled_rows)
        has_spans = inputs.media is not None and not inputs.media.is_behind_spans
        return self._graphs if is_decode and not has_spans else None

    def _send_changes(self, graphs: DecodeGraphs, inputs: StepInputs, columns: SamplingColumns) -> Tensor | None:
        """Send the changes of rows to the device; return the row ids on the device if the graph needs new ones, else
        None. A step with the same rows as the previous one usually sends nothing."""
        row_ids = graphs.unknown_row_ids(inputs.rows)
        changes = self.rows.changes(inputs, columns, is_counted_there=True)
        arrays = changes if row_ids is None else [row_ids, *changes]
        sent = self._staging.send(arrays) if arrays else []
        if changes:
            self.rows.write(sent[-len(changes) :])
        return None if row_ids is None else sent[0]

    def _compute(self, inputs: StepInputs, columns: SamplingColumns) -> Tensor:
        """Launch, kernel by kernel, a step of rows with any number of tokens; return the sampled tokens [s]."""
        changes = self.rows.changes(inputs, columns, is_counted_there=False)
        inputs = decoder_of(inputs)
        arrays = step_arrays(inputs)
        slots = [] if inputs.token_slots is None else [inputs.token_slots]
        token_ids, *rest = self._staging.send([inputs.token_ids, *arrays, inputs.sampled_tokens, *changes, *slots])
        of_step, (index, *changed) = rest[: len(arrays)], rest[len(arrays) : len(arrays) + 1 + len(changes)]
        self.rows.write(changed)
        token_slots = rest[-1] if slots else None
        media, cross = media_of(inputs), cross_of(inputs)
        groups = cache_groups(inputs, self._kv_caches, of_step)
        context = StepContext(groups, token_slots=token_slots, media=media, cross=cross)
        hidden = self._model.forward_mixed(token_ids, self.rows.columns, context)
        row_ids, next_positions = changed[:2]
        if not len(row_ids):
            return row_ids
        return self.rows.sample(self._model.compute_logits(hidden, index), row_ids, next_positions)
