"""Writes GGUF files of models in which some layers keep a state, as llama.cpp's converter does.

    from tokenloom.tests.support.hybrid_conversions import convert_hybrid
    convert_hybrid(folder, tmp_path / "model.gguf")

The keys and the orders of rows are facts of conversion/ in ggml-org/llama.cpp: lfm2.py, granite.py, falcon_h1.py,
nemotron.py and qwen.py, on mamba.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from tokenloom.ipc.spec.models.model_file import load_model_config
from tokenloom.scripts.bench.inputs.write_gguf import head_dim_of, rotated_pairs

from .families import Config
from .gguf_conversions import Conversion, Tensors, write_base, write_file

GATES_AND_UPS = {"block_sparse_moe.input_linear.weight": "_exps", "shared_mlp.input_linear.weight": "_shexp"}

WITH_EXPERTS = "NemotronHForCausalLM with num_experts_per_tok"


def kinds_of(folder: Path) -> list[str]:
    """Return the mixer of each layer."""
    return [layer.mixer for layer in load_model_config(folder).layers]


def kv_heads(config: Config) -> list[int]:
    return [config["num_key_value_heads"] if kind == "attention" else 0 for kind in config["kinds"]]


def write_mamba(writer: Any, config: Config) -> None:
    heads = config.get("mamba_n_heads") or config["mamba_num_heads"]
    writer.add_ssm_conv_kernel(config.get("mamba_d_conv") or config.get("conv_kernel") or 4)
    writer.add_ssm_state_size(config.get("mamba_d_state") or config["ssm_state_size"])
    writer.add_ssm_group_count(groups_of(config))
    writer.add_ssm_inner_size(heads * (config.get("mamba_d_head") or config["mamba_head_dim"]))
    writer.add_ssm_time_step_rank(heads)


def groups_of(config: Config) -> int:
    groups: int = config.get("mamba_n_groups") or config["n_groups"]
    return groups


def write_granite(writer: Any, config: Config) -> None:
    """Write the keys of Granite 4 and of Bamba. Bamba alone has positions."""
    write_base(writer, {**config, "num_key_value_heads": kv_heads(config)})
    write_mamba(writer, config)
    is_bamba = "BambaForCausalLM" in config["architectures"]
    writer.add_rope_dimension_count(head_dim_of(config) // (1 + is_bamba))
    writer.add_rope_scaling_finetuned(is_bamba)
    optional = {
        "attention_multiplier": writer.add_attention_scale,
        "embedding_multiplier": writer.add_embedding_scale,
        "residual_multiplier": writer.add_residual_scale,
        "logits_scaling": writer.add_logit_scale,
        "shared_intermediate_size": writer.add_expert_shared_feed_forward_length,
    }
    for name, add in optional.items():
        if config.get(name):
            add(config[name])


def write_falcon_h1(writer: Any, config: Config) -> None:
    write_base(writer, config)
    write_mamba(writer, config)


def write_nemotron_h(writer: Any, config: Config) -> None:
    """Write the keys. A layer without KV heads and inner size keeps a state."""
    sizes = [config["intermediate_size"] if kind == "none" else 0 for kind in config["kinds"]]
    write_base(writer, {**config, "num_key_value_heads": kv_heads(config), "intermediate_size": sizes})
    write_mixers(writer, config)


def write_nemotron_h_moe(writer: Any, config: Config) -> None:
    """Write the keys. Only layers of experts have an inner size; a further layer is both attention and experts."""
    num_further, size = config.get("num_further", 0), config["moe_intermediate_size"]
    heads = kv_heads(config) + [config["num_key_value_heads"]] * num_further
    sizes = [size if kind == "moe" else 0 for kind in config["layers_block_type"]] + [size] * num_further
    by_layer = {"num_hidden_layers": len(sizes), "num_key_value_heads": heads, "intermediate_size": sizes}
    write_base(writer, {**config, **by_layer})
    write_mixers(writer, config)
    writer.add_expert_feed_forward_length(size)
    writer.add_expert_shared_feed_forward_length(config["moe_shared_expert_intermediate_size"])
    writer.add_expert_count(config["n_routed_experts"])
    writer.add_expert_shared_count(config.get("n_shared_experts", 1))
    writer.add_expert_weights_norm(config.get("norm_topk_prob", True))
    writer.add_expert_weights_scale(config.get("routed_scaling_factor", 1.0))
    if config.get("moe_latent_size"):
        writer.add_moe_latent_size(config["moe_latent_size"])
    write_further(writer, config)


def write_mixers(writer: Any, config: Config) -> None:
    """Write the keys of Nemotron-H's layers that are neither MLPs nor experts."""
    writer.add_layer_norm_eps(config["layer_norm_epsilon"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_scaling_finetuned(False)
    write_mamba(writer, config)


def write_further(writer: Any, config: Config) -> None:
    """Write the key and some tensors of a layer that predicts further tokens, if there is one."""
    if config.get("num_further"):
        writer.add_nextn_predict_layers(config["num_further"])
        layer, size = config["num_hidden_layers"], config["hidden_size"]
        writer.add_tensor(f"blk.{layer}.attn_norm.weight", np.ones(size, np.float32))
        writer.add_tensor(f"blk.{layer}.attn_q.weight", np.ones((size, size), np.float32))
        writer.add_tensor(f"blk.{layer}.nextn.eh_proj.weight", np.ones((size, 2 * size), np.float32))


def write_lfm2(writer: Any, config: Config) -> None:
    theta = config.get("rope_theta", 1e6)
    own = {"num_key_value_heads": kv_heads(config), "rms_norm_eps": config.get("norm_eps", 1e-5), "rope_theta": theta}
    write_base(writer, {**config, **own})
    writer.add_shortconv_l_cache(config.get("conv_L_cache", 3))
    if "num_dense_layers" in config:
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
        writer.add_leading_dense_block_count(config["num_dense_layers"])
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)


def write_delta(writer: Any, config: Config) -> None:
    num_further, name = config.get("num_further", 0), writer.arch
    write_base(writer, {**config, "num_hidden_layers": config["num_hidden_layers"] + num_further})
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(config["linear_key_head_dim"])
    writer.add_ssm_group_count(config["linear_num_key_heads"])
    writer.add_ssm_time_step_rank(config["linear_num_value_heads"])
    writer.add_ssm_inner_size(config["linear_value_head_dim"] * config["linear_num_value_heads"])
    if "has_no_list" not in config:
        flags = [kind == "state" for kind in config["kinds"]] + [False] * num_further
        writer.add_array(f"{name}.attention.recurrent_layers", flags)
    writer.add_uint32(f"{name}.full_attention_interval", config.get("full_attention_interval", 4))
    writer.add_rope_dimension_count(head_dim_of(config) // 4)
    if name != "qwen3next":
        writer.add_rope_dimension_sections([11, 11, 10, 0])
    if "num_experts" in config:
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
        writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])
    write_further(writer, config)


