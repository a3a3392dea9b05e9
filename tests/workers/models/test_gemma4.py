"""The cache of Gemma 4, whose layers have heads of their own sizes or share keys, and its forms that are not native."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tokenloom.ipc.spec.models.model_file import load_model_config
from tokenloom.kernels import byte_cache
from tokenloom.kernels.reference import ReferenceOps
from tokenloom.tests.support.checkpoints import tiny_checkpoint
from tokenloom.tests.workers.models.test_experts import SHARED_KEYS
from tokenloom.tests.workers.paged_run import load, make_metadata
from tokenloom.workers.step.kv_cache import KVCacheSpec, layer_cache

FULL, SLIDING = "full_attention", "sliding_attention"


def test_the_cache_has_pages_of_the_largest_layer_and_none_for_layers_that_share_keys(tmp_path: Path) -> None:
    (spec,) = load(tiny_checkpoint(tmp_path, "gemma4", **SHARED_KEYS)).kv_cache_specs(4, torch.float32)
    assert spec == KVCacheSpec(3, 2, 16, 4, torch.float32)  # 2 heads of 16 and 1 of 32 have equally many elements


@pytest.mark.parametrize("dtype", [torch.float32, *byte_cache.LARGEST])
def test_layers_of_different_shapes_do_not_touch_each_other_s_pages(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    shapes, block_size = [(4, 8), (2, 16), (1, 12)], 4
    cache = KVCacheSpec(3, 4, 8, block_size, dtype).allocate(7, torch.device("cpu"))
    ops, metadata = ReferenceOps(), make_metadata([(0, 10, [5, 2, 6])], block_size)
    written = [torch.randn(2, 10, *shape) for shape in shapes]
    views = [layer_cache(cache, layer, *shape) for layer, shape in enumerate(shapes)]
    for view, (keys, values) in zip(views, written, strict=True):
        ops.store_kv(keys, values, view, 0, metadata)
    for view, sides in zip(views, written, strict=True):
        for side in range(2):
            stored = view[[5, 2, 6], 0, side].transpose(1, 2)  # [blocks, block_size, heads, width]
            if byte_cache.is_bytes(view):
                tiles = view[[5, 2, 6], 0, side].flatten(2)
                stored = byte_cache.decode(tiles, block_size, torch.float32).transpose(1, 2)
            tolerance = 0.0 if dtype == torch.float32 else 0.3
            torch.testing.assert_close(stored.flatten(0, 1)[:10], sides[side], atol=tolerance, rtol=0)


def test_a_model_with_embeddings_of_each_layer_takes_transformers_layers(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path, "gemma4", hidden_size_per_layer_input=8, vocab_size_per_layer_input=271)
    assert load_model_config(folder).implementation == "transformers"
    assert load_model_config(tiny_checkpoint(tmp_path / "native", "gemma4")).implementation == "native"
