"""Biases of attention's scores by distance, computed once for all layers.

Formulas: buckets (T5, arXiv 1910.10683), as MPNet has them in both directions, and slopes (ALiBi, arXiv 2108.12409),
as encoders have them: by the distance in either direction.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ...ipc.spec.models.model_config import ModelConfig, PositionBiasConfig
from ..weights.loader import LayerLoader


def make_position_bias(loader: LayerLoader, config: ModelConfig, max_model_len: int) -> Tensor | None:
    """Return AttentionSpec.bias [H, 2 max_model_len − 1] of this rank's heads; None if the model has none."""
    bias = config.position_bias
    if bias is None:
        return None
    heads = loader.group.shard(config.num_heads, "attention heads")
    distances = torch.arange(1 - max_model_len, max_model_len)
    if bias.kind == "slopes":
        slopes = torch.tensor(slopes_of(config.num_heads)[heads.start : heads.stop])
        return (-slopes[:, None] * distances.abs()).to(loader.checkpoint.device)
    shape = (bias.num_buckets, config.num_heads)
    table = loader.vector(f"{config.names.position_bias}.weight", shape, 1, heads)
    return table[buckets_of(distances, bias).to(table.device)].T.contiguous()


def buckets_of(distances: Tensor, bias: PositionBiasConfig) -> Tensor:
    """Return the bucket of each distance, key's position less query's. Each direction has half of the buckets: one for
    each small distance, then wider ones by the logarithm, of which the last has no end."""
    half = bias.num_buckets // 2
    num_exact = half // 2
    sizes = distances.abs()
    growth = (half - num_exact) / math.log(bias.max_distance / num_exact)
    wide = num_exact + (torch.log(sizes.clamp(min=1).float() / num_exact) * growth).long()
    return (distances > 0) * half + torch.where(sizes < num_exact, sizes, wide.clamp(max=half - 1))


def slopes_of(num_heads: int) -> list[float]:
    """Return the slope of each head: a geometric sequence from 2^(−8 / n) on for n heads, a power of two. Further heads
    have every second slope of twice as many."""
    power = 1 << (num_heads.bit_length() - 1)
    slopes = [2 ** (-8 * (head + 1) / power) for head in range(power)]
    return slopes + [2 ** (-4 * (head + 1) / power) for head in range(0, 2 * (num_heads - power), 2)]
