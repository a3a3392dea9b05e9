"""Blocks of states: each byte belongs to one state of one layer, and each layer's states begin at a cache line."""

from __future__ import annotations

import pytest
import torch

from tokenloom.workers.step.state_cache import ALIGNMENT, StateShape, StateSpec

SHAPES = [StateShape(3, 5, 7, 3, 11), StateShape(1, 0, 1, 2, 9), StateShape(2, 8, 16, 0, 4)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_states_of_layers_and_blocks_share_no_byte(shape: StateShape, dtype: torch.dtype) -> None:
    spec, num_blocks = StateSpec(3, shape, dtype), 4
    buffer = torch.zeros(num_blocks * spec.block_bytes + 3, dtype=torch.uint8)
    views = spec.view(buffer)
    num_written = 0
    for layer in range(spec.num_layers):
        assert views.scan[layer].shape == (num_blocks, shape.num_heads, shape.key_dim, shape.value_dim)
        assert views.conv[layer].shape == (num_blocks, shape.num_inputs, shape.num_channels)
        for block in range(num_blocks):
            for view in (views.scan[layer], views.conv[layer]):
                assert not view[block].any()
                view[block] = torch.nan
                num_written += view[block].nbytes
                first, last = block * spec.block_bytes, (block + 1) * spec.block_bytes
                assert not view[block].numel() or first <= view[block].data_ptr() - buffer.data_ptr() < last
            assert views.scan[layer][block].data_ptr() % 4 == 0
    assert spec.block_bytes % ALIGNMENT == 0
    assert spec.block_bytes * num_blocks - num_written < ALIGNMENT * spec.num_layers * num_blocks
