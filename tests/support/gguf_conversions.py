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


def convert(folder: Path, file: Path, *, is_fused: bool = False) -> None:
    """Write the checkpoint in `folder` as a GGUF file of floats. `is_fused`: queries, keys and values in one matrix, as
    in files of the family's first checkpoints."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    conversion = CONVERSIONS.get(config["architectures"][0])
    if conversion is None:
        write_gguf.convert(folder, file, "F32")
        return
    config |= config.get("text_config", {})
    writer = gguf.GGUFWriter(file, conversion.architecture)
    conversion.write(writer, config)
    writer.add_tokenizer_model("none")
    tensors = _named(folder, config, conversion)
    for name, values in _fused(tensors) if is_fused else tensors:
        data, kind = stored_as(name, values, "F32")
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
        if any(part in name for part in ("visual.", "vision_", "projector.")):
            continue
        for changed, elements in conversion.changed(config, name, values):
            found = names.get_name(changed, try_suffixes=(".weight", ".bias"))
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