def negative_exp(values: Any) -> Any:
    return -torch.exp(torch.from_numpy(np.array(values))).numpy()


def of_mamba(config: Config, name: str, values: Any) -> Tensors:
    """Yield the parameters of Mamba2: A and D get an axis of 1, the norm one of groups."""
    if name.endswith(".dt_bias"):
        return [(name.replace(".dt_bias", ".dt_proj.bias"), values)]
    if name.endswith(".conv1d.weight"):
        return [(name, values[:, 0])]
    if name.endswith((".A_log", ".D")):
        values = values[:, None]
        return [(name, negative_exp(values) if name.endswith(".A_log") else values)]
    if name.endswith((".mamba.norm.weight", ".mixer.norm.weight")):
        return [(name, values.reshape(groups_of(config), -1))]
    return [(name, values)]


def of_granite(config: Config, name: str, values: Any) -> Tensors:
    """Yield gates apart from ups, and rows of queries and keys in rotated pairs."""
    layer, _, inner = name.removeprefix("model.layers.").partition(".")
    ending, has_experts = GATES_AND_UPS.get(inner), bool(config.get("num_local_experts"))
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    if ending is not None:
        ending = ending if has_experts else ""
        gate, up = np.split(values, 2, axis=-2)
        return [(f"blk.{layer}.ffn_{part}{ending}.weight", each) for part, each in (("gate", gate), ("up", up))]
    if inner == "shared_mlp.output_linear.weight" and not has_experts:
        return [(f"blk.{layer}.ffn_down.weight", values)]
    module = inner.split(".")[-2] if "." in inner else ""
    if module in heads:
        values = rotated_pairs(values, heads[module])
    return of_mamba(config, name, values)


def of_falcon_h1(config: Config, name: str, values: Any) -> Tensors:
    """Yield the weights times the scales of config.json."""
    for changed, each in of_mamba(config, name, values):
        if changed.endswith("pre_ff_layernorm.weight"):
            yield f"blk.{changed.split('.')[2]}.ffn_norm", each
        else:
            yield changed, scaled_falcon(config, changed, each)


def scaled_falcon(config: Config, name: str, values: Any) -> Any:
    entry = config.get("attention_in_multiplier", 1.0)
    module = name.split(".")[-2]
    gates, downs = config.get("mlp_multipliers", [1.0, 1.0])
    scales = {
        "down_proj": [downs],
        "gate_proj": [gates],
        "k_proj": [config["key_multiplier"], entry],
        "q_proj": [entry],
        "v_proj": [entry],
        "o_proj": [config.get("attention_out_multiplier", 1.0)],
        "out_proj": [config.get("ssm_out_multiplier", 1.0)],
        "in_proj": [config.get("ssm_in_multiplier", 1.0)],
        "lm_head": [config.get("lm_head_multiplier", 1.0)],
        "embed_tokens": [config.get("embedding_multiplier", 1.0)],
    }
    for scale in scales.get(module, []):
        values = values * np.float32(scale)
    if module == "in_proj":
        keys = config["mamba_n_groups"] * config["mamba_d_state"]
        sizes = [config["mamba_d_ssm"]] * 2 + [keys] * 2 + [config["mamba_n_heads"]]
        factors = np.repeat(np.float32(config.get("ssm_multipliers", [1.0] * 5)), sizes)
        values = values * factors[:, None]
    return values


