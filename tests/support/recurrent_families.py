"""Tiny checkpoints of families with recurrent layers. HYBRIDS are those with native layers.

The fields of config.json follow the families' published files; each has layers of every kind, groups and experts where
the family has them, and chunks of its scan shorter than the prompts of tests.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tokenloom.ipc.spec.models.model_file import NATIVE
from tokenloom.scripts.bench.inputs.make_checkpoint import SHARD_BYTES

from .families import Config
from .family_checkpoints import write_family

SHAPE: Config = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 271,
    "max_position_embeddings": 512,
    "rms_norm_eps": 0.02,
}
DELTA_NET: Config = {
    **SHAPE,
    "head_dim": 16,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
}
EXPERTS: Config = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
}
MAMBA: Config = {
    **SHAPE,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_expand": 2,
    "mamba_d_state": 8,
    "mamba_n_groups": 2,
    "mamba_chunk_size": 5,
}

GRANITE: Config = {
    **MAMBA,
    "num_hidden_layers": 3,
    "layer_types": ["mamba", "attention", "mamba"],
    "mamba_n_groups": 1,
    "shared_intermediate_size": 24,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.4,
    "logits_scaling": 2.5,
    "attention_multiplier": 0.4,
}


def _named(model_type: str, architecture: str, base: Config, **fields: Any) -> Config:
    return {"architectures": [architecture], "model_type": model_type, **base, **fields}


RECURRENT: dict[str, Config] = {
    "qwen3_next": _named("qwen3_next", "Qwen3NextForCausalLM", DELTA_NET, **EXPERTS),
    "qwen3_5": _named("qwen3_5_text", "Qwen3_5ForCausalLM", DELTA_NET),
    "qwen3_5_moe": _named("qwen3_5_moe_text", "Qwen3_5MoeForCausalLM", DELTA_NET, **EXPERTS),
    "granite4": _named(
        "granitemoehybrid",
        "GraniteMoeHybridForCausalLM",
        GRANITE,
        num_local_experts=4,
        num_experts_per_tok=2,
    ),
    "bamba": _named("bamba", "BambaForCausalLM", MAMBA, num_hidden_layers=3, attn_layer_indices=[1]),
    "falcon_h1": _named(
        "falcon_h1", "FalconH1ForCausalLM", MAMBA, num_hidden_layers=2, mamba_d_ssm=128, head_dim=16, key_multiplier=0.7
    ),
    "falcon_h1_scaled": _named(
        "falcon_h1",
        "FalconH1ForCausalLM",
        MAMBA,
        num_hidden_layers=2,
        mamba_d_ssm=128,
        head_dim=16,
        mamba_rms_norm=True,
        mamba_norm_before_gate=True,
        key_multiplier=0.7,
        attention_in_multiplier=1.3,
        attention_out_multiplier=0.6,
        mlp_multipliers=[1.4, 0.7],
        ssm_multipliers=[0.8, 1.2, 0.9, 1.1, 1.3],
        ssm_in_multiplier=0.9,
        ssm_out_multiplier=0.8,
        embedding_multiplier=2.0,
        lm_head_multiplier=0.5,
    ),
    "nemotron_h": _named(
        "nemotron_h",
        "NemotronHForCausalLM",
        SHAPE,
        layers_block_type=["mamba", "mlp", "attention", "mamba"],
        head_dim=16,
        mamba_num_heads=8,
        mamba_head_dim=16,
        n_groups=2,
        ssm_state_size=8,
        chunk_size=5,
    ),
    "nemotron_h_moe": _named(
        "nemotron_h",
        "NemotronHForCausalLM",
        SHAPE,
        layers_block_type=["mamba", "moe", "attention", "moe"],
        head_dim=16,
        mamba_num_heads=8,
        mamba_head_dim=16,
        n_groups=2,
        ssm_state_size=8,
        chunk_size=5,
        n_routed_experts=8,
        num_experts_per_tok=3,
        n_group=4,
        topk_group=2,
        moe_intermediate_size=24,
        moe_shared_expert_intermediate_size=40,
        routed_scaling_factor=1.5,
    ),
    "lfm2": _named(
        "lfm2",
        "Lfm2ForCausalLM",
        SHAPE,
        num_hidden_layers=3,
        layer_types=["conv", "full_attention", "conv"],
        block_auto_adjust_ff_dim=False,
    ),
    "lfm2_moe": _named(
        "lfm2_moe",
        "Lfm2MoeForCausalLM",
        {name: value for name, value in SHAPE.items() if name != "rms_norm_eps"},
        num_hidden_layers=4,
        layer_types=["conv", "full_attention", "conv", "conv"],
        num_dense_layers=1,
        num_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=24,
        norm_eps=0.02,
    ),
    "jamba": _named(
        "jamba",
        "JambaForCausalLM",
        SHAPE,
        num_hidden_layers=4,
        attn_layer_period=4,
        attn_layer_offset=2,
        expert_layer_period=2,
        expert_layer_offset=1,
        num_experts=4,
        num_experts_per_tok=2,
        mamba_d_state=8,
        mamba_dt_rank=4,
    ),
    "mamba2": _named(
        "mamba2",
        "Mamba2ForCausalLM",
        {"hidden_size": 64, "vocab_size": 271},
        num_hidden_layers=2,
        num_heads=8,
        head_dim=16,
        n_groups=2,
        state_size=8,
        chunk_size=5,
    ),
}

UNEVEN: dict[str, Config] = {  # transformers computes whole prompts and single tokens with different results
    "olmo_hybrid": _named(
        "olmo_hybrid",
        "OlmoHybridForCausalLM",
        DELTA_NET,
        rope_parameters={"rope_type": "default", "rope_theta": None},
        linear_num_value_heads=2,
    ),
    "granite4_dense": _named(
        "granitemoehybrid",
        "GraniteMoeHybridForCausalLM",
        GRANITE,
        num_local_experts=0,
        position_embedding_type="rope",
        time_step_limit=[0.2, 0.7],
    ),
}

OF_IMAGES: dict[str, Config] = {  # models of images, of which the language model is served
    kind: {
        "architectures": [architecture],
        "model_type": kind,
        "text_config": RECURRENT[kind],
        "vision_config": {
            "depth": 1,
            "hidden_size": 32,
            "num_heads": 2,
            "intermediate_size": 48,
            "out_hidden_size": 64,
        },
        "image_token_id": 260,
        "video_token_id": 261,
        "vision_start_token_id": 262,
        "vision_end_token_id": 263,
    }
    for kind, architecture in (
        ("qwen3_5", "Qwen3_5ForConditionalGeneration"),
        ("qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration"),
    )
}
OTHERS = {**UNEVEN, **{f"{kind}_vision": config for kind, config in OF_IMAGES.items()}}
HYBRIDS = [family for family, config in (RECURRENT | OTHERS).items() if config["architectures"][0] in NATIVE]


def config_of(family: str) -> Config:
    """Return config.json of a family of RECURRENT or OTHERS."""
    return (RECURRENT | OTHERS)[family]


def recurrent_checkpoint(folder: Path, family: str, dtype: str = "float32", seed: int = 0, **fields: Any) -> Path:
    """Write a checkpoint of a family of RECURRENT or OTHERS, with fields replaced, into `folder` and return it."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)  # of the decays, whose means the noise keeps
        return write_family(folder, {**config_of(family), **fields}, dtype, seed, SHARD_BYTES)
