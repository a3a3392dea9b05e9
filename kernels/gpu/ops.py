"""TritonOps: the operations of `reference.py` on CUDA, in Triton.

Unquantized products of several rows, except those of experts, use torch (cuBLAS), as does every operation that is not
overridden or has an unsupported shape. The host reads nothing back: kernels compute everything that depends on lengths,
so a CUDA graph can capture a decode step if attention has kernels for the model's heads (`supports`).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..contract import (
    GATED_SILU,
    NO_ACTIVATION,
    Activation,
    AttentionMetadata,
    AttentionSpec,
    BatchColumns,
    ConvActivation,
    GateOrder,
    HeadNorms,
    Norm,
    PackedExperts,
    PackedLinear,
    Rotary,
    Routing,
    StateMetadata,
)
from ..quantized import QuantizedWeight, Weight
from ..reference import PlainLinear, ReferenceOps
from .activation import activate
from .adapter_space import TritonAdapterSpace
from .attention.decode import MAX_PROGRAMS, decode_attention, plan_decode
from .attention.heads import can_fuse_heads, qk_norm_rope_cache
from .attention.prefill import plan_prefill, prefill_attention
from .launch import next_power_of_2
from .linear.gemv import gemv
from .linear.matmul import Matrices, QuantizedLinear, matmul
from .linear.moe import TritonExperts, fused_moe
from .norm import MAX_WIDTH, normalize
from .states import MAX_GROUP_SIZE, MAX_TAPS, can_scan, causal_conv, gated_norm, state_scan
from .step import begin_decode, embed_tokens
from .table import AttentionKind, DecodeShape, PrefillShape, decode_shape, group_rows, prefill_shape

logger = logging.getLogger("tokenloom.kernels")

MIN_HEAD_DIM = 16  # the smallest dimension that tl.dot supports
MAX_GROUP = 128  # query heads per KV head
MAX_GROUP_ELEMENTS = 8192  # query heads per KV head × head_dim, both padded: a program accumulates them in registers


@dataclass
class AttentionPlans:
    """Attention plans of one step, shared by layers of the same shape."""

    items: dict[tuple[int | None, DecodeShape], Tensor] = field(default_factory=dict)  # of decode, by window and shape
    tiles: dict[int, Tensor] = field(default_factory=dict)  # of prefill, by the number of tokens in a tile


class TritonOps(ReferenceOps):
    """The operations in Triton.

    `architecture`: compute capability, 90 for Hopper.
    """

    is_batch_invariant = False  # whether results do not depend on the rest of the batch

    def __init__(self, architecture: int, max_programs: int = MAX_PROGRAMS) -> None:
        """max_programs: the largest number of programs of decode attention, over all items and KV heads."""
        super().__init__()
        self._architecture, self._max_programs = architecture, max_programs
        self.kernels = f"Triton kernels, sm_{architecture}"
        self._has_warned = False
        self._adapters: TritonAdapterSpace | None = None

    def adapter_space(self, num_slots: int, max_rank: int) -> TritonAdapterSpace:
        self._adapters = TritonAdapterSpace(num_slots, max_rank)
        return self._adapters

    def embedding(self, token_ids: Tensor, table: Tensor | PackedLinear, first_id: int) -> Tensor:
        output = embed_tokens(token_ids, None, table, first_id)
        if self._adapters is not None:
            self._adapters.update_embedding(output, table, first_id, token_ids)
        return output

    def begin_step(self, token_ids: Tensor, rows: BatchColumns, table: Tensor | PackedLinear, first_id: int) -> Tensor:
        output = embed_tokens(token_ids, rows.last_tokens, table, first_id)
        if self._adapters is not None:
            self._adapters.update_embedding(output, table, first_id, token_ids, rows.last_tokens)
        return output

    def begin_decode(
        self,
        row_ids: Tensor,
        rows: BatchColumns,
        groups: Sequence[AttentionMetadata],
        block_size: int,
        table: Tensor | PackedLinear,
        first_id: int,
    ) -> Tensor:
        output = begin_decode(row_ids, rows, groups, block_size, table, first_id)
        if self._adapters is not None:
            self._adapters.begin_step(None if rows.adapter_slots is None else rows.adapter_slots[row_ids])
            self._adapters.update_embedding(output, table, first_id, row_ids, rows.last_tokens, is_decode=True)
        return output

    def pack_linear(self, weight: Weight, bias: Tensor | None, activation: Activation = NO_ACTIVATION) -> PackedLinear:
        if not isinstance(weight, QuantizedWeight):
            return super().pack_linear(weight, bias, activation)
        return QuantizedLinear(Matrices.pack([weight]), bias, activation)

    def linear(self, x: Tensor, packed: PackedLinear) -> Tensor:
        adapted = self._adapted(x, packed, x.dtype)
        if adapted is not None:
            return adapted
        if isinstance(packed, PlainLinear) and x.shape[0] == 1:
            return gemv(_with_dense_rows(x), packed.weight, packed.bias, x.dtype, packed.activation)
        if not isinstance(packed, QuantizedLinear):
            return super().linear(x, packed)
        outputs = matmul(_with_dense_rows(x), packed.matrices, packed.bias, x.dtype)
        return self.activate(outputs, packed.activation)

    def logits(self, x: Tensor, packed: PackedLinear) -> Tensor:
        adapted = self._adapted(x, packed, torch.float32)
        if adapted is not None:
            return adapted
        if isinstance(packed, PlainLinear) and x.shape[0] == 1:
            return gemv(_with_dense_rows(x), packed.weight, packed.bias, torch.float32)
        return super().logits(x, packed)

    def _adapted(self, x: Tensor, packed: PackedLinear, dtype: torch.dtype) -> Tensor | None:
        """Compute a layer with the adapters' updates; None if no row of the step can have one for this layer."""
        if self._adapters is None or not self._adapters.has_updates(packed):
            return None
        return self._adapters.linear(_with_dense_rows(x), packed, self._sums, dtype)

    def _sums(self, x: Tensor, packed: PackedLinear) -> Tensor:
        """Compute a layer's outputs before the activation: float32, or in the model's dtype if torch multiplies."""
        if isinstance(packed, QuantizedLinear):
            return matmul(x, packed.matrices, packed.bias, torch.float32)
        assert isinstance(packed, PlainLinear)
        if x.shape[0] == 1:
            return gemv(x, packed.weight, packed.bias, torch.float32, is_rounded=False)
        return torch.nn.functional.linear(x, packed.weight, packed.bias)

    def pack_experts(
        self,
        gate_up: Sequence[Weight],
        down: Sequence[Weight],
        biases: tuple[Tensor, Tensor] | None = None,
        activation: Activation = GATED_SILU,
    ) -> PackedExperts:
        return TritonExperts(Matrices.pack(gate_up), Matrices.pack(down), activation, *(biases or (None, None)))

    def fused_moe(self, x: Tensor, scores: Tensor, packed: PackedExperts, routing: Routing) -> Tensor:
        assert isinstance(packed, TritonExperts)
        adapters = None if self._adapters is None else self._adapters.of_experts(packed)
        return fused_moe(_with_dense_rows(x), scores, packed, routing, self.is_batch_invariant, adapters)

    def norm(self, x: Tensor, norm: Norm) -> Tensor:
        if x.shape[-1] > MAX_WIDTH:
            return super().norm(x, norm)
        return normalize(x.reshape(-1, x.shape[-1]), None, norm).view(x.shape)

    def add_norm(self, x: Tensor, residual: Tensor, norm: Norm) -> Tensor:
        if x.shape[-1] > MAX_WIDTH:
            return super().add_norm(x, residual, norm)
        return normalize(x, residual, norm)

    activate = staticmethod(activate)

    @staticmethod
    def sigmoid(x: Tensor) -> Tensor:
        return x.sigmoid()  # on a GPU all elements are computed alike

    def qk_norm_rope_cache(
        self,
        heads: Tensor,
        norms: HeadNorms | None,
        rotary: Rotary,
        kv_cache: Tensor,
        layer: int,
        metadata: AttentionMetadata,
    ) -> Tensor:
        num_heads, head_dim = heads.shape[1] - 2 * kv_cache.shape[3], heads.shape[2]
        if not can_fuse_heads(norms, num_heads, head_dim):
            return super().qk_norm_rope_cache(heads, norms, rotary, kv_cache, layer, metadata)
        return qk_norm_rope_cache(heads, norms, rotary, kv_cache, layer, metadata)

    def paged_attention(
        self,
        query: Tensor,
        kv_cache: Tensor,
        layer: int,
        metadata: AttentionMetadata,
        spec: AttentionSpec,
    ) -> Tensor:
        head_dim, group = query.shape[2], query.shape[1] // kv_cache.shape[3]
        if not self.supports(head_dim, group):
            return super().paged_attention(query, kv_cache, layer, metadata, spec)
        kind = AttentionKind(self._architecture, head_dim, group, query.element_size())
        is_padded = query.shape[0] != metadata.query_starts_host[-1]
        output = (torch.zeros if is_padded else torch.empty)(query.shape, dtype=query.dtype, device=query.device)
        plans = self._plans_of(metadata)
        num_decode_rows = 0 if self.is_batch_invariant else metadata.num_decode_rows
        if num_decode_rows:
            shape = decode_shape(kind)
            lengths, tables = metadata.seq_lens[:num_decode_rows], metadata.block_tables[:num_decode_rows]
            items = self._items(plans, lengths, spec.window, shape)
            rows, attended = query[:num_decode_rows], output[:num_decode_rows]
            decode_attention(rows, kv_cache, layer, tables, lengths, items, attended, spec, shape, self._max_programs)
        if num_decode_rows < len(metadata.seq_lens_host):
            prefill = prefill_shape(kind)
            tiles = self._tiles(metadata, group, prefill)
            if tiles.shape[0]:
                prefill_attention(
                    query, kv_cache, layer, metadata, tiles, output, spec, prefill, self.is_batch_invariant
                )
        return output

    def causal_conv(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        activation: ConvActivation,
        states: Tensor,
        metadata: StateMetadata,
    ) -> Tensor:
        if weight.shape[1] > MAX_TAPS:
            return super().causal_conv(x, weight, bias, activation, states, metadata)
        return causal_conv(x, weight, bias, activation, states, metadata)

    def state_scan(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        decay: Tensor,
        beta: Tensor | None,
        states: Tensor,
        metadata: StateMetadata,
    ) -> Tensor:
        if not can_scan(k.shape[2], v.shape[2]):
            return super().state_scan(q, k, v, decay, beta, states, metadata)
        return state_scan(q, k, v, decay, beta, states, metadata)

    def gated_norm(self, x: Tensor, gate: Tensor, norm: Norm | None, groups: int, order: GateOrder) -> Tensor:
        if x.shape[1] > MAX_GROUP_SIZE * groups:
            return super().gated_norm(x, gate, norm, groups, order)
        return gated_norm(x, gate, norm, groups, order)

    def supports(self, head_dim: int, group: int) -> bool:
        """Return whether the attention kernels support this shape; if not, warn once that plain torch is used."""
        num_elements = group_rows(group) * next_power_of_2(head_dim)
        if head_dim >= MIN_HEAD_DIM and group <= MAX_GROUP and num_elements <= MAX_GROUP_ELEMENTS:
            return True
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "attention with head_dim %d and %d query heads per KV head runs in plain torch: the kernels support "
                "head_dim from %d, at most %d query heads, and a product of both (as powers of two) of at most %d",
                head_dim,
                group,
                MIN_HEAD_DIM,
                MAX_GROUP,
                MAX_GROUP_ELEMENTS,
            )
        return False

    def _plans_of(self, metadata: AttentionMetadata) -> AttentionPlans:
        plans = metadata.plans.setdefault(self, AttentionPlans())
        assert isinstance(plans, AttentionPlans)
        return plans

    def _items(self, plans: AttentionPlans, lengths: Tensor, window: int | None, shape: DecodeShape) -> Tensor:
        items = plans.items.get((window, shape))
        if items is None:
            items = plans.items[window, shape] = plan_decode(lengths, window, shape)
        return items

    def _tiles(self, metadata: AttentionMetadata, group: int, shape: PrefillShape) -> Tensor:
        """Return the tiles of the rows that are left to the prefill kernel, planned once per step."""
        plans = self._plans_of(metadata)
        tiles = plans.tiles.get(shape.block_m // group)
        if tiles is None:
            tiles = plans.tiles[shape.block_m // group] = plan_prefill(metadata, group, shape)
        return tiles


def _with_dense_rows(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()
