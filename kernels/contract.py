"""What layers and kernels hand to each other, and the choice of who performs the operations.

Layers call an `Ops` and know neither device nor kernel: `select_ops` decides once, by device. What each operation does
is told in `reference.py`. Axes: T tokens of the step, R rows (requests), D head_dim.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeAlias

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .reference import ReferenceOps

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


Ops: TypeAlias = "ReferenceOps"  # whatever performs the operations is one, and overrides what it does otherwise


def select_ops(
    device: torch.device,
    dtype: torch.dtype,
    enforce_reference: bool = False,
    is_deterministic: bool = False,
    has_fp8_cache: bool = False,
    spare_folder: Path | None = None,
) -> Ops:
    """The implementation for models of this dtype on `device`; its `kernels` say which it is.

    Says so in the log, with a warning if plain torch takes the place of kernels. `spare_folder`: where compiled kernels
    are kept if the user's cache folder cannot be used; made if need be.
    """
    from .deterministic import DeterministicOps
    from .reference import ReferenceOps

    plain = DeterministicOps() if is_deterministic else ReferenceOps()
    if enforce_reference:
        plain.kernels = f"{plain.kernels}: --enforce-reference"
        return plain
    ops = _fast_ops(device, dtype, is_deterministic, has_fp8_cache, spare_folder)
    if isinstance(ops, str):
        plain.kernels = f"{plain.kernels}: {ops}"
        logger.warning("plain torch computes in place of the kernels, at half their speed or less: %s", ops)
        return plain
    logger.info("computes with %s for %s on %s", ops.kernels, dtype, device)
    return ops


def _fast_ops(
    device: torch.device, dtype: torch.dtype, is_deterministic: bool, has_fp8_cache: bool, spare_folder: Path | None
) -> Ops | str:
    """The kernels, or the reason why there are none."""
    if device.type == "cuda":
        from .gpu.load import gpu_obstacle, load_gpu_ops

        return load_gpu_ops(device, is_deterministic) or gpu_obstacle(device)
    if has_fp8_cache:
        return "the kernels in C read no KV cache of fp8: leave out --kv-cache-dtype"
    from .cpu.compiler import Unavailable
    from .cpu.cpu_ops import load_cpu_ops

    try:
        return load_cpu_ops(dtype, is_deterministic, spare_folder)
    except Unavailable as error:
        return str(error)
