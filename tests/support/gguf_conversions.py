"""Writes GGUF files as llama.cpp's converter does, of more families than scripts/bench/inputs/write_gguf.py.

    from tokenloom.tests.support.gguf_conversions import convert
    convert(folder, tmp_path / "model.gguf")

The converter's keys and orders of rows are facts of conversion/ in ggml-org/llama.cpp. The files have no vocabulary.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from tokenloom.scripts.bench.inputs import write_gguf
from tokenloom.scripts.bench.inputs.write_gguf import (
    head_dim_of,
    read_tensors,
    rope_parameters,
    rotated_pairs,
    stored_as,
    write_scaling,
)

from .families import Config

FLOATS = ("_norm.weight", "conv1d.weight", "shortconv.conv.weight", "ssm_a", "ssm_d")  # are never quantized
NUMBERED = re.compile(r"(.*\.(?:experts|norms))\.(\d+)(\..*)")  # tensors of one expert, or of one head's norm
Tensors = Iterable[tuple[str, Any]]  # names and elements


@dataclass(frozen=True)
class Conversion:
    """The conversion of an architecture of config.json. `write` writes its keys; `changed` returns the
    names and elements that a tensor of transformers' name becomes."""

    architecture: str  # GGUF's name
    write: Callable[[Any, Config], None]
    changed: Callable[[Config, str, Any], Tensors] = lambda config, name, values: [(name, values)]


def write_base(writer: Any, config: Config) -> None:
    """Write the keys that the converter writes for most architectures, from those fields that config.json has."""
    rope = rope_parameters(config)
    theta = rope.get("rope_theta") or config.get("rope_theta")
    writer.add_block_count(config["num_hidden_layers"])
    optional = {
        "max_position_embeddings": writer.add_context_length,
        "hidden_size": writer.add_embedding_length,
        "intermediate_size": writer.add_feed_forward_length,
        "num_attention_heads": writer.add_head_count,
        "num_key_value_heads": writer.add_head_count_kv,
        "head_dim": writer.add_key_length,
        "rms_norm_eps": writer.add_layer_norm_rms_eps,
        "layer_norm_eps": writer.add_layer_norm_eps,
        "num_local_experts": writer.add_expert_count,
        "num_experts": writer.add_expert_count,
        "num_experts_per_tok": writer.add_expert_used_count,
        "top_k_experts": writer.add_expert_used_count,
        "n_group": writer.add_expert_group_count,
        "topk_group": writer.add_expert_group_used_count,
    }
    for name, add in optional.items():
        if config.get(name) is not None:
            add(config[name])
    if "head_dim" in config:
        writer.add_value_length(config["head_dim"])
    if "mrope_section" in rope:
        writer.add_rope_dimension_sections([*rope["mrope_section"], 0])
    if theta is not None:
        writer.add_rope_freq_base(float(theta))
    if config.get("scoring_func") == "sigmoid":
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if rope["rope_type"] in ("yarn", "linear", "llama3"):
        write_scaling(writer, config, rope)


def write_window(writer: Any, config: Config) -> None:
    writer.add_sliding_window(config["sliding_window"])
    writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config["layer_types"]])


def write_shape(writer: Any, config: Config) -> None:
    """Write the sizes alone, for architectures with few keys."""
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])


def write_rotary_size(writer: Any, config: Config, default: float = 1.0) -> None:
    writer.add_rope_dimension_count(int(head_dim_of(config) * config.get("partial_rotary_factor", default)))


def write_olmo(writer: Any, config: Config) -> None:
    write_base(writer, config)
    writer.add_layer_norm_eps(1e-5)
    if config.get("clip_qkv") is not None:
        writer.add_clamp_kqv(config["clip_qkv"])


def write_exaone4(writer: Any, config: Config) -> None:
    write_base(writer, config)
    if config.get("sliding_window") is not None:
        write_window(writer, config)


def write_hunyuan(writer: Any, config: Config) -> None:
    """Write the base of NTK's scaling in place of `alpha`."""
    write_base(writer, config)
    rope, size = rope_parameters(config), head_dim_of(config)
    if rope["rope_type"] == "dynamic":
        writer.add_rope_freq_base(config["rope_theta"] * rope["alpha"] ** (size / (size - 2)))
        writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)
        writer.add_rope_scaling_factor(1.0)
        writer.add_rope_scaling_orig_ctx_len(256 * 1024)


def write_jais2(writer: Any, config: Config) -> None:
    write_base(writer, config)
    write_rotary_size(writer, config)


