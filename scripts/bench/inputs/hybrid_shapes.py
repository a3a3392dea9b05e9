"""Shapes of the tensors of hybrids, for make_checkpoint.py: models in which some layers keep a state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

HYBRID_KINDS: dict[str, dict[str, object]] = {  # fields of config.json that a family adds to Llama's or replaces
    "qwen3_5_text": {
        "architectures": ["Qwen3_5ForCausalLM"],
        "rms_norm_eps": 1e-6,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
    },
    "bamba": {
        "architectures": ["BambaForCausalLM"],
        "mamba_d_conv": 4,
        "mamba_d_head": 64,
        "mamba_d_state": 128,
        "mamba_n_groups": 1,
        "mamba_expand": 2,
    },
    "granitemoehybrid": {
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "mamba_d_conv": 4,
        "mamba_d_head": 64,
        "mamba_d_state": 128,
        "mamba_n_groups": 1,
        "mamba_expand": 2,
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "attention_multiplier": 0.125,
        "residual_multiplier": 0.5,
    },
    "lfm2": {"architectures": ["Lfm2ForCausalLM"], "conv_L_cache": 3, "block_auto_adjust_ff_dim": False},
}
FINAL_NORMS = {"bamba": "model.final_layernorm", "lfm2": "model.embedding_norm"}  # of others model.norm

Shapes = dict[str, tuple[int, ...]]


def qwen_fields(num_layers: int, key_heads: int, value_heads: int) -> dict[str, Any]:
    """Return the fields of a model in which each fourth layer attends."""
    kinds = ["full_attention" if layer % 4 == 3 else "linear_attention" for layer in range(num_layers)]
    return {"layer_types": kinds, "linear_num_key_heads": key_heads, "linear_num_value_heads": value_heads}


def layer_shapes(config: Mapping[str, Any], layer: int) -> Shapes:
    """Return the tensors of a layer by name behind the layer's prefix, with their shapes."""
    kind, hidden, inner = config["model_type"], config["hidden_size"], config["intermediate_size"]
    matrices, vectors = _mixer_shapes(config, attends=_attends(config, layer))
    if kind == "lfm2":
        vectors |= {"operator_norm": hidden, "ffn_norm": hidden}
        names = ("feed_forward.w1", "feed_forward.w3", "feed_forward.w2")
    elif kind == "bamba":
        vectors |= {"input_layernorm": hidden, "pre_ff_layernorm": hidden}
        names = ("feed_forward.gate_proj", "feed_forward.up_proj", "feed_forward.down_proj")
    else:
        vectors |= {"input_layernorm": hidden, "post_attention_layernorm": hidden}
        names = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    if kind == "granitemoehybrid":
        shared = config["shared_intermediate_size"]
        matrices |= {
            "shared_mlp.input_linear": (2 * shared, hidden),
            "shared_mlp.output_linear": (hidden, shared),
        }
    else:
        matrices |= dict(zip(names, ((inner, hidden), (inner, hidden), (hidden, inner)), strict=True))
    shapes: Shapes = {f"{name}.weight": shape for name, shape in matrices.items()}
    for name, size in vectors.items():
        shapes[f"{name}.weight" if name.endswith("norm") else name] = (size,)
    return shapes


def _attends(config: Mapping[str, Any], layer: int) -> bool:
    if config["model_type"] == "bamba":
        return layer in config["attn_layer_indices"]
    return config["layer_types"][layer] in ("full_attention", "attention")


def _mixer_shapes(config: Mapping[str, Any], *, attends: bool) -> tuple[Shapes, dict[str, int]]:
    """Return the matrices of what mixes the tokens, and the vectors."""
    kind, hidden = config["model_type"], config["hidden_size"]
    if attends:
        return _attention_shapes(config)
    if kind == "lfm2":
        taps = (hidden, 1, config["conv_L_cache"])
        return {"conv.in_proj": (3 * hidden, hidden), "conv.conv": taps, "conv.out_proj": (hidden, hidden)}, {}
    if kind == "qwen3_5_text":
        return _delta_shapes(config)
    num_values = config["mamba_expand"] * hidden
    heads, states = num_values // config["mamba_d_head"], config["mamba_n_groups"] * config["mamba_d_state"]
    num_channels = num_values + 2 * states
    matrices: Shapes = {
        "mamba.in_proj": (num_values + num_channels + heads, hidden),
        "mamba.conv1d": (num_channels, 1, config["mamba_d_conv"]),
        "mamba.out_proj": (hidden, num_values),
    }
    vectors = {"mamba.conv1d.bias": num_channels, "mamba.norm": num_values}
    return matrices, vectors | dict.fromkeys(("mamba.A_log", "mamba.D", "mamba.dt_bias"), heads)


def _attention_shapes(config: Mapping[str, Any]) -> tuple[Shapes, dict[str, int]]:
    hidden, head_dim = config["hidden_size"], config["head_dim"]
    query, key = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    is_lfm2, has_gate = config["model_type"] == "lfm2", config["model_type"] == "qwen3_5_text"
    matrices: Shapes = {
        "self_attn.q_proj": (2 * query if has_gate else query, hidden),
        "self_attn.k_proj": (key, hidden),
        "self_attn.v_proj": (key, hidden),
        "self_attn.out_proj" if is_lfm2 else "self_attn.o_proj": (hidden, query),
    }
    norms = ("q_layernorm", "k_layernorm") if is_lfm2 else ("q_norm", "k_norm") if has_gate else ()
    return matrices, {f"self_attn.{norm}": head_dim for norm in norms}


def _delta_shapes(config: Mapping[str, Any]) -> tuple[Shapes, dict[str, int]]:
    hidden, heads, head_dim = config["hidden_size"], config["linear_num_value_heads"], config["linear_value_head_dim"]
    num_keys, num_values = config["linear_num_key_heads"] * config["linear_key_head_dim"], heads * head_dim
    num_channels = 2 * num_keys + num_values
    matrices: Shapes = {
        "linear_attn.in_proj_qkv": (num_channels, hidden),
        "linear_attn.in_proj_z": (num_values, hidden),
        "linear_attn.in_proj_b": (heads, hidden),
        "linear_attn.in_proj_a": (heads, hidden),
        "linear_attn.conv1d": (num_channels, 1, config["linear_conv_kernel_dim"]),
        "linear_attn.out_proj": (hidden, num_values),
    }
    return matrices, {"linear_attn.norm": head_dim, "linear_attn.A_log": heads, "linear_attn.dt_bias": heads}
