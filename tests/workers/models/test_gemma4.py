"""Gemma 4: layers with heads of their own sizes, keys as values, shared keys, and experts beside the MLP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from tokenloom.ipc.errors import ConfigError
from tokenloom.ipc.models.model_file import load_model_config
from tokenloom.kernels import fp8_cache
from tokenloom.kernels.reference import ReferenceOps
from tokenloom.tests.support.checkpoints import tiny_checkpoint
from tokenloom.tests.support.today import some
from tokenloom.tests.workers.models.test_decoder import oracle, prompts_of
from tokenloom.tests.workers.models.test_experts import LENGTHS, check, logits_of
from tokenloom.tests.workers.paged_run import load, make_metadata
from tokenloom.workers.kv_cache import KVCacheSpec, layer_cache

FULL, SLIDING = "full_attention", "sliding_attention"
SHARED = {
    "num_hidden_layers": 5,
    "layer_types": [SLIDING, FULL, SLIDING, SLIDING, FULL],
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
    "output_hidden_states": True,  # without it transformers' shortcut for shared keys fails
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {  # family, fields of config.json
    "dense": ("gemma4", {}),
    "experts beside the MLP": ("gemma4_moe", {}),
    "in a folder with a vision tower": ("gemma4_vision", {}),
    "keys shared by the last layers": ("gemma4", SHARED),
    "values of their own, full layers by default": (
        "gemma4",
        {"attention_k_eq_v": False, "layer_types": None, "final_logit_softcapping": None},
    ),
    "full heads no larger than sliding ones": ("gemma4_moe", {"global_head_dim": 16, "num_global_key_value_heads": 2}),
}


@pytest.mark.parametrize("case", some(list(CASES), 2))
def test_logits_equal_transformers_in_chunks_beside_decodes(case: str, tmp_path: Path) -> None:
    family, fields = CASES[case]
    folder = tiny_checkpoint(tmp_path, family, seed=len(case) + 1, **fields)  # with 5, float32 alone errs by 3e-5
    tokens = prompts_of(LENGTHS, 256, seed=1)
    check(logits_of(folder, load_model_config(folder), tokens), oracle(folder, tokens))


def test_the_cache_has_pages_of_the_largest_layer_and_none_for_layers_that_share_keys(tmp_path: Path) -> None:
    (spec,) = load(tiny_checkpoint(tmp_path, "gemma4", **SHARED)).kv_cache_specs(4, torch.float32)
    assert spec == KVCacheSpec(3, 2, 16, 4, torch.float32)  # 2 heads of 16 and 1 of 32 have equally many elements


@pytest.mark.parametrize("dtype", [torch.float32, fp8_cache.DTYPE])
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
            if dtype == fp8_cache.DTYPE:
                tiles = view[[5, 2, 6], 0, side].flatten(2)
                stored = fp8_cache.decode(tiles, block_size, torch.float32).transpose(1, 2)
            tolerance = 0.0 if dtype == torch.float32 else 0.3
            torch.testing.assert_close(stored.flatten(0, 1)[:10], sides[side], atol=tolerance, rtol=0)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_size_per_layer_input": 8}, "hidden_size_per_layer_input. have no native layers: leave out"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention all is not supported"),
        ({"num_kv_shared_layers": 1}, "num_kv_shared_layers 1 leaves no layer of some type with its own keys"),
    ],
)
def test_unsupported_models_are_refused(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path, "gemma4")
    config = (folder / "config.json").read_bytes()
    (folder / "config.json").write_bytes(msgspec.json.encode(msgspec.json.decode(config) | fields))
    with pytest.raises(ConfigError, match=message):
        load_model_config(folder, implementation="native")


def test_a_model_with_embeddings_of_each_layer_takes_transformers_layers(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path, "gemma4", hidden_size_per_layer_input=8, vocab_size_per_layer_input=271)
    assert load_model_config(folder).implementation == "transformers"
    assert load_model_config(tiny_checkpoint(tmp_path / "native", "gemma4")).implementation == "native"
