"""Each field of ModelConfig changes the logits of a model that has it: else the comparisons with transformers prove
less than they say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from tokenloom.ipc.models.model_config import ModelConfig
from tokenloom.ipc.models.model_file import load_model_config
from tokenloom.kernels.reference import ReferenceOps
from tokenloom.tests.support.checkpoints import tiny_checkpoint
from tokenloom.tests.support.today import some
from tokenloom.tests.workers.models.test_decoder import prompts_of
from tokenloom.tests.workers.models.test_families import TOLERANCE
from tokenloom.tests.workers.paged_run import CPU, PagedRun
from tokenloom.workers.models.decoder import read_model
from tokenloom.workers.parallel import ParallelGroup
from tokenloom.workers.weights.checkpoint import Checkpoint

FLIPS: dict[str, dict[str, Any]] = {  # by family: other values of fields; a path through a list leads to each element
    "cohere2": {"layers.rope": 0},
    "ernie4_5_moe": {"experts.has_choice_bias": False, "experts.is_normalized": False},
    "exaone4": {"layers.rope": 0},
    "falcon_40b": {"names.mlp_norm": "ln_attn"},
    "gemma": {"embedding_scale": 1.0, "norm.offset": 0.0, "norm.eps": 1e-6, "activation.kind": "silu"},
    "gemma2": {"attention_softcap": 0.0, "logit_softcap": 0.0, "attention_scale": 0.3, "layers.window": None},
    "gemma3_text": {"layers.rope": 0, "ropes.theta": 99.0, "head_norms": None},
    "gemma4": {
        "value_norm": None,
        "has_layer_scale": False,
        "attention_scale": 0.25,
        "embedding_scale": 1.0,
        "logit_softcap": 0.0,
        "head_norms": None,
        "layers.rope": None,
        "layers.window": None,
    },
    "gemma4_moe": {"experts.is_normalized": False, "experts.top_k": 2, "experts.activation": {"kind": "silu"}},
    "glm": {"ropes.is_paired": False},
    "glm4": {"names.attention_output_norm": "", "names.mlp_output_norm": ""},
    "glm4_moe": {
        "experts.score": "softmax",
        "experts.has_choice_bias": False,
        "experts.num_groups": 1,
        "experts.top_groups": 3,
        "experts.group_score": "max",
        "experts.is_normalized": False,
        "experts.scale": 1.0,
        "experts.shared_size": 0,
        "head_norms": None,
    },
    "gpt2": {"num_learned_positions": 0},
    "gpt_neox": {"is_parallel": False, "names.qkv_layout": "stacked"},
    "gpt_oss": {
        "has_sinks": False,
        "has_output_bias": False,
        "experts.score": "softmax",
        "experts.has_bias": False,
        "experts.top_k": 2,
        "experts.activation.limit": 7.0,
        "experts.activation": {"kind": "silu"},
    },
    "granite": {"residual_scale": 1.0, "logit_scale": 1.0, "embedding_scale": 1.0},
    "hunyuan_v1_dense": {"head_norms.is_after_rope": False},
    "minimax_m2": {"experts.score": "softmax", "experts.has_choice_bias": False, "head_norms": None},
    "ministral3": {"query_scaling": None},
    "nemotron": {"norm.offset": 0.0, "activation.kind": "relu"},
    "olmo": {"norm.kind": "rms", "qkv_clip": 0.0},
    "olmo2": {"names.input_norm": "post_attention_layernorm"},
    "phi": {
        "is_parallel": False,
        "ropes.rotary_dim": 0,
        "has_head_bias": False,
        "has_qkv_bias": False,
        "has_output_bias": False,
        "has_mlp_bias": False,
    },
    "phi3": {"ropes.parameters.attention_factor": 1.0},
    "qwen2_moe": {"experts.has_shared_gate": False, "experts.is_normalized": True},
    "smollm3": {"layers.rope": 0},
    "starcoder2": {"norm.has_bias": False, "activation.kind": "relu"},
}


def flipped(config: ModelConfig, path: str, value: Any) -> ModelConfig:
    values = msgspec.to_builtins(config)
    *parents, last = path.split(".")
    places = [values]
    for name in parents:
        found = [place[name] for place in places]
        places = [each for inner in found for each in (inner if isinstance(inner, list) else [inner])]
    for place in places:
        place[last] = value
    return msgspec.convert(values, ModelConfig)


@pytest.mark.parametrize("family", some(list(FLIPS), 6))
def test_each_field_changes_the_logits(family: str, tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path, family, seed=1)
    config = load_model_config(folder)
    tokens = prompts_of({"a": 40}, config.vocab_size, seed=2)

    def logits_of(config: ModelConfig) -> torch.Tensor:
        with Checkpoint(folder, torch.float32, CPU, None) as checkpoint:  # tensors may remain unread
            model = read_model(checkpoint, config, 128, ReferenceOps(), ParallelGroup())
        return PagedRun(model, 8).step(tokens)["a"]

    right = logits_of(config)
    for path, value in FLIPS[family].items():
        changed = flipped(config, path, value)
        assert changed != config, path
        assert (logits_of(changed) - right).abs().max() > 10 * TOLERANCE * right.abs().max(), path
