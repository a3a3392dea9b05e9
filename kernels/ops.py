"""The contract of every operation a model is made of, and the choice of who performs it.

Layers call an `Ops` and know neither device nor kernel: `select_ops` decides once, by device. `reference.py` is the
specification; any other implementation agrees with it within a stated tolerance. Axes: T tokens of the step, R rows
(requests), H heads, D head_dim.

    kv_cache  [num_blocks, num_layers, 2, num_kv_heads, block_size, D]; 2 is key, value. Zeroed when allocated.
    block 0   is the null block: no row owns it; padded block tables point at it, and what is told not to be written
              may land there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
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
    max_seq_len: int


class PackedLinear(Protocol):
    """A linear layer's weight and bias in whatever form its Ops likes best; opaque to everyone else."""

    @property
    def in_features(self) -> int: ...

    @property
    def out_features(self) -> int: ...

    @property
    def nbytes(self) -> int: ...


class Ops(Protocol):
    """What a decoder layer needs. Tensors lie on one device and have the model's dtype unless stated otherwise.

    Shapes are the caller's duty: a wrong one is a fault of ours and raises whatever torch raises.
    """

    def embedding(self, token_ids: Tensor, weight: Tensor, first_id: int) -> Tensor:
        """Rows of `weight` [n, hidden] for ids in [first_id, first_id + n), zeros for all others.

        token_ids: [T] int32 or int64. Returns [T, hidden].
        """
        ...

    def pack_linear(self, weight: Tensor, bias: Tensor | None) -> PackedLinear:
        """Take weight [out, in] and bias [out]: keep them or copy them reordered. Neither is ever written to."""
        ...

    def linear(self, x: Tensor, packed: PackedLinear) -> Tensor:
        """x [T, in] times the packed weight, plus its bias: [T, out]. `packed` was made by the same Ops."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x / rms(x) * weight over the last axis, the mean taken in float32. x: [..., n], weight: [n]."""
        ...

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Add x to `residual` in place, then return rms_norm(residual). Both [T, n]."""
        ...

    def silu_and_mul(self, x: Tensor) -> Tensor:
        """x [T, 2n] holds gate and up side by side: silu(gate) * up, [T, n]."""
        ...

    def rotary(self, heads: Tensor, positions: Tensor, cos_sin: Tensor) -> None:
        """Rotate `heads` [T, H, D] in place (neox halves: element i goes with i + D/2); any strides, last one 1.

        positions: [T] int64, each < P. cos_sin: [P, D] float32: D/2 cosines then D/2 sines for each position.
        Query and key heads are neighbours in a fused projection, so one call rotates both.
        """
        ...

    def store_kv(self, key: Tensor, value: Tensor, kv_cache: Tensor, layer: int, metadata: AttentionMetadata) -> None:
        """Write key and value [T, num_kv_heads, D] to `metadata.slots` of `layer`; slot -1 writes nothing that counts.

        NaN and infinities are stored as 0, so that a request that overflowed cannot poison the one that gets its block
        next (masked attention multiplies stale values by 0, and 0 * NaN is NaN).
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


def select_ops(device: torch.device) -> Ops:
    """The implementation for `device`."""
    from .reference import ReferenceOps

    return ReferenceOps()
