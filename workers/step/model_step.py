"""Model, the interface of models, and its forward pass: StepInputs → StepContext → hidden states and logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy.typing as npt
import torch
from torch import Tensor

from ...kernels.contract import (
    AttentionMetadata,
    AuxStates,
    BatchColumns,
    CacheGroup,
    CrossStep,
    StateGroup,
    StateMetadata,
    StateViews,
    StepMedia,
)
from ..machine.arrays import I32, I64
from .kv_cache import KVCacheSpec
from .state_cache import StateSpec
from .step_inputs import StepInputs


@dataclass(frozen=True, eq=False)
class StepContext:
    """Inputs of the layers in one step, besides tokens and weights. A further input becomes a field here."""

    groups: Sequence[CacheGroup]  # by KV group with keys and values; layers write those of the step to its cache
    states: StateGroup | None = None  # of the group that keeps states; None: no layer keeps one in the pool
    rows: I32 | None = None  # [R] row of each request; None: rows whose state is not kept
    token_slots: Tensor | None = None  # [T] int32, slot of each token's adapter; None: all 0
    token_types: Tensor | None = None  # [T] int32; None: all 0
    media: StepMedia | None = None  # None: all embeddings are those of token ids
    cross: CrossStep | None = None  # None: layers leave cross attention out
    aux: AuxStates | None = None  # None: no states of the residual stream are kept
    head_states: Tensor | None = None  # [T, hidden_size] that a draft head reads; None: the model is none

    @property
    def metadata(self) -> AttentionMetadata:
        """The metadata of the first group, which differs from that of others in slots and block tables only."""
        return self.groups[0].metadata

    @property
    def block_size(self) -> int:
        return self.groups[0].kv_cache.shape[4]


class StepModel(Protocol):
    """Interface of a model on one rank, or of a draft head. DecoderModel documents the shapes."""

    weight_bytes: int

    def kv_cache_specs(self, block_size: int, dtype: torch.dtype) -> Sequence[KVCacheSpec]:
        """Return the spec of each KV group with keys and values: of layers that share block tables."""
        ...

    def forward_logits(
        self, token_ids: Tensor, logits_indices: Tensor, context: StepContext
    ) -> tuple[Tensor, Tensor]: ...


class Model(StepModel, Protocol):
    """Interface of a model on one rank that runs whole steps of an engine."""

    state_spec: StateSpec | None  # of the group of layers that keep a state in the KV cache; None: there are none

    @property
    def state_bytes(self) -> int:
        """Bytes that a row takes in addition to its KV blocks."""
        ...

    def forward_mixed(self, token_ids: Tensor, rows: BatchColumns, context: StepContext) -> Tensor: ...

    def forward_decode(self, row_ids: Tensor, rows: BatchColumns, context: StepContext) -> Tensor: ...

    def compute_logits(self, hidden: Tensor, indices: Tensor | None = None) -> Tensor: ...


def compute(
    model: StepModel,
    inputs: StepInputs,
    kv_caches: Sequence[Tensor],
    states: StateViews | None = None,
    *,
    keeps_state: bool = True,
) -> tuple[Tensor, Tensor]:
    """Run the model on a step. Return the hidden states [T, hidden_size] of its tokens, and logits of the rows that
    sample: [s, vocab] on rank 0, [0, vocab] on the others. kv_caches: of each KV group with keys and values; states: of
    layers that keep one. keeps_state: whether the rows continue in a later step. Tokens of clips have no hidden
    states."""
    inputs = decoder_of(inputs)
    arrays = (inputs.token_ids, inputs.sampled_tokens, *step_arrays(inputs))
    tensors = [torch.from_numpy(array) for array in arrays]
    device = kv_caches[0].device
    if device.type != "cpu":
        tensors = [tensor.to(device) for tensor in tensors]
    token_slots = on_device(inputs.token_slots, device)
    token_types = on_device(inputs.token_types, device)
    token_ids, logits_indices, *rest = tensors
    rows = inputs.rows if keeps_state else None
    media, cross = media_of(inputs), cross_of(inputs)
    context = StepContext(
        cache_groups(inputs, kv_caches, rest),
        states=state_group(inputs, states, rest),
        rows=rows,
        token_slots=token_slots,
        token_types=token_types,
        media=media,
        cross=cross,
        aux=inputs.aux,
        head_states=inputs.head_states,
    )
    return model.forward_logits(token_ids, logits_indices, context)


def on_device(array: I32 | None, device: torch.device) -> Tensor | None:
    return None if array is None else torch.from_numpy(array).to(device)


def decoder_of(inputs: StepInputs) -> StepInputs:
    """Return the part of a step that passes through the model's layers."""
    return inputs if inputs.decoder is None else inputs.decoder


def positions_of(inputs: StepInputs) -> I64:
    """Return the positions [T] of the step's metadata."""
    if inputs.media is None or inputs.media.positions is None:
        return inputs.positions
    return inputs.media.positions


def media_of(inputs: StepInputs) -> StepMedia | None:
    return None if inputs.media is None else inputs.media.media


def cross_of(inputs: StepInputs) -> CrossStep | None:
    return None if inputs.media is None else inputs.media.cross


def step_arrays(inputs: StepInputs) -> list[npt.NDArray[Any]]:
    """Return the arrays whose copies on the device `cache_groups` and `state_group` take."""
    arrays: list[npt.NDArray[Any]] = [positions_of(inputs), inputs.query_starts, inputs.seq_lens]
    for group in inputs.groups:
        arrays += (group.slots, group.block_tables)
    return arrays if inputs.states is None else [*arrays, *inputs.states]


def state_group(inputs: StepInputs, states: StateViews | None, arrays: Sequence[Tensor]) -> StateGroup | None:
    """Return the states with the step's metadata. arrays: copies, on the device, of `step_arrays`."""
    if states is None or inputs.states is None:
        return None
    return StateGroup(states, StateMetadata(*arrays[-len(inputs.states) :]))


def cache_groups(inputs: StepInputs, kv_caches: Sequence[Tensor], arrays: Sequence[Tensor]) -> list[CacheGroup]:
    """Return the caches with the step's metadata. arrays: copies, on the device, of `step_arrays`."""
    positions, query_starts, seq_lens, *of_groups = arrays
    media = inputs.media
    seq_lens_host: list[int] = inputs.seq_lens.tolist()
    query_starts_host: list[int] = inputs.query_starts.tolist()
    see_until = on_device(inputs.groups[0].see_until, positions.device)
    is_encoder = see_until is not None
    if media is not None:
        see_until = media.see_until
    first = AttentionMetadata(
        positions=positions,
        slots=of_groups[0],
        query_starts=query_starts,
        seq_lens=seq_lens,
        block_tables=of_groups[1],
        num_decode_rows=inputs.num_decode_rows,
        query_starts_host=query_starts_host,
        seq_lens_host=seq_lens_host,
        cos_sin=None if media is None else media.cos_sin,
        see_until=see_until,
        are_windows_two_sided=is_encoder,
        has_drafts=None if inputs.has_drafts is None else torch.from_numpy(inputs.has_drafts),
    )
    groups = [CacheGroup(kv_caches[0], first)]
    for index in range(1, len(kv_caches)):
        slots, block_tables = of_groups[2 * index : 2 * index + 2]
        groups.append(CacheGroup(kv_caches[index], replace(first, slots=slots, block_tables=block_tables)))
    return groups