def write_stablelm(writer: Any, config: Config) -> None:
    write_shape(writer, config)
    write_rotary_size(writer, config)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_parallel_residual(config.get("use_parallel_residual", False))
    writer.add_layer_norm_eps(config["layer_norm_eps"])


def write_phi2(writer: Any, config: Config) -> None:
    write_shape(writer, config)
    writer.add_head_count_kv(config["num_attention_heads"])
    writer.add_layer_norm_eps(config["layer_norm_eps"])
    write_rotary_size(writer, config)


def write_mistral3(writer: Any, config: Config) -> None:
    write_base(writer, config)
    rope = rope_parameters(config)
    write_rotary_size(writer, config)
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
        writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])


def write_qwen3vl(writer: Any, config: Config) -> None:
    write_base(writer, config)
    writer.add_num_deepstack_layers(len(config["vision_config"]["deepstack_visual_indexes"]))


def write_gptneox(writer: Any, config: Config) -> None:
    write_shape(writer, config)
    writer.add_rope_dimension_count(int(config["rotary_pct"] * head_dim_of(config)))
    writer.add_parallel_residual(config["use_parallel_residual"])
    writer.add_layer_norm_eps(config["layer_norm_eps"])


def write_falcon(writer: Any, config: Config) -> None:
    sizes = {"max_position_embeddings": 2048, "intermediate_size": 4 * config["hidden_size"]}
    write_shape(writer, {**config, **sizes})
    writer.add_head_count_kv(config.get("num_kv_heads", 1))
    writer.add_layer_norm_eps(config["layer_norm_epsilon"])


def write_gpt2(writer: Any, config: Config) -> None:
    writer.add_block_count(config["n_layer"])
    writer.add_context_length(config["n_ctx"])
    writer.add_embedding_length(config["n_embd"])
    writer.add_feed_forward_length(4 * config["n_embd"])
    writer.add_head_count(config["n_head"])
    writer.add_layer_norm_eps(config["layer_norm_epsilon"])


def write_chatglm(writer: Any, config: Config) -> None:
    """Write the shape, and the epsilon and the base that ChatGLM's first config.json does not state."""
    write_shape(writer, {**config, "max_position_embeddings": config["seq_length"]})
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(1e-5)
    write_rotary_size(writer, config, 0.5)
    writer.add_rope_freq_base(10000.0)


def write_glm4moe(writer: Any, config: Config) -> None:
    """Write the keys of GLM-4.5 and SolarOpen. The layers that predict further tokens are counted."""
    num_further = config.get("num_nextn_predict_layers", 0)
    write_base(writer, {**config, "num_hidden_layers": config["num_hidden_layers"] + num_further})
    write_rotary_size(writer, config)
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    writer.add_nextn_predict_layers(num_further)
    write_routed(writer, config)
    size = config["hidden_size"]
    for layer in range(config["num_hidden_layers"], config["num_hidden_layers"] + num_further):
        writer.add_tensor(f"blk.{layer}.attn_norm.weight", np.ones(size, np.float32))
        writer.add_tensor(f"blk.{layer}.nextn.eh_proj.weight", np.ones((size, 2 * size), np.float32))


