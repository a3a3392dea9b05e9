"""One step of the model: StepInputs → tensors and metadata on the device → hidden states and logits."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..kernels.contract import AttentionMetadata
from .input_batch import StepInputs


class Model(Protocol):
    """What a runner needs of a model; see DecoderModel for shapes."""

    num_layers: int
    num_kv_heads_local: int
    head_dim: int
    weight_bytes: int

    def forward_logits(
        self, token_ids: Tensor, chosen: Tensor, metadata: AttentionMetadata, kv_cache: Tensor
    ) -> tuple[Tensor, Tensor]: ...

    def compute_logits(self, hidden: Tensor) -> Tensor: ...


def compute(model: Model, inputs: StepInputs, kv_cache: Tensor) -> tuple[Tensor, Tensor]:
    """Hidden states [T, hidden_size] of the step's tokens and, on rank 0, logits [s, vocab] of those that sample."""
    device = kv_cache.device
    token_ids, chosen = _on(device, inputs.token_ids), _on(device, inputs.sampled_tokens)
    return model.forward_logits(token_ids, chosen, metadata_of(inputs, device), kv_cache)


def _on(device: torch.device, array: npt.NDArray[np.generic]) -> Tensor:
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.to(device)


def metadata_of(inputs: StepInputs, device: torch.device) -> AttentionMetadata:
    """The step's metadata on `device`; on the CPU the tensors share the arrays' memory."""
    arrays = (inputs.positions, inputs.slots, inputs.query_starts, inputs.seq_lens, inputs.block_tables)
    return step_metadata(inputs, *(_on(device, array) for array in arrays))


def step_metadata(
    inputs: StepInputs, positions: Tensor, slots: Tensor, query_starts: Tensor, seq_lens: Tensor, block_tables: Tensor
) -> AttentionMetadata:
    """The step's metadata; the tensors hold the arrays of these names in `inputs`."""
    seq_lens_host: list[int] = inputs.seq_lens.tolist()
    query_starts_host: list[int] = inputs.query_starts.tolist()
    return AttentionMetadata(
        positions=positions,
        slots=slots,
        query_starts=query_starts,
        seq_lens=seq_lens,
        block_tables=block_tables,
        num_decode_rows=inputs.num_decode_rows,
        query_starts_host=query_starts_host,
        seq_lens_host=seq_lens_host,
    )
