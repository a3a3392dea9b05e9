"""Attention over one row's context in plain torch: the steps of `ReferenceOps.paged_attention`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from . import byte_cache
from .contract import AttentionSpec


def gather(kv_cache: Tensor, layer: int, blocks: Tensor, dtype: torch.dtype) -> Tensor:
    """Gather the keys and values of one row's blocks [n] in a layer: [2, num_kv_heads, n * block_size, D]."""
    _, num_layers, _, num_kv_heads, block_size, width = kv_cache.shape
    if kv_cache.is_contiguous():
        heads = torch.arange(2 * num_kv_heads, device=blocks.device).view(2, num_kv_heads, 1)
        tiles = (blocks.long() * num_layers + layer) * (2 * num_kv_heads) + heads
        found = kv_cache.view(-1, block_size * width).index_select(0, tiles.flatten())
    else:  # a layer that uses a part of its page
        found = kv_cache[:, layer].permute(1, 2, 0, 3, 4).index_select(2, blocks.long()).view(-1, block_size * width)
    if byte_cache.is_bytes(kv_cache):
        found = byte_cache.decode(found, block_size, dtype)
    return found.reshape(2, num_kv_heads, len(blocks) * block_size, -1)


def mask_of(
    positions: range, keys: range, window: int | None, see_until: Tensor | None, device: torch.device
) -> Tensor:
    """Return the mask [Q, S] bool, True where a query attends to a key. positions, keys: their indices in the request.
    see_until: [Q], see AttentionMetadata."""
    places = torch.arange(positions.start, positions.stop, device=device)[:, None]
    others = torch.arange(keys.start, keys.stop, device=device)
    mask = others <= (places if see_until is None else see_until[:, None])
    return mask if window is None else mask & (others > places - window)


def bias_of(positions: range, keys: range, spec: AttentionSpec) -> Tensor | None:
    """Return what is added to the scores [H, Q, S] of queries at `positions` and of `keys`; None: nothing."""
    if spec.bias is None:
        return None
    places = torch.arange(positions.start, positions.stop, device=spec.bias.device)[:, None]
    distances = torch.arange(keys.start, keys.stop, device=spec.bias.device) - places
    return spec.bias[:, distances + spec.bias.shape[1] // 2]


def attend(
    query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec, mask: Tensor | None, bias: Tensor | None = None
) -> Tensor:
    """Compute attention of query [Q, H, D] over key and value [num_kv_heads, S, D]: [Q, H, D].

    mask: [Q, S], False where a query does not attend to a key; None: each attends to all. bias: [H, Q, S], see
    `bias_of`. Scores and softmax are float32 for every dtype.
    """
    if spec.softcap or spec.sinks is not None or bias is not None:
        return _attend_by_scores(query, key, value, spec, mask, bias)
    is_grouped = query.shape[1] > key.shape[0]
    attended = F.scaled_dot_product_attention(
        query.transpose(0, 1)[None], key[None], value[None], mask, scale=spec.scale, enable_gqa=is_grouped
    )
    return attended[0].transpose(0, 1)


def _attend_by_scores(
    query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec, mask: Tensor | None, bias: Tensor | None
) -> Tensor:
    """Compute `attend` with a soft cap, a bias or sinks."""
    queries = query.transpose(0, 1).reshape(key.shape[0], -1, *query.shape[::2]).float()  # [num_kv_heads, group, Q, D]
    scores = queries @ key[:, None].float().transpose(-1, -2) * spec.scale
    if spec.softcap:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    if bias is not None:
        scores = scores + bias.view(scores.shape)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    if spec.sinks is None:
        weights = scores.softmax(dim=-1)
    else:
        sinks = spec.sinks.view(*scores.shape[:2], 1, 1).expand(*scores.shape[:3], 1)
        weights = torch.cat((scores, sinks), dim=-1).softmax(dim=-1)[..., :-1]
    attended: Tensor = (weights @ value[:, None].float()).flatten(0, 1).transpose(0, 1)
    return attended.to(query.dtype)
