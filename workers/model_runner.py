"""The ModelRunner: one step from SchedulerOutput to sampled tokens.

    apply changes → prepare inputs → forward → hidden states of last tokens → logits → Sampler → row state

Knows the model as a Protocol and the rows as InputBatch; knows no socket, no step number and no epoch. Every rank of a
group runs the same steps: rank 0 samples and broadcasts the ids, so that row state is equal on all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..ipc.errors import ProtocolError
from ..ipc.messages import SchedulerOutput
from ..kernels.ops import AttentionMetadata
from .input_batch import InputBatch, StepInputs, ids_of
from .parallel import ParallelGroup
from .sampler import Sampler


class Model(Protocol):
    """What a runner needs of a model; see DecoderModel for shapes."""

    num_layers: int
    num_kv_heads_local: int
    head_dim: int
    weight_bytes: int

    def forward(self, token_ids: Tensor, metadata: AttentionMetadata, kv_cache: Tensor) -> Tensor: ...

    def compute_logits(self, hidden: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class SampledTokens:
    """What a step sampled; rows in the order of its message."""

    rows: npt.NDArray[np.int32]  # [s]
    token_ids: npt.NDArray[np.int64]  # [s]


class ModelRunner:
    """Owns the rows and runs the model over its KV cache. `stage` says what it does, for the report of an error."""

    def __init__(self, model: Model, batch: InputBatch, kv_cache: Tensor, group: ParallelGroup) -> None:
        self._model = model
        self._batch = batch
        self._kv_cache = kv_cache
        self._group = group
        self._sampler = Sampler(kv_cache.device)
        self.stage = "idle"

    @torch.inference_mode()
    def execute_model(self, output: SchedulerOutput) -> SampledTokens:
        """Run one step; one without rows only applies its changes. ProtocolError if the rows do not allow it."""
        self.stage = "update rows"
        self._apply_changes(output)
        rows, counts = ids_of(output.rows), ids_of(output.counts)
        if len(rows) == 0:
            return SampledTokens(np.empty(0, np.int32), np.empty(0, np.int64))
        self.stage = "prepare inputs"
        inputs = self._batch.prepare(rows, counts)
        self.stage = "forward"
        device = self._kv_cache.device
        token_ids = torch.from_numpy(inputs.token_ids).to(device)
        hidden = self._model.forward(token_ids, metadata_of(inputs, device), self._kv_cache)
        self._batch.advance(rows, counts)
        self.stage = "sample"
        sampled = self._sample(hidden, inputs)
        self._batch.append_tokens(inputs.sampled_rows, sampled)
        self.stage = "idle"
        return SampledTokens(inputs.sampled_rows, sampled)

    def clear(self) -> None:
        """Forget all rows."""
        self._batch.clear()

    def _apply_changes(self, output: SchedulerOutput) -> None:
        self._batch.free(ids_of(output.freed_rows))
        for new_row in output.new_rows:
            self._batch.admit(new_row)
        appends = ids_of(output.block_appends)
        if len(appends) % 3:
            raise ProtocolError(f"block_appends holds {len(appends)} numbers, which make no triples")
        self._batch.append_blocks(appends.reshape(-1, 3))

    def _sample(self, hidden: Tensor, inputs: StepInputs) -> npt.NDArray[np.int64]:
        """The token of each sampled row, on every rank. hidden: [T, hidden_size]."""
        if len(inputs.sampled_rows) == 0:
            return np.empty(0, np.int64)
        logits = self._model.compute_logits(hidden[torch.from_numpy(inputs.sampled_tokens).to(hidden.device)])
        if self._group.rank == 0:
            columns = self._batch.sampling(inputs.sampled_rows)
            token_ids = self._sampler.sample(logits, columns, inputs.sampled_positions)
        else:
            token_ids = np.empty(len(inputs.sampled_rows), np.int64)
        if self._group.size > 1:
            shared = self._group.broadcast(torch.from_numpy(token_ids).to(hidden.device))
            token_ids = shared.cpu().numpy()
        return token_ids


def metadata_of(inputs: StepInputs, device: torch.device) -> AttentionMetadata:
    """The step's metadata on `device`; on the CPU the tensors share the arrays' memory."""
    seq_lens_host: list[int] = inputs.seq_lens.tolist()
    query_starts_host: list[int] = inputs.query_starts.tolist()
    return AttentionMetadata(
        positions=torch.from_numpy(inputs.positions).to(device),
        slots=torch.from_numpy(inputs.slots).to(device),
        query_starts=torch.from_numpy(inputs.query_starts).to(device),
        seq_lens=torch.from_numpy(inputs.seq_lens).to(device),
        block_tables=torch.from_numpy(inputs.block_tables).to(device),
        num_decode_rows=inputs.num_decode_rows,
        query_starts_host=query_starts_host,
        seq_lens_host=seq_lens_host,
        max_seq_len=max(seq_lens_host),
    )
