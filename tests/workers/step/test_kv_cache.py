"""The caches of all KV groups are views of one buffer, block k of a group being its k-th part of the group's size."""

from __future__ import annotations

import pytest
import torch

from tokenloom.ipc.errors import ProtocolError
from tokenloom.ipc.kv.pool_shape import PoolShape
from tokenloom.workers.step.kv_cache import KVCacheSpec, KVPool
from tokenloom.workers.step.state_cache import StateShape, StateSpec


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.uint8])
def test_block_k_of_a_group_is_its_kth_part_of_the_buffer(dtype: torch.dtype) -> None:
    specs = [KVCacheSpec(3, 1, 8, 4, dtype), KVCacheSpec(2, 2, 12, 4, dtype)]
    shape = PoolShape.of(1 << 16, [spec.block_bytes for spec in specs])
    pool = KVPool(specs, shape, torch.device("cpu"))
    assert len(pool.buffer) == shape.num_bytes and not pool.buffer.any()
    pool.buffer.copy_(torch.arange(len(pool.buffer)) % 251)
    for group, (spec, cache) in enumerate(zip(specs, pool.caches, strict=True)):
        assert cache.shape == spec.shape(shape.num_blocks(group)) and cache.is_contiguous()
        parts = pool.buffer[: len(cache) * spec.block_bytes].view(len(cache), -1)
        assert torch.equal(cache.view(torch.uint8).flatten(1), parts)
        assert torch.equal(pool.blocks[group], parts) and pool.blocks[group].data_ptr() == pool.buffer.data_ptr()


def test_the_bytes_of_blocks_with_states_are_those_of_all_their_layers() -> None:
    spec, states = KVCacheSpec(1, 1, 8, 4, torch.float32), StateSpec(2, StateShape(2, 4, 8, 3, 16), torch.bfloat16)
    shape = PoolShape.of(1 << 16, [spec.block_bytes, states.block_bytes])
    pool = KVPool([spec], shape, torch.device("cpu"), states)
    assert pool.states is not None and len(pool.blocks) == 2
    noise = torch.randint(0, 256, pool.blocks[1].shape, dtype=torch.uint8)
    pool.blocks[1].copy_(noise)
    start = states.layer_bytes  # of the second layer
    for view in (pool.states.scan[1][3], pool.states.conv[1][3]):
        end = start + view.numel() * view.itemsize
        assert torch.equal(view.contiguous().view(torch.uint8).flatten(), noise[3, start:end])
        start = end


def test_a_pool_for_blocks_of_other_sizes_is_refused() -> None:
    spec = KVCacheSpec(1, 1, 8, 4, torch.float32)
    with pytest.raises(ProtocolError, match=r"a pool for blocks of \(8,\) bytes is given \(256,\)"):
        KVPool([spec], PoolShape(4, 8, (8,)), torch.device("cpu"))