def of_nemotron_h(config: Config, name: str, values: Any) -> Tensors:
    if ".experts." in name:
        return [(f"model.layers.{name.split('.')[2]}.mlp.experts.{name.split('.')[-2]}.weight", values)]
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    module = name.split(".")[-2]
    return of_mamba(config, name, rotated_pairs(values, heads[module]) if module in heads else values)


def of_lfm2(config: Config, name: str, values: Any) -> Tensors:
    if ".experts." in name:
        return [(name.removeprefix("model."), values)]
    return [(name.replace(".expert_bias", ".expert_bias.bias"), values[:, 0] if ".conv.conv." in name else values)]


def of_qwen3_next(config: Config, name: str, values: Any) -> Tensors:
    """Yield norms plus 1, and of a gated delta net all queries, keys and values apart from the gates."""
    if name.endswith(".A_log"):
        return [(name, negative_exp(values))]
    if name.endswith(".dt_bias"):
        return [(name.replace(".dt_bias", ".dt_proj.bias"), values)]
    if name.endswith("conv1d.weight"):
        return [(name, values[:, 0])]
    if name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
        return [(name, values + 1)]
    if name.endswith("in_proj_qkvz.weight") and "is_legacy" not in config:
        keys, num_keys = config["linear_key_head_dim"], config["linear_num_key_heads"]
        wide = config["linear_value_head_dim"] * config["linear_num_value_heads"] // num_keys
        parts = np.split(values.reshape(num_keys, -1, values.shape[1]), np.cumsum([keys, keys, wide]), axis=1)
        q, k, v, z = (part.reshape(-1, values.shape[1]) for part in parts)
        layer = name.split(".")[2]
        return [(f"blk.{layer}.attn_qkv.weight", np.concatenate([q, k, v])), (f"blk.{layer}.attn_gate.weight", z)]
    if name.endswith("in_proj_qkvz.weight"):
        return [(f"blk.{name.split('.')[2]}.ssm_in.weight", values)]
    return [(name, values)]


def of_qwen3_5(config: Config, name: str, values: Any) -> Tensors:
    """Yield value heads in the order in which ggml repeats key heads: the first of each key head, then the second."""
    width, num_keys = config["linear_value_head_dim"], config["linear_num_key_heads"]
    first = 2 * num_keys * config["linear_key_head_dim"]  # the first row of values behind queries and keys

    def tiled(rows: Any, size: int) -> Any:
        return rows.reshape(num_keys, -1, size, *rows.shape[1:]).swapaxes(0, 1).reshape(rows.shape)

    module = name.split(".")[-2]
    if module in ("in_proj_qkv", "conv1d"):
        values = np.concatenate([values[:first], tiled(values[first:], width)])
    elif module == "in_proj_z":
        values = tiled(values, width)
    elif module in ("in_proj_a", "in_proj_b") or name.endswith((".A_log", ".dt_bias")):
        values = tiled(values, 1)
    elif name.endswith("linear_attn.out_proj.weight"):
        values = np.ascontiguousarray(tiled(values.T, width).T)
    return of_qwen3_next(config, name, values)


HYBRID_CONVERSIONS: Mapping[str, Conversion] = {
    "BambaForCausalLM": Conversion("granitehybrid", write_granite, of_granite),
    "FalconH1ForCausalLM": Conversion("falcon-h1", write_falcon_h1, of_falcon_h1),
    "GraniteMoeHybridForCausalLM": Conversion("granitehybrid", write_granite, of_granite),
    "Lfm2ForCausalLM": Conversion("lfm2", write_lfm2, of_lfm2),
    "Lfm2MoeForCausalLM": Conversion("lfm2moe", write_lfm2, of_lfm2),
    "NemotronHForCausalLM": Conversion("nemotron_h", write_nemotron_h, of_nemotron_h),
    WITH_EXPERTS: Conversion("nemotron_h_moe", write_nemotron_h_moe, of_nemotron_h),
    "Qwen3NextForCausalLM": Conversion("qwen3next", write_delta, of_qwen3_next),
    "Qwen3_5ForCausalLM": Conversion("qwen35", write_delta, of_qwen3_5),
    "Qwen3_5MoeForCausalLM": Conversion("qwen35moe", write_delta, of_qwen3_5),
}


def conversion_of(config: Config) -> Conversion:
    """Return the conversion. The converter takes a Nemotron-H for one with experts if config.json says how many a token
    has, which transformers 5 also writes for dense models."""
    name = config["architectures"][0]
    if name == "NemotronHForCausalLM" and "num_experts_per_tok" in config:
        name = WITH_EXPERTS
    return HYBRID_CONVERSIONS[name]


def convert_hybrid(folder: Path, file: Path, form: str = "F32", pre: str | None = None, **more: Any) -> None:
    """Write the checkpoint in `folder` as a GGUF file, with matrices in `form`. `more`: fields for the conversion."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8")) | more
    conversion, kinds = conversion_of(config), kinds_of(folder)
    config |= {"kinds": kinds, "num_hidden_layers": len(kinds)}
    write_file(folder, file, config, conversion, form=form, pre=pre)
