"""Steps with spans, whose tokens attend to each other, and attention by a dense mask as their oracle."""

from __future__ import annotations

import random
from dataclasses import replace

import torch
from torch import Tensor

from tokenloom.kernels.contract import AttentionMetadata, AttentionSpec


def with_spans(metadata: AttentionMetadata, seed: int) -> tuple[AttentionMetadata, list[list[range]]]:
    """Put spans anywhere into the rows with several tokens; return the spans of each row, too, by index in it."""
    draw, see_until, spans = random.Random(seed), [], []
    starts = metadata.query_starts_host
    for row, length in enumerate(metadata.seq_lens_host):
        count, found = starts[row + 1] - starts[row], []
        place = length - count
        while count > 1 and place < length:
            span = range(place, min(length, place + draw.choice([1, 2, 30, 256, 400])))
            found.append(span)
            place = span.stop + draw.choice([0, 1, 5, 70])
        ends = list(range(length - count, length))
        for span in found:
            for index in span:
                ends[index - length + count] = span.stop - 1
        see_until += ends
        spans.append(found)
    return replace(metadata, see_until=torch.tensor(see_until, dtype=torch.int32)), spans


def dense_attention(
    query: Tensor,
    kv_cache: Tensor,
    layer: int,
    metadata: AttentionMetadata,
    spec: AttentionSpec,
    spans: list[list[range]],
) -> Tensor:
    """Compute attention of each row as one matrix of scores, in float64: [T, H, D]. kv_cache: floats."""
    outputs, starts = [], metadata.query_starts_host
    group = query.shape[1] // kv_cache.shape[3]
    for row, length in enumerate(metadata.seq_lens_host):
        blocks = metadata.block_tables[row].long()
        pages = kv_cache[blocks, layer].double().permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :length]
        key, value = pages.repeat_interleave(group, dim=1)  # [H, length, D] each
        queries = query[starts[row] : starts[row + 1]].double().transpose(0, 1)
        scores = queries @ key.transpose(1, 2) * spec.scale
        if spec.softcap:
            scores = spec.softcap * torch.tanh(scores / spec.softcap)
        keys = torch.arange(length)
        places = keys[length - queries.shape[1] :, None]
        if spec.bias is not None:
            scores = scores + spec.bias.double()[:, keys - places + spec.bias.shape[1] // 2]
        seen = keys <= places
        for span in spans[row]:
            seen |= ((keys >= span.start) & (keys < span.stop)) & ((places >= span.start) & (places < span.stop))
        if spec.window is not None:
            seen &= keys > places - spec.window
        scores = scores.masked_fill(~seen, -torch.inf)
        if spec.sinks is not None:
            sinks = spec.sinks.double()[:, None, None].expand(-1, scores.shape[1], 1)
            scores = torch.cat((scores, sinks), dim=-1)
        outputs.append((scores.softmax(dim=-1)[..., :length] @ value).transpose(0, 1))
    return torch.cat(outputs).float()
