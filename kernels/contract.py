"""Types of the operations' arguments: attention metadata, decode state and packed weights.

`reference.py` states the contract of each operation. Axes: T tokens of the step, R rows (requests), D head_dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, eq=False)
class AttentionMetadata:
    """Positions, KV slots and block tables of one step, shared by all layers.

    Every step needs a new object: implementations cache attention plans by its identity. Decode rows (exactly one query
    token) come first, then prefill rows (any number). The host copies have the same values as the tensors, so that a
    launch does not wait for the device.
    """

    positions: Tensor  # [T] int64: index of each token in its request
    slots: Tensor  # [T] int64: block_id * block_size + offset, -1 = do not write
    query_starts: Tensor  # [R + 1] int32: tokens of row r are [query_starts[r], query_starts[r + 1])
    seq_lens: Tensor  # [R] int32: context of each row, this step's tokens included
    block_tables: Tensor  # [R, max_blocks_in_step] int32: ids in order; past a row's last block any valid id (0)
    num_decode_rows: int
    query_starts_host: list[int]
    seq_lens_host: list[int]


@dataclass(frozen=True, eq=False)
class BatchColumns:
    """Decode state of the running rows, kept on the device between steps."""

    last_tokens: Tensor  # [rows] int64: the sampled token that the next step computes
    num_computed: Tensor  # [rows] int32: tokens before it, already in the KV cache
    block_tables: Tensor  # [rows, max_blocks_per_row] int32


class PackedLinear(Protocol):
    """Weight and bias of a linear layer in the layout of the Ops that packed it; opaque to layers."""

    @property
    def in_features(self) -> int: ...

    @property
    def out_features(self) -> int: ...

    @property
    def nbytes(self) -> int: ...


class PackedExperts(Protocol):
    """Weights of all experts of a layer, in the layout of the Ops that packed them."""

    @property
    def nbytes(self) -> int: ...


@dataclass(frozen=True, eq=False)
class LayerWeights:
    """Weights of a decoder layer: norm → attention, then norm → gated MLP, each added to the residual stream."""

    input_norm: Tensor  # [hidden]
    qkv: PackedLinear  # query heads | key heads | value heads
    query_norm: Tensor | None  # [D]
    key_norm: Tensor | None
    output: PackedLinear
    post_norm: Tensor  # [hidden]
    gate_up: PackedLinear  # gated
    down: PackedLinear
    sliding_window: int | None


@dataclass(frozen=True, eq=False)
class DecoderWeights:
    """Weights and shapes of a single-rank decoder, from token ids to logits."""

    table: Tensor | PackedLinear  # of the embedding, see Ops.embedding
    layers: list[LayerWeights]
    norm: Tensor  # [hidden]
    head: PackedLinear
    eps: float  # of all norms
    cos_sin: Tensor  # see Ops.qk_norm_rope_cache
    scale: float  # of attention scores
    num_heads: int
    num_kv_heads: int
    head_dim: int


class FusedDecoder(Protocol):
    """A forward pass of the whole decoder in one call."""

    def __call__(
        self, token_ids: Tensor, logits_indices: Tensor, metadata: AttentionMetadata, kv_cache: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Compute hidden states [T, hidden] after the final norm, and float32 logits [n, vocab] of some tokens.

        token_ids: [T]. logits_indices: [n] int64, indices of the tokens that get logits. Writes the step's keys and
        values. The next call overwrites the returned tensors.
        """
        ...
