"""Layers are grouped by window and shape, and slabs have room for the blocks of every group."""

from __future__ import annotations

from random import Random
from typing import Any

import msgspec
import pytest

from tokenloom.ipc.errors import ConfigError
from tokenloom.ipc.kv.pool_shape import MIN_BLOCKS_OF_SLAB, PoolShape
from tokenloom.ipc.spec.config.engine_config import EngineConfig
from tokenloom.ipc.spec.config.option_ranges import AUTO_LENGTH
from tokenloom.ipc.spec.kv.kv_groups import KVGroup, kv_groups, names_of
from tokenloom.ipc.spec.models.model_config import LayerConfig, ModelConfig
from tokenloom.tests.support.engine_specs import new_spec

FULL, WINDOW, WIDE = LayerConfig(), LayerConfig(window=32), LayerConfig(num_kv_heads=1, head_dim=64)


def model_of(*layers: LayerConfig) -> ModelConfig:
    return msgspec.structs.replace(new_spec().model, layers=list(layers), num_layers=len(layers))


@pytest.mark.parametrize(
    ("layers", "groups"),
    [
        ([FULL, FULL], [(None, (0, 1))]),
        ([WINDOW, FULL, WINDOW], [(None, (1,)), (32, (0, 2))]),
        ([LayerConfig(window=8), WINDOW], [(32, (1,)), (8, (0,))]),  # none sees all
        ([WINDOW, LayerConfig(window=512), LayerConfig(window=600)], [(None, (1, 2)), (32, (0,))]),
        ([FULL, WINDOW, LayerConfig(window=32, kv_layer=1)], [(None, (0,)), (32, (1,))]),
        ([WIDE, FULL], [(None, (0,)), (None, (1,))]),
    ],
)
def test_layers_with_equal_windows_and_shapes_are_a_group(layers: list[LayerConfig], groups: list[Any]) -> None:
    found = kv_groups(model_of(*layers), 512, is_grouped=True)
    assert [(group.window, group.layers) for group in found] == groups
    assert {group.head_dim for group in found} == {own.head_dim or 8 for own in layers}


def test_one_group_for_all_has_the_widest_shape_and_too_many_groups_are_refused() -> None:
    assert kv_groups(model_of(WINDOW, WIDE), 512, is_grouped=False) == [KVGroup(None, (0, 1), 1, 64)]
    with pytest.raises(ConfigError, match="9 kinds of windows and KV heads, 8 are the most"):
        kv_groups(model_of(*(LayerConfig(window=n) for n in range(1, 10))), 512, is_grouped=True)


def test_a_window_needs_the_blocks_that_its_next_token_sees_and_holds_those_of_a_step_besides() -> None:
    window, full = KVGroup(33, (0,), 1, 64), KVGroup(None, (1,), 1, 64)
    for first in range(300):  # the next token, first in a block or not
        seen = {token // 16 for token in range(max(first - 32, 0), first)}
        if first % 16 == 0:
            assert len(seen) == window.num_needed(first // 16, 16) <= full.num_needed(first // 16, 16) == first // 16
        for last in range(first, min(first + 20, 300)):
            held = {token // 16 for token in range(max(first - 32, 0), last + 1)}
            assert len(held) <= window.num_held(300, 20, 16) < full.num_held(300, 20, 16) == 19
    assert window.num_held(40, 20, 16) == 3, "no more than all"


def test_slabs_hold_enough_whole_blocks_and_one_group_has_a_slab_for_each_block() -> None:
    assert PoolShape.of(100, [7]) == PoolShape(14, 7, (7,)) and PoolShape(14, 7, (7,)).num_slabs_for([13]) == 14
    assert PoolShape.of(1 << 12, [10, 52]).slab_bytes == 5 * 52 == 26 * 10, "no slab's end cuts a block"
    random = Random(0)
    for _ in range(100):
        sizes = [64 * random.randint(1, 60) for _ in range(random.randint(2, 4))]
        pool = PoolShape.of(1 << 22, sizes)
        assert 0 <= (1 << 22) - pool.num_bytes < pool.slab_bytes and pool.slab_bytes % max(sizes) == 0
        for group, size in enumerate(sizes):
            num_whole = [0] * pool.num_slabs
            for block in range(pool.num_blocks(group)):
                first, last = (byte // pool.slab_bytes for byte in (block * size, (block + 1) * size - 1))
                num_whole[first] += first == last
            assert min(num_whole) >= MIN_BLOCKS_OF_SLAB - 1 or pool.slab_bytes % size == 0
            for count in (1, min(num_whole), min(num_whole) + 1, 999):
                asked = [count if other == group else 0 for other in range(len(sizes))]
                assert (min(num_whole) - 1) * (pool.num_slabs_for(asked) - 2) < count, "nearly the least"
                assert count <= min(num_whole) * (pool.num_slabs_for(asked) - 1)


def test_a_pool_has_room_for_as_many_requests_as_their_slabs_allow() -> None:
    pool = PoolShape(9, 32, (16, 1))  # 2 or 32 blocks in each of 8 slabs
    assert [pool.num_fitting([2, 8], most) for most in (99, 3)] == [6, 3]
    assert pool.num_fitting([99, 0], 9) == 0


def test_groups_of_equal_windows_have_names_of_their_own() -> None:
    groups = [KVGroup(None, (0,), 1, 64), KVGroup(8, (1,), 1, 64), KVGroup(8, (2,), 2, 64)]
    assert names_of(groups) == ["attention", "window 8, 1 x 64", "window 8, 2 x 64"]


@pytest.mark.parametrize(("num_slabs", "length"), [(2, 16), (9, 128), (99, 512)])
def test_an_automatic_length_fits_into_the_pool(num_slabs: int, length: int) -> None:
    for chosen, expected in ((AUTO_LENGTH, length), (512, 512)):
        spec = new_spec(config=EngineConfig(max_model_len=chosen))
        assert spec.fitted_model_len(PoolShape(num_slabs, 5, (5,))) == expected
