"""What layers and kernels hand to each other. What each operation does is told in `reference.py`.

Axes: T tokens of the step, R rows (requests), D head_dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, eq=False)
class AttentionMetadata:
    """Where the tokens of one step stand and where their keys and values lie; made once per step, for all layers.

    Implementations may remember what they derive from it by its identity: a new step needs a new object.

    Rows with exactly one query token (decode rows) come first, then the rows with any number of them (prefill rows).
    The host copies repeat what the device has, so that no kernel launch waits for the device.
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
    """What a device remembers of running rows from one decode step to the next."""

    last_tokens: Tensor  # [rows] int64: the next to be computed
    num_computed: Tensor  # [rows] int32: tokens before it
    block_tables: Tensor  # [rows, max_blocks_per_row] int32


class PackedLinear(Protocol):
    """A linear layer's weight and bias in whatever form its Ops likes best; opaque to everyone else."""

    @property
    def in_features(self) -> int: ...

    @property
    def out_features(self) -> int: ...

    @property
    def nbytes(self) -> int: ...


class PackedExperts(Protocol):
    """The weights of a layer's experts, likewise opaque."""

    @property
    def nbytes(self) -> int: ...


@dataclass(frozen=True, eq=False)
class LayerWeights:
    """One decoder layer: norm → attention → norm → gated MLP, each pair's result added to the residual stream."""

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
    """A whole decoder of one rank, from token ids to logits."""

    table: Tensor | PackedLinear  # the embedding, as in Ops.embedding
    layers: list[LayerWeights]
    norm: Tensor  # [hidden]
    head: PackedLinear
    eps: float  # of all norms
    cos_sin: Tensor  # as in Ops.qk_norm_rope_cache
    scale: float  # of attention scores
    num_heads: int
    num_kv_heads: int
    head_dim: int


class FusedDecoder(Protocol):
    """A whole decoder as one operation."""

    def __call__(
        self, token_ids: Tensor, logits_indices: Tensor, metadata: AttentionMetadata, kv_cache: Tensor
    ) -> tuple[Tensor, Tensor]:
        """token_ids [T] → hidden states [T, hidden] after the final norm, and float32 logits [c, out] of the tokens
        `logits_indices` [c] int64; writes the step's keys and values. What is returned holds until the next call."""
        ...
