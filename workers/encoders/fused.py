"""FusedBlocks: the layers of an encoder in our kernels, all pieces of a layer in one call.

Keys and values of all rows are in a paged cache, as the kernels require. Its blocks are as large as possible if no
block may contain rows of two ranges between bounds. To the kernels a piece, or its part of a range, is a row of a step,
and each of its tokens sees the whole range. So a piece has the same bits whether it runs alone or with others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from ...kernels.contract import (
    AttentionMetadata,
    AttentionSpec,
    AttentionWeights,
    HeadNorms,
    LayerWeights,
    MLPWeights,
    Norm,
    PackedLinear,
    Rotary,
)
from ...kernels.select import Ops
from ..borrowed.linear import is_packable, joined
from ..borrowed.mlp import recipe_of
from ..borrowed.norm import rms_norm_of
from .attention import Part, parts_of
from .blocks import Block, EncoderState

HEAD_UNIT = 16  # heads are padded to a multiple of this number of elements, which the kernels for many rows need


class FusedBlocks:
    """FusedLayers in our kernels. Owns the layers' packed weights."""

    def __init__(self, ops: Ops, layers: Sequence[LayerWeights], num_heads: int, head_dim: int) -> None:
        """head_dim: elements of a padded head."""
        fused = ops.fuse_encoder(layers, num_heads, head_dim)
        assert fused is not None, "the kernels have encoders"
        self._fused, self._num_heads, self._head_dim = fused, num_heads, head_dim

    def run(self, state: EncoderState, layer: int, bounds: list[int], cuts: list[int]) -> None:
        if not state.gathered:
            self._make_room(state)
        start, stop, (kv_cache,) = cuts[0], cuts[-1], state.gathered
        metadata = None if layer < 0 else step_of(parts_of(bounds, cuts), kv_cache.shape[4])
        rotations = None
        if state.rotations is not None:
            rotations = torch.cat([each[start:stop, : each.shape[1] // 2].float() for each in state.rotations], dim=1)
        hidden, heads = state.hidden[start:stop], state.queries[start:stop]
        self._fused(layer, hidden, heads, kv_cache, start, metadata, rotations)

    def _make_room(self, state: EncoderState) -> None:
        block_size = math.gcd(*state.bounds[:-1], *state.window_bounds) or state.num_rows  # the last may be cut off
        shape = (-(-state.num_rows // block_size), 2, 2, self._num_heads, block_size, self._head_dim)
        state.queries = state.hidden.new_empty((state.num_rows, self._fused.width))
        state.gathered = (state.hidden.new_empty(shape),)


def fuse(ops: Ops, blocks: list[Block], dtype: torch.dtype) -> FusedBlocks | None:
    """Move the layers from `blocks` into a FusedBlocks and return it; one layer at a time, so that at most one is in
    memory twice. None if `ops` have no kernel for these layers, which then stay in `blocks` with all their weights."""
    num_heads, head_dim = blocks[0].num_heads, padded(blocks[0].head_dim)
    layers = list[LayerWeights]()
    while blocks:
        weights = _layer_of(ops, blocks[0], dtype)
        if weights is None or ops.fuse_encoder([weights], num_heads, head_dim) is None:
            assert not layers, "the layers of an encoder have the same parts"
            return None
        layers.append(weights)
        blocks.pop(0).module._modules.clear()
    return FusedBlocks(ops, layers, num_heads, head_dim)


def _layer_of(ops: Ops, block: Block, dtype: torch.dtype) -> LayerWeights | None:
    """Return a layer's packed weights, with its gains multiplied into them; None if it has parts that our kernels do
    not support. The layer's own weights stay as they are."""
    input_norm, mlp_norm = (_norm_of(each) for each in (block.norm, block.mlp_norm))
    head_norms, recipe = _head_norms_of(block), recipe_of(block.mlp, dtype)
    is_plain = all(is_packable(each, dtype) for each in (*block.projections, block.out))
    if not is_plain or input_norm is None or mlp_norm is None or recipe is None:
        return None
    if head_norms is None and block.head_norms:
        return None
    output_gains, mlp_gains = block.gains or (None, None)
    up = ops.pack_linear(*joined(block.mlp, recipe.first), recipe.activation)
    down = ops.pack_linear(*_scaled(getattr(block.mlp, recipe.down), mlp_gains))
    return LayerWeights(
        input_norm=input_norm,
        attention=AttentionWeights(
            qkv=_packed_projections(ops, block),
            head_norms=head_norms,
            rotary=Rotary(None),
            spec=AttentionSpec(block.scale),
            output=_packed_output(ops, block, output_gains),
        ),
        mixer_output_norm=None,
        mlp_norm=mlp_norm,
        mlp=MLPWeights(up, down),
        mlp_output_norm=None,
        is_parallel=False,
    )


def _norm_of(module: nn.Module) -> Norm | None:
    if type(module) is nn.LayerNorm and len(module.normalized_shape) == 1:
        weight, bias = (None if each is None else each.detach().float() for each in (module.weight, module.bias))
        return Norm("layer", weight, bias, module.eps)
    return rms_norm_of(module)


def _head_norms_of(block: Block) -> HeadNorms | None:
    """Return the norms over all heads of a row; None if there are none, or if padding of heads would change them."""
    norms = [_norm_of(each) for each in block.head_norms]
    if len(norms) != 2 or padded(block.head_dim) != block.head_dim:
        return None
    query, key = (_by_heads(each, block.num_heads) for each in norms)
    return None if query is None or key is None else HeadNorms(query, key, spans_heads=True)


def _by_heads(norm: Norm | None, num_heads: int) -> Norm | None:
    if norm is None or norm.weight is None or norm.bias is not None:
        return None
    return replace(norm, weight=norm.weight.view(num_heads, -1))


def _scaled(linear: nn.Linear, gains: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return copies of a linear layer's weight and bias, multiplied so that its outputs are multiplied by `gains`
    [out]; None: not multiplied."""
    weight, bias = joined(nn.ModuleList([linear]), ["0"])
    if gains is not None:
        factors = gains.detach()
        weight = weight * factors[:, None]
        if bias is not None:
            bias = bias * factors
    return weight, bias


def _packed_projections(ops: Ops, block: Block) -> PackedLinear:
    """Pack the projections to q, k and v as one layer, with each head padded by zeros."""
    holder = nn.ModuleList(block.projections)
    weight, bias = joined(holder, [name for name, _ in holder.named_children()])
    missing = padded(block.head_dim) - block.head_dim
    if missing:
        weight = nn.functional.pad(weight.view(-1, block.head_dim, weight.shape[1]), (0, 0, 0, missing)).flatten(0, 1)
        if bias is not None:
            bias = nn.functional.pad(bias.view(-1, block.head_dim), (0, missing)).flatten()
    return ops.pack_linear(weight, bias)


def _packed_output(ops: Ops, block: Block, gains: Tensor | None) -> PackedLinear:
    weight, bias = _scaled(block.out, gains)
    missing = padded(block.head_dim) - block.head_dim
    if missing:
        weight = nn.functional.pad(weight.view(len(weight), -1, block.head_dim), (0, missing)).flatten(1)
    return ops.pack_linear(weight, bias)


def step_of(parts: Sequence[Part], block_size: int) -> AttentionMetadata:
    """Return the metadata of a step whose rows are `parts`; each token sees all keys of its part's range. Positions and
    slots are empty."""
    starts, stops, lows, highs = np.array(parts, np.int32).T
    counts, lengths = stops - starts, highs - lows
    blocks = (lows // block_size)[:, None] + np.arange(-(-max(lengths) // block_size))
    blocks[blocks >= -(-highs // block_size)[:, None]] = 0
    query_starts = np.concatenate((np.zeros(1, np.int32), np.cumsum(counts, dtype=np.int32)))
    no_tokens = torch.empty(0, dtype=torch.int64)
    return AttentionMetadata(
        positions=no_tokens,
        slots=no_tokens,
        query_starts=torch.from_numpy(query_starts),
        seq_lens=torch.from_numpy(lengths),
        block_tables=torch.from_numpy(blocks.astype(np.int32)),
        num_decode_rows=0,
        query_starts_host=query_starts.tolist(),
        seq_lens_host=lengths.tolist(),
        see_until=torch.from_numpy(np.repeat(lengths - 1, counts)),
    )


def padded(size: int) -> int:
    return -(-size // HEAD_UNIT) * HEAD_UNIT
