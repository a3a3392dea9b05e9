"""The contract of every operation a model is made of, and the choice of who performs it.

Layers call an `Ops` and know neither device nor kernel: `select_ops` decides once, by device. `reference.py` is the
specification; any other implementation agrees with it within a stated tolerance. Axes: T tokens of the step, R rows
(requests), H heads, D head_dim.

    kv_cache  [num_blocks, num_layers, 2, num_kv_heads, block_size, D]; 2 is key, value. Zeroed when allocated.
              One of uint8 has D + 4 in the place of D: see fp8_cache.py.
    block 0   is the null block: no row owns it; padded block tables point at it, and what is told not to be written
              may land there.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from .quantized import Weight

logger = logging.getLogger("tokenloom.kernels")


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
    max_seq_len: int


@dataclass(frozen=True, eq=False)
class RowColumns:
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
    cos_sin: Tensor  # as in Ops.prepare_heads
    scale: float  # of attention scores
    num_heads: int
    num_kv_heads: int
    head_dim: int


class FusedDecoder(Protocol):
    """A whole decoder as one operation."""

    def __call__(
        self, token_ids: Tensor, chosen: Tensor, metadata: AttentionMetadata, kv_cache: Tensor
    ) -> tuple[Tensor, Tensor]:
        """token_ids [T] → hidden states [T, hidden] after the final norm, and float32 logits [c, out] of the tokens
        `chosen` [c] int64; writes the step's keys and values. What is returned holds until the next call."""
        ...


class Ops(Protocol):
    """What a decoder layer needs. Tensors lie on one device and have the model's dtype unless stated otherwise.

    Shapes are the caller's duty: a wrong one is a fault of ours and raises whatever torch raises.
    """

    def embedding(self, token_ids: Tensor, table: Tensor | PackedLinear, first_id: int) -> Tensor:
        """Rows of `table` [n, hidden] for ids in [first_id, first_id + n), zeros for all others.

        A table that is also the weight of a linear (a tied head) is given as packed. token_ids: [T] int32 or int64.
        Returns [T, hidden].
        """
        ...

    def begin_step(self, token_ids: Tensor, rows: RowColumns, table: Tensor | PackedLinear, first_id: int) -> Tensor:
        """`embedding`, where token id −1 − r stands for the last token of row r."""
        ...

    def begin_decode(
        self,
        row_ids: Tensor,
        rows: RowColumns,
        metadata: AttentionMetadata,
        block_size: int,
        table: Tensor | PackedLinear,
        first_id: int,
    ) -> Tensor:
        """Begin a decode step of the rows `row_ids` [n] int64, each at most once: `embedding` of their last tokens.

        Fills in the metadata's positions, slots, lengths and block tables (a row's own blocks, not what is past them)
        and counts the tokens as computed. Row −1 is padding: position 0, slot −1, length 0 and an embedding of zeros.
        """
        ...

    def pack_linear(self, weight: Weight, bias: Tensor | None, is_gated: bool = False) -> PackedLinear:
        """Take weight [out, in] and bias [out]: keep them or copy them reordered. Neither is ever written to.

        `is_gated`: the first half of the rows are gates, the second what they let through (out_features is out / 2).
        A quantized weight may be kept as it is or, where there is no kernel for it, as what it stands for.
        """
        ...

    def linear(self, x: Tensor, packed: PackedLinear) -> Tensor:
        """x [T, in] times the packed weight, plus its bias: [T, out]. `packed` was made by the same Ops.

        Of a gated one silu(first half) * second half: [T, out / 2].
        """
        ...

    def logits(self, x: Tensor, packed: PackedLinear) -> Tensor:
        """`linear` in float32, which may be more precise than the model's dtype: [T, out]."""
        ...

    def pack_experts(self, gate_up: Sequence[Weight], down: Sequence[Weight]) -> PackedExperts:
        """Take, of each expert, a gated weight [2 n, hidden] and one [hidden, n] that leads back."""
        ...

    def mix_experts(
        self, x: Tensor, scores: Tensor, packed: PackedExperts, num_chosen: int, is_normalized: bool
    ) -> Tensor:
        """x [T, hidden] through the `num_chosen` experts of each token's highest scores [T, E]; their weighted sum.

        The weights are the softmax of all scores in float32; `is_normalized`: divided by the sum of the chosen ones.
        A sum goes through the experts in the order of their numbers or of their scores, and is kept in float32.
        """
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x / rms(x) * weight over the last axis, the mean taken in float32. x: [..., n], weight: [n]."""
        ...

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Add x to `residual` in place, then return rms_norm(residual). Both [T, n]."""
        ...

    def prepare_heads(
        self,
        heads: Tensor,
        norms: tuple[Tensor, Tensor] | None,
        eps: float,
        cos_sin: Tensor,
        kv_cache: Tensor,
        layer: int,
        metadata: AttentionMetadata,
    ) -> Tensor:
        """Normalize and rotate query and key heads, store keys and values; return the query heads [T, H, D].

        heads: [T, H + 2 * num_kv_heads, D], query | key | value; overwritten, and the answer may be a part of it.
        norms: weights [D] of the RMS norms of query and key heads. cos_sin: [P, D] float32, D/2 cosines then D/2 sines
        for each position < P (neox halves: element i goes with i + D/2). Keys and values go to `metadata.slots` of
        `layer`; slot -1 writes nothing that counts. NaN and infinities are stored as 0, so that a request that
        overflowed cannot poison the one that gets its block next (masked attention multiplies stale values by 0, and
        0 * NaN is NaN).
        """
        ...

    def paged_attention(
        self,
        query: Tensor,
        kv_cache: Tensor,
        layer: int,
        metadata: AttentionMetadata,
        scale: float,
        sliding_window: int | None,
    ) -> Tensor:
        """Causal attention of query [T, H, D] over each row's own context in `layer`: [T, H, D].

        Query head h reads KV head h // (H / num_kv_heads). A token at position p sees positions [0, p], or with a
        sliding window w [max(0, p - w + 1), p]. Keys and values of this step were stored before.
        """
        ...

    def fuse_decoder(self, weights: DecoderWeights) -> FusedDecoder | None:
        """The decoder as one operation, equal to its layers within rounding; None: run them one by one."""
        ...


def select_ops(
    device: torch.device,
    dtype: torch.dtype,
    enforce_reference: bool = False,
    is_deterministic: bool = False,
    has_fp8_cache: bool = False,
) -> Ops:
    """The implementation for models of this dtype on `device`."""
    from .deterministic import DeterministicOps
    from .reference import ReferenceOps

    plain = DeterministicOps() if is_deterministic else ReferenceOps()
    if enforce_reference:
        return plain
    if device.type == "cuda":
        from .gpu_ops import load_gpu_ops

        return load_gpu_ops(device, is_deterministic) or plain
    if has_fp8_cache:
        logger.warning("a KV cache of fp8 runs in plain torch on a CPU: the kernels in C read no such cache")
        return plain
    from .cpu.cpu_ops import load_cpu_ops

    return load_cpu_ops(dtype, is_deterministic) or plain
