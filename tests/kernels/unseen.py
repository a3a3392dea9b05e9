"""NaN in all slots of a KV cache that the tokens of a step do not see, as memory may hold that had another use."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from tokenloom.kernels import byte_cache
from tokenloom.kernels.contract import AttentionMetadata


def with_unseen_nan(
    kv_cache: Tensor, metadata: AttentionMetadata, window: int | None
) -> tuple[Tensor, AttentionMetadata]:
    """Return the cache with NaN in the null block, in blocks that lie wholly behind the windows of a row's tokens, and
    past the rows' ends; and the metadata whose table entries behind the windows are the null block."""
    block_size, tables = kv_cache.shape[4], metadata.block_tables.clone()
    is_seen = torch.zeros(len(kv_cache), block_size, dtype=torch.bool)
    for row, length in enumerate(metadata.seq_lens_host):
        count = metadata.query_starts_host[row + 1] - metadata.query_starts_host[row]
        first = 0 if window is None else max(0, length - count + 1 - window) // block_size
        tables[row, :first] = 0
        for index in range(first, -(-length // block_size)):
            is_seen[tables[row, index], : length - index * block_size] = True
    found = kv_cache.clone()
    if byte_cache.is_bytes(kv_cache):
        numbers, scales = byte_cache.parts(found.flatten(-2), block_size)
        numbers.view(torch.uint8).masked_fill_(~is_seen[:, None, None, None, :, None], 255)  # NaN in e4m3
        scales.masked_fill_(~is_seen[:, None, None, None], torch.nan)
    else:
        found.masked_fill_(~is_seen[:, None, None, None, :, None], torch.nan)
    return found, replace(metadata, block_tables=tables)
