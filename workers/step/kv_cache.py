"""KVPool: the memory of a rank's KV cache; KVCacheSpec: the shape of the blocks of one KV group in it.

Each group's cache is a plain view of the whole buffer, so blocks of different groups overlap; PoolShape draws it. The
core gives each byte to one group at a time.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from ...ipc.errors import ProtocolError
from ...ipc.kv.pool_shape import PoolShape
from ...ipc.spec.kv.kv_groups import KVGroup
from ...ipc.spec.models.model_config import ModelConfig
from ...kernels.byte_cache import vector_width
from .state_cache import StateSpec


class CachePlace(NamedTuple):
    """The place of a layer's keys and values in the KV cache."""

    group: int
    layer: int  # index in the group's cache
    has_own_shape: bool  # the layers of the group have several shapes, so that it has to use `layer_cache`


def cache_places(config: ModelConfig, groups: Sequence[KVGroup]) -> dict[int, CachePlace]:
    """Return the place of each layer with attention; a layer that reads the keys of an earlier one has that one's. All
    layers of an encoder have one place: no later step reads what they write."""
    places: dict[int, CachePlace] = {}
    for group, each in enumerate(groups):
        if each.is_state:
            continue
        sizes = [config.at_layer(layer) for layer in each.layers]
        has_own_shape = len({(own.num_kv_heads, own.head_dim) for own in sizes}) > 1
        indices = [0] * len(each.layers) if config.is_encoder else range(len(each.layers))
        found = zip(each.layers, indices, strict=True)
        places |= {layer: CachePlace(group, index, has_own_shape) for layer, index in found}
    attending = [(layer, own.kv_layer) for layer, own in enumerate(config.layers) if own.has_attention]
    return {layer: places[layer if owner is None else owner] for layer, owner in attending}


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
    layer with the most elements; a layer of another shape uses the first part of its page, see `layer_cache`."""

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

    def view(self, buffer: Tensor, stride: int = 0, start: int = 0) -> Tensor:
        """Return as many blocks as there are in a buffer [num_bytes] of uint8, the first from byte `start` on. stride:
        bytes from each to the next, a multiple of the element size as is `start`; 0: the bytes of a block."""
        stride = stride or self.block_bytes
        num_blocks, size = len(buffer) // stride, self.dtype.itemsize
        shape = self.shape(num_blocks)
        elements = buffer[: num_blocks * stride].view(self.dtype)
        inner = torch.empty(shape[1:], device="meta").stride()
        return elements.as_strided(shape, (stride // size, *inner), start // size + elements.storage_offset())

    def allocate(self, num_blocks: int, device: torch.device) -> Tensor:
        """Allocate blocks of this group alone, of zeros."""
        return self.view(_allocate(num_blocks * self.block_bytes, device))


class KVPool:
    """Owner of the memory. `buffer`: [num_bytes] uint8, zeros at first. `caches`: the view of each group with keys and
    values, as in KVCacheSpec.shape; `states`: that of the group behind them, if layers keep a state; `draft_caches`:
    those of a draft model, whose keys and values lie in the blocks of the first group, behind the model's. `blocks`:
    the bytes of each group's blocks, [num_blocks, block_bytes] uint8."""

    def __init__(
        self,
        specs: Sequence[KVCacheSpec],
        pool: PoolShape,
        device: torch.device,
        states: StateSpec | None = None,
        drafts: Sequence[KVCacheSpec] = (),
    ) -> None:
        """Allocate the pool. drafts: of the draft model's groups. ProtocolError if it is for groups with blocks of
        other sizes."""
        self.block_bytes = block_bytes_of(specs, states, drafts)
        if pool.block_bytes != self.block_bytes:
            raise ProtocolError(f"a pool for blocks of {pool.block_bytes} bytes is given {self.block_bytes}")
        self.buffer = _allocate(pool.num_bytes, device)
        strides = self.block_bytes[: len(specs)]
        self.caches = [spec.view(self.buffer, stride) for spec, stride in zip(specs, strides, strict=True)]
        ends = accumulate((spec.block_bytes for spec in drafts), initial=specs[0].block_bytes if specs else 0)
        starts = zip(drafts, ends, strict=False)
        self.draft_caches = [spec.view(self.buffer, strides[0], start) for spec, start in starts]
        self.states = None if states is None else states.view(self.buffer)
        self.blocks = [self.buffer[: len(self.buffer) // size * size].view(-1, size) for size in self.block_bytes]


def block_bytes_of(
    specs: Sequence[KVCacheSpec], states: StateSpec | None, drafts: Sequence[KVCacheSpec] = ()
) -> tuple[int, ...]:
    """Return the bytes of a block of each KV group. drafts: of the draft model's groups, see KVPool."""
    of_states = () if states is None else (states.block_bytes,)
    sizes = [spec.block_bytes for spec in specs]
    sizes[:1] = [size + sum(spec.block_bytes for spec in drafts) for size in sizes[:1]]
    return (*sizes, *of_states)


def _allocate(num_bytes: int, device: torch.device) -> Tensor:
    """Allocate zeros [num_bytes] of uint8. On the CPU a page takes memory when it is first written, or taken in advance
    by a PageSupply."""
    if device.type != "cpu":
        return torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        pages.madvise(mmap.MADV_HUGEPAGE)  # attention reads blocks from all over the pool
    return torch.frombuffer(pages, dtype=torch.uint8)
