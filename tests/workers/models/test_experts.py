"""Logits of models with experts, and of those whose layers differ, equal those of transformers in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from tokenloom.ipc.errors import ConfigError
from tokenloom.ipc.spec.models.model_config import ModelConfig
from tokenloom.ipc.spec.models.model_file import load_model_config
from tokenloom.kernels.select import levels_up_to, select_ops
from tokenloom.tests.support.checkpoints import tiny_checkpoint
from tokenloom.tests.support.quantized_checkpoints import mxfp4_pair
from tokenloom.tests.support.today import some
from tokenloom.tests.workers.models.test_decoder import oracle, prompts_of, run_schedule
from tokenloom.tests.workers.paged_run import CPU, PagedRun, load
from tokenloom.workers.machine.parallel import ParallelGroup
from tokenloom.workers.models.load import read_model
from tokenloom.workers.weights.checkpoint import Checkpoint

TOLERANCE = 1e-5  # of the largest logit
LENGTHS = {"a": 45, "b": 1, "c": 22}
STEPS = [{"a": 7}, {"a": 20, "c": 5}, {"a": 1, "b": 1, "c": 2}, *[{"a": 1, "c": 1}] * 3, {"a": 14, "c": 12}]

FULL, SLIDING = "full_attention", "sliding_attention"
SHARED_KEYS = {
    "num_hidden_layers": 5,
    "layer_types": [SLIDING, FULL, SLIDING, SLIDING, FULL],
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
    "output_hidden_states": True,  # without it transformers' shortcut for shared keys fails
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {  # family, fields of config.json
    "gpt_oss": ("gpt_oss", {}),
    "gpt_oss, window in the second half, no bias in attention": (
        "gpt_oss",
        {
            "layer_types": [FULL, FULL, SLIDING],
            "attention_bias": False,
            "rope_scaling": {"rope_type": "default"},
        },
    ),
    "glm4_moe, groups, norms of heads": ("glm4_moe", {}),
    "glm4_moe, one group, two dense layers": (
        "glm4_moe",
        {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 2, "use_qk_norm": False, "n_shared_experts": 2},
    ),
    "dots1": ("dots1", {}),
    "dots1, weights not normalized, windows": (
        "dots1",
        {"norm_topk_prob": False, "sliding_window": 8, "max_window_layers": 1, "first_k_dense_replace": 0},
    ),
    "ernie4_5_moe": ("ernie4_5_moe", {}),
    "ernie4_5_moe, no shared expert, each second layer": (
        "ernie4_5_moe",
        {"moe_num_shared_experts": 0, "moe_layer_interval": 2, "moe_layer_end_index": -1},
    ),
    "solar_open": ("solar_open", {}),
    "minimax_m2": ("minimax_m2", {}),
    "olmoe": ("olmoe", {}),
    "qwen2_moe": ("qwen2_moe", {}),
    "qwen2_moe, windows, weights normalized": (
        "qwen2_moe",
        {"use_sliding_window": True, "norm_topk_prob": True, "decoder_sparse_step": 2, "mlp_only_layers": []},
    ),
    "gemma4, dense": ("gemma4", {}),
    "gemma4, experts beside the MLP": ("gemma4_moe", {}),
    "gemma4 in a folder with a vision tower": ("gemma4_vision", {}),
    "gemma4, keys shared by the last layers": ("gemma4", SHARED_KEYS),
    "gemma4, values of their own, full layers by default": (
        "gemma4",
        {"attention_k_eq_v": False, "layer_types": None, "final_logit_softcapping": None},
    ),
    "gemma4, full heads no larger than sliding ones": (
        "gemma4_moe",
        {"global_head_dim": 16, "num_global_key_value_heads": 2},
    ),
}


def logits_of(folder: Path, config: ModelConfig, tokens: dict[str, list[int]]) -> dict[str, Tensor]:
    with Checkpoint(folder, torch.float32, CPU, config.quantization) as checkpoint:  # tensors may remain unread
        model = read_model(checkpoint, config, 512, select_ops(CPU, torch.float32), ParallelGroup())
    return run_schedule(PagedRun(model, 16), tokens, STEPS)


def check(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, logits in expected.items():
        torch.testing.assert_close(actual[name], logits, atol=TOLERANCE * logits.abs().max().item(), rtol=0)


@pytest.mark.parametrize("case", some(list(CASES), 5))
def test_logits_equal_transformers_in_chunks_beside_decodes(case: str, tmp_path: Path) -> None:
    family, fields = CASES[case]
    folder = tiny_checkpoint(tmp_path, family, seed=len(case), **fields)
    tokens = prompts_of(LENGTHS, 256, seed=1)
    expected = oracle(folder, tokens)
    check(logits_of(folder, load_model_config(folder), tokens), expected)


def test_experts_in_mxfp4_give_the_logits_of_transformers_on_their_floats(tmp_path: Path) -> None:
    quantized, plain = mxfp4_pair(tmp_path, intermediate_size=96)
    tokens = prompts_of(LENGTHS, 256, seed=2)
    expected = oracle(plain, tokens)
    check(logits_of(quantized, load_model_config(quantized), tokens), expected)


@pytest.mark.parametrize(
    "family", some([family for family in (*dict(CASES.values()), "mixtral", "qwen3_moe") if "gemma4" not in family], 3)
)
def test_a_step_is_one_call_of_the_c_kernels(family: str, tmp_path: Path) -> None:
    if not levels_up_to():
        pytest.skip("needs the C kernels")
    assert load(tiny_checkpoint(tmp_path, family)).is_fused


@pytest.mark.parametrize(
    ("family", "fields", "message"),
    [
        ("glm4_moe", {"n_group": 3}, "8 experts, n_group 3 and topk_group 2 do not fit together"),
        ("glm4_moe", {"topk_group": 5}, "8 experts, n_group 4 and topk_group 5 do not fit together"),
        ("glm4_moe", {"hidden_act": "mish"}, "hidden_act mish is not supported, known are silu"),
        (
            "ernie4_5_moe",
            {"use_bias": True},
            "use_bias true has no native layers in a model with experts: leave out --model-impl native",
        ),
        ("gpt_oss", {"swiglu_alpha": 1.5}, "swiglu_alpha 1.5 has no native layers, known is 1.702"),
        ("qwen2_moe", {"num_experts_per_tok": 9}, "num_experts_per_tok 9 is above num_experts 8"),
        (
            "gemma4",
            {"hidden_size_per_layer_input": 8},
            "hidden_size_per_layer_input. have no native layers: leave out",
        ),
        ("gemma4", {"use_bidirectional_attention": "all"}, "use_bidirectional_attention all is not supported"),
        (
            "gemma4",
            {"num_kv_shared_layers": 1},
            "num_kv_shared_layers 1 leaves no layer of some type with its own keys",
        ),
    ],
)
def test_fields_without_native_layers_are_refused(
    family: str, fields: dict[str, Any], message: str, tmp_path: Path
) -> None:
    folder = tiny_checkpoint(tmp_path, family)
    config = (folder / "config.json").read_bytes()
    (folder / "config.json").write_bytes(msgspec.json.encode(msgspec.json.decode(config) | fields))
    with pytest.raises(ConfigError, match=message):
        load_model_config(folder, implementation="native")
