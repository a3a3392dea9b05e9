"""KVCacheSpec: the shape of the KV cache of a group of layers, and the allocation of its pool.

A layer's page in a block is as large as the largest layer needs; a layer of another shape uses the first part of it.
"""

from __future__ import annotations

import contextlib
import mmap
from dataclasses import dataclass

import torch
from torch import Tensor

from ...kernels.byte_cache import vector_width


def layer_cache(kv_cache: Tensor, layer: int, num_kv_heads: int, head_dim: int) -> Tensor:
    """Return a view of one layer's part of the cache, in the layer's own shape: [num_blocks, 1, 2, num_kv_heads,
    block_size, head_dim]."""
    block_size = kv_cache.shape[4]
    width = vector_width(head_dim, kv_cache.dtype)
    shape = (len(kv_cache), 1, 2, num_kv_heads, block_size, width)
    assert torch.Size(shape[2:]).numel() <= kv_cache.stride(1)
    heads = num_kv_heads * block_size * width
    strides = (kv_cache.stride(0), kv_cache.stride(1), heads, block_size * width, width, 1)
    return kv_cache.as_strided(shape, strides, kv_cache.storage_offset() + layer * kv_cache.stride(1))


@dataclass(frozen=True)
class KVCacheSpec:
    """Shape of the KV cache, on one rank, of a group of layers that share their block tables. Heads are those of the
    layer with the most elements."""

    num_layers: int
    num_kv_heads: int  # of this rank
    head_dim: int
    block_size: int  # tokens
    dtype: torch.dtype  # of elements, or one of byte_cache.CACHE_DTYPES: 8 bits, each vector with its scale

    def shape(self, num_blocks: int) -> tuple[int, ...]:
        """Return [num_blocks, num_layers, 2, num_kv_heads, block_size, vector_width]."""
        width = vector_width(self.head_dim, self.dtype)
        return (num_blocks, self.num_layers, 2, self.num_kv_heads, self.block_size, width)

    @property
    def block_bytes(self) -> int:
        return torch.Size(self.shape(1)).numel() * self.dtype.itemsize

    def allocate(self, num_blocks: int, device: torch.device) -> Tensor:
        """Allocate a pool of zeros. On the CPU a page takes memory when it is first written, or taken in advance by a
        PageSupply."""
        shape = self.shape(num_blocks)
        if device.type != "cpu":
            return torch.zeros(shape, dtype=self.dtype, device=device)
        pages = mmap.mmap(-1, num_blocks * self.block_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):  # a kernel without huge pages
            pages.madvise(mmap.MADV_HUGEPAGE)  # attention reads blocks from all over the pool
        return torch.frombuffer(pages, dtype=self.dtype).view(shape)