def write_routed(writer: Any, config: Config) -> None:
    writer.add_expert_count(config["n_routed_experts"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_expert_shared_count(config["n_shared_experts"])
    writer.add_leading_dense_block_count(config["first_k_dense_replace"])
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    writer.add_expert_weights_norm(config["norm_topk_prob"])


def write_dots1(writer: Any, config: Config) -> None:
    write_base(writer, config)
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    write_routed(writer, config)


def write_ernie4_5_moe(writer: Any, config: Config) -> None:
    write_base(writer, config)
    writer.add_expert_count(config["moe_num_experts"])
    writer.add_expert_used_count(config["moe_k"])
    writer.add_interleave_moe_layer_step(config["moe_layer_interval"])
    writer.add_leading_dense_block_count(config["moe_layer_start_index"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_expert_shared_count(config["moe_num_shared_experts"])
    if config["moe_num_shared_experts"]:
        writer.add_expert_shared_feed_forward_length(config["intermediate_size"] // config["num_key_value_heads"])


def write_minimax_m2(writer: Any, config: Config) -> None:
    write_base(writer, config)
    writer.add_expert_feed_forward_length(config["intermediate_size"])
    writer.add_rope_dimension_count(config["rotary_dim"])


def write_olmoe(writer: Any, config: Config) -> None:
    write_base(writer, {**config, "rms_norm_eps": 1e-5})


def write_gemma4(writer: Any, config: Config) -> None:
    """Write the keys of Gemma 4, some of them for each layer, and what part of the pairs of full layers turns."""
    num_layers, num_sharing = config["num_hidden_layers"], config.get("num_kv_shared_layers", 0)
    ropes, full, sliding = config["rope_parameters"], config["global_head_dim"], config["head_dim"]
    writer_config = {name: value for name, value in config.items() if name not in ("head_dim", "rope_parameters")}
    write_base(writer, writer_config)
    write_window(writer, config)
    writer.add_shared_kv_layers(num_sharing)
    writer.add_embedding_length_per_layer_input(config.get("hidden_size_per_layer_input") or 0)
    for add, size in (
        (writer.add_key_length, full),
        (writer.add_value_length, full),
        (writer.add_key_length_swa, sliding),
        (writer.add_value_length_swa, sliding),
        (writer.add_rope_dimension_count, full),
        (writer.add_rope_dimension_count_swa, sliding),
    ):
        add(size)
    writer.add_rope_freq_base(ropes["full_attention"]["rope_theta"])
    writer.add_rope_freq_base_swa(ropes["sliding_attention"]["rope_theta"])
    if config.get("final_logit_softcapping"):
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    if config.get("moe_intermediate_size"):
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if config.get("use_double_wide_mlp"):
        sizes = [1] * (num_layers - num_sharing) + [2] * num_sharing
        writer.add_feed_forward_length([config["intermediate_size"] * size for size in sizes])
    if config.get("num_global_key_value_heads"):
        heads = {"full_attention": config["num_global_key_value_heads"], "sliding_attention": 2}
        writer.add_head_count_kv([heads[kind] for kind in config["layer_types"]])
    num_turning = int(full * ropes["full_attention"]["partial_rotary_factor"] / 2)
    factors = [1.0] * num_turning + [1e30] * (full // 2 - num_turning)
    writer.add_tensor("rope_freqs.weight", np.array(factors, np.float32))


def of_experts(config: Config, name: str, values: Any) -> Tensors:
    """Yield Gemma 4's parameters by their names in a file, or by a name that gguf knows."""
    layer = f"blk.{name.split('.')[2]}" if ".layers." in name else ""
    named = {
        "router.scale": f"{layer}.ffn_gate_inp.scale",
        "per_expert_scale": f"{layer}.ffn_down_exps.scale",
        "layer_scalar": f"{layer}.layer_output_scale.weight",
        "experts.gate_up_proj": f"{layer}.ffn_gate_up_exps.weight",
        "experts.down_proj": f"{layer}.ffn_down_exps.weight",
    }
    return [(next((theirs for ending, theirs in named.items() if name.endswith(ending)), name), values)]


def by_kind(config: Config, name: str, values: Any) -> Tensors:
    """Yield all queries, all keys and then all values of a tensor that has them in the order of KV heads."""
    if "query_key_value" not in name:
        return [(name, values)]
    num_heads = config["num_attention_heads"]
    num_kv_heads = config.get("num_kv_heads", 1 if config.get("multi_query") else num_heads)
    rows = values.reshape(num_kv_heads, num_heads // num_kv_heads + 2, head_dim_of(config), -1)
    parts = (rows[:, :-2], rows[:, -2:-1], rows[:, -1:])
    return [(name, np.concatenate([part.reshape(-1, rows.shape[-1]) for part in parts]).reshape(values.shape))]


def transposed(config: Config, name: str, values: Any) -> Tensors:
    """Yield the matrices of GPT-2's layers as [out, in]."""
    is_moved = name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight"))
    return [(name, np.ascontiguousarray(values.T) if is_moved else values)]


def rotated(config: Config, name: str, values: Any) -> Tensors:
    """Yield rows of queries and keys in rotated pairs."""
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    module = name.split(".")[-2]
    yield name, rotated_pairs(values, heads[module]) if module in heads else values


CONVERSIONS = {
    "Dots1ForCausalLM": Conversion("dots1", write_dots1),
    "Ernie4_5_MoeForCausalLM": Conversion("ernie4_5-moe", write_ernie4_5_moe),
    "Gemma4ForCausalLM": Conversion("gemma4", write_gemma4, of_experts),
    "Gemma4ForConditionalGeneration": Conversion("gemma4", write_gemma4, of_experts),
    "Glm4MoeForCausalLM": Conversion("glm4moe", write_glm4moe),
    "MiniMaxM2ForCausalLM": Conversion("minimax-m2", write_minimax_m2),
    "OlmoeForCausalLM": Conversion("olmoe", write_olmoe),
    "SolarOpenForCausalLM": Conversion("glm4moe", write_glm4moe),
    "Exaone4ForCausalLM": Conversion("exaone4", write_exaone4),
    "FalconForCausalLM": Conversion("falcon", write_falcon, by_kind),
    "GPT2LMHeadModel": Conversion("gpt2", write_gpt2, transposed),
    "GPTNeoXForCausalLM": Conversion("gptneox", write_gptneox, by_kind),
    "GlmForCausalLM": Conversion("chatglm", write_chatglm),
    "HunYuanDenseV1ForCausalLM": Conversion("hunyuan-dense", write_hunyuan),
    "Jais2ForCausalLM": Conversion("jais2", write_jais2),
    "Ministral3ForCausalLM": Conversion("mistral3", write_mistral3, rotated),
    "Mistral3ForConditionalGeneration": Conversion("mistral3", write_mistral3, rotated),
    "OlmoForCausalLM": Conversion("olmo", write_olmo, rotated),
    "PhiForCausalLM": Conversion("phi2", write_phi2),
    "Qwen2VLForConditionalGeneration": Conversion("qwen2vl", write_base),
    "Qwen2_5_VLForConditionalGeneration": Conversion("qwen2vl", write_base),
    "Qwen3VLForConditionalGeneration": Conversion("qwen3vl", write_qwen3vl),
    "StableLmForCausalLM": Conversion("stablelm", write_stablelm),
}


def convert(folder: Path, file: Path, *, is_fused: bool = False, pre: str | None = None) -> None:
    """Write the checkpoint in `folder` as a GGUF file of floats. `is_fused`: queries, keys and values in one matrix, as
    in files of the family's first checkpoints. pre: of its vocabulary, as in write_gguf; None: it has none."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    conversion = CONVERSIONS.get(config["architectures"][0])
    if conversion is None:
        write_gguf.convert(folder, file, "F32", pre=pre)
        return
    config |= config.get("text_config", {})
    write_file(folder, file, config, conversion, is_fused=is_fused, pre=pre)


def write_file(
    folder: Path,
    file: Path,
    config: Config,
    conversion: Conversion,
    *,
    is_fused: bool = False,
    pre: str | None = None,
    form: str = "F32",
) -> None:
    """Write the file by a conversion, with matrices in `form`."""
    writer = gguf.GGUFWriter(file, conversion.architecture)
    conversion.write(writer, config)
    if pre is None:
        writer.add_tokenizer_model("none")
    else:
        write_gguf.write_vocabulary(writer, folder, config, pre)
    tensors = _named(folder, config, conversion)
    for name, values in _fused(tensors) if is_fused else tensors:
        data, kind = stored_as(name, values, "F32" if name.endswith(FLOATS) else form)
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _named(folder: Path, config: Config, conversion: Conversion) -> Iterator[tuple[str, Any]]:
    """Yield the tensors by GGUF's names; those of media encoders are left out."""
    kind = next(each for each, name in gguf.MODEL_ARCH_NAMES.items() if name == conversion.architecture)
    names = gguf.get_tensor_name_map(kind, config.get("num_hidden_layers") or config["n_layer"])
    for stored, values in _stacked(read_tensors(folder)):
        name = stored.replace("language_model.", "").replace("e_score_correction_bias", "e_score_correction.bias")
        if any(part in name for part in ("visual.", "vision", "projector.")):
            continue
        for changed, elements in conversion.changed(config, name, values):
            found = names.get_name(changed, try_suffixes=(".weight", ".bias"))
            if changed.startswith("blk."):
                found = changed
            if found is None:
                raise ValueError(f"{folder}: gguf has no name for {changed} of {conversion.architecture}")
            yield found, elements


def _stacked(tensors: Tensors) -> Iterator[tuple[str, Any]]:
    """Yield tensors with one for all experts, or for the norms of all heads, in place of one for each."""
    stacks: dict[str, dict[int, Any]] = {}
    for name, values in tensors:
        if found := NUMBERED.fullmatch(name):
            stacks.setdefault(found[1].removesuffix(".norms") + found[3], {})[int(found[2])] = values
        else:
            yield name, values
    for name, each in stacks.items():
        yield name, np.stack([each[number] for number in sorted(each)])


def _fused(tensors: Tensors) -> Iterator[tuple[str, Any]]:
    parts: dict[str, dict[str, Any]] = {}
    for name, values in tensors:
        layer, _, module = name.partition(".attn_")
        part, _, kind = module.partition(".")
        if part in ("q", "k", "v"):
            parts.setdefault(f"{layer}.attn_qkv.{kind}", {})[part] = values
        else:
            yield name, values
    for name, found in parts.items():
        yield name, np.concatenate([found[part] for part in "qkv"])
