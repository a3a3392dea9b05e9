"""Random paged steps for the tests of the Triton kernels: metadata, a cache of noise, a strided query."""

from __future__ import annotations

import mmap
import random
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tokenloom.kernels import byte_cache
from tokenloom.kernels.contract import AttentionMetadata, AttentionSpec
from tokenloom.tests.workers.paged_run import make_metadata

NUM_LAYERS = 2
MAP_NORESERVE = 0x4000  # of Linux; mmap has its name since Python 3.13 only


@dataclass(frozen=True)
class PagedStep:
    """One step: decode rows first, then the others; blocks scattered over the pool."""

    query: Tensor
    kv_cache: Tensor
    metadata: AttentionMetadata
    spec: AttentionSpec


def paged_step(
    rng: random.Random,
    decode_lengths: list[int],
    prefill_rows: list[tuple[int, int]],
    dtype: torch.dtype,
    head_dim: int,
    group: int,
    num_kv_heads: int,
    block_size: int,
    window: int | None,
    bytes_of: torch.dtype | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    bias: Tensor | None = None,
) -> PagedStep:
    """decode_lengths: keys of each decode row, its own included; prefill_rows: (cached, new) tokens of each; bytes_of:
    dtype of a cache of bytes."""
    sizes = [(length - 1, 1) for length in decode_lengths] + prefill_rows
    num_blocks = 1 + sum(-(-(computed + new) // block_size) for computed, new in sizes)
    free = list(range(1, num_blocks))
    rng.shuffle(free)
    rows = [(c, n, [free.pop() for _ in range(-(-(c + n) // block_size))]) for c, n in sizes]
    metadata = make_metadata(rows, block_size)
    generator = torch.Generator().manual_seed(rng.getrandbits(32))
    shape = (num_blocks, NUM_LAYERS, 2, num_kv_heads, block_size, head_dim)
    kv_cache = torch.randn(shape, generator=generator).to(dtype)
    if bytes_of is not None:
        kv_cache = as_bytes(kv_cache, bytes_of)
    num_heads = group * num_kv_heads
    heads = torch.randn(metadata.query_starts_host[-1], num_heads + 2 * num_kv_heads, head_dim, generator=generator)
    spec = AttentionSpec(head_dim**-0.5, window, softcap, sinks, bias)
    return PagedStep(heads.to(dtype)[:, :num_heads], kv_cache, metadata, spec)


def far_away(step: PagedStep) -> PagedStep:
    """The same with its blocks past element 2^31 of a cache, of which only they take memory.

    As much lies in front of the cache: an offset that is cut to 32 bits finds zeros there, and ends no process.
    """
    near, block_size = step.kv_cache, step.kv_cache.shape[4]
    block_elements = near[0].numel()
    first = (1 << 31) // block_elements + 1
    num_bytes = (2 * first * block_elements + near.numel()) * near.element_size()
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
    kv_cache = torch.frombuffer(pages, dtype=near.dtype)[first * block_elements :].view(-1, *near.shape[1:])
    kv_cache[first:] = near
    tables, slots = step.metadata.block_tables + first, step.metadata.slots + first * block_size
    return replace(step, kv_cache=kv_cache, metadata=replace(step.metadata, block_tables=tables, slots=slots))


def as_bytes(kv_cache: Tensor, dtype: torch.dtype) -> Tensor:
    """The same keys and values in 8 bits."""
    numbers, scales = byte_cache.encode(kv_cache, dtype)
    tiles = torch.cat([numbers.flatten(-2), scales.view(dtype)], dim=-1)
    return tiles.unflatten(-1, (kv_cache.shape[-2], -1))


def from_bytes(kv_cache: Tensor) -> Tensor:
    return byte_cache.decode(kv_cache.flatten(-2), kv_cache.shape[-2], torch.float32)


def next_number(stored: Tensor, dtype: torch.dtype) -> Tensor:
    """The largest distance from stored elements [..., D] to those that a rounding apart may give."""
    largest = stored.abs().amax(-1, keepdim=True)
    if dtype == torch.int8:
        return largest / 127
    return torch.maximum(stored.abs() / 8, largest / 448 / 512)
