"""Convert a checkpoint to GGUF: python write_gguf.py FOLDER FILE.gguf [F32|BF16|Q8_0|Q4_0|…]

For benchmarks beside llama.cpp (llama_cpp_peer.py) and as the oracle of tests. Needs gguf, numpy and safetensors, not
tokenloom. Names are gguf-py's, layouts follow llama.cpp's convert_hf_to_gguf.py: vectors become float32, matrices keep
bfloat16 or get another form (the embedding and the head Q8_0 beside smaller ones), query and key rows of Llama and its
kin are permuted from rotated halves to rotated pairs, and norms of Gemma and Nemotron have 1 added. A byte-level
vocabulary is converted, too, with --vocabulary.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np

ROTATED = ("llama", "granite", "smollm3", "arcee")
ADDED = ("gemma", "gemma2", "gemma3", "nemotron")
ARCHITECTURES = {
    "ArceeForCausalLM": "arcee",
    "Cohere2ForCausalLM": "cohere2",
    "CohereForCausalLM": "command-r",
    "Ernie4_5ForCausalLM": "ernie4_5",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3",
    "GemmaForCausalLM": "gemma",
    "Glm4ForCausalLM": "glm4",
    "GptOssForCausalLM": "gpt-oss",
    "GraniteForCausalLM": "granite",
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "MixtralForCausalLM": "llama",
    "NemotronForCausalLM": "nemotron",
    "Olmo2ForCausalLM": "olmo2",
    "Phi3ForCausalLM": "phi3",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen2MoeForCausalLM": "qwen2moe",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3moe",
    "SeedOssForCausalLM": "seed_oss",
    "SmolLM3ForCausalLM": "smollm3",
    "Starcoder2ForCausalLM": "starcoder2",
}
EXPERTS = {"gate_proj": "gate", "w1": "gate", "up_proj": "up", "w3": "up", "down_proj": "down", "w2": "down"}
TABLES = ("token_embd.weight", "output.weight")  # never smaller than Q8_0


def read_tensors(folder: Path) -> Iterator[tuple[str, Any]]:
    """Yield the name and elements, float32, of every tensor; parsed here, since numpy has no bfloat16."""
    for path in sorted(folder.glob("*.safetensors")):
        data = np.memmap(path, np.uint8, mode="r")
        header_bytes = int(data[:8].view(np.uint64)[0])
        header = json.loads(bytes(data[8 : 8 + header_bytes]))
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            begin, end = (8 + header_bytes + offset for offset in entry["data_offsets"])
            kinds = {"BF16": np.uint16, "F32": np.float32, "F16": np.float16}
            if entry["dtype"] not in kinds:
                raise SystemExit(f"{path}: {name} is {entry['dtype']}, only {', '.join(kinds)} are converted")
            stored = np.frombuffer(bytes(data[begin:end]), kinds[entry["dtype"]]).reshape(entry["shape"])
            is_bits = entry["dtype"] == "BF16"
            yield name, (stored.astype(np.uint32) << 16).view(np.float32) if is_bits else stored.astype(np.float32)


def rotated_pairs(rows: Any, num_heads: int) -> Any:
    """Permute rows [heads * D, …]: element i of a head's first half moves beside element i of its second half."""
    count = len(rows)
    return rows.reshape(num_heads, 2, count // num_heads // 2, -1).swapaxes(1, 2).reshape(rows.shape)


def rope_parameters(config: dict[str, Any]) -> dict[str, Any]:
    found = dict(config.get("rope_scaling") or config.get("rope_parameters") or {})
    found["rope_type"] = found.pop("type", None) or found.get("rope_type", "default")
    return found


def head_dim_of(config: dict[str, Any]) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def write_sizes(writer: Any, config: dict[str, Any]) -> None:
    head_dim, rope = head_dim_of(config), rope_parameters(config)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config.get("num_key_value_heads") or config["num_attention_heads"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(int(head_dim * config.get("partial_rotary_factor", 1.0)))
    writer.add_rope_freq_base(float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0))
    if "rms_norm_eps" in config:
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    for name in ("layer_norm_eps", "norm_epsilon", "norm_eps"):
        if name in config:
            writer.add_layer_norm_eps(config[name])
    writer.add_vocab_size(config["vocab_size"])
    optional = {
        "num_local_experts": writer.add_expert_count,
        "num_experts": writer.add_expert_count,
        "num_experts_per_tok": writer.add_expert_used_count,
        "moe_intermediate_size": writer.add_expert_feed_forward_length,
        "shared_expert_intermediate_size": writer.add_expert_shared_feed_forward_length,
        "sliding_window": writer.add_sliding_window,
        "attn_logit_softcapping": writer.add_attn_logit_softcapping,
        "final_logit_softcapping": writer.add_final_logit_softcapping,
        "logit_scale": writer.add_logit_scale,
        "logits_scaling": writer.add_logit_scale,
        "embedding_multiplier": writer.add_embedding_scale,
        "residual_multiplier": writer.add_residual_scale,
        "attention_multiplier": writer.add_attention_scale,
    }
    for name, add in optional.items():
        if config.get(name) is not None:
            add(config[name])
    if "num_local_experts" in config:
        writer.add_expert_feed_forward_length(config["intermediate_size"])
    write_scaling(writer, config, rope)


def write_scaling(writer: Any, config: dict[str, Any], rope: dict[str, Any]) -> None:
    kind = rope["rope_type"]
    if kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(rope["factor"])
    if kind == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
        writer.add_rope_scaling_yarn_beta_slow(rope["beta_slow"])
    elif kind == "longrope":
        original = config["original_max_position_embeddings"]
        factor = config["max_position_embeddings"] / original
        writer.add_rope_scaling_orig_ctx_len(original)
        writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(factor) / math.log(original)))
        for name in ("long", "short"):
            writer.add_tensor(f"rope_factors_{name}.weight", np.array(rope[f"{name}_factor"], np.float32))
    elif kind == "llama3":
        writer.add_tensor("rope_freqs.weight", llama3_factors(rope, config, head_dim_of(config)))
    elif kind not in ("default", "linear"):
        raise SystemExit(f"rope type {kind} is not converted")


def llama3_factors(rope: dict[str, Any], config: dict[str, Any], head_dim: int) -> Any:
    theta = rope.get("rope_theta") or config["rope_theta"]
    waves = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    original, low, high = (
        rope[name] for name in ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor")
    )
    smooth = np.clip((original / waves - low) / (high - low), 0, 1)
    return (1 / ((1 - smooth) / rope["factor"] + smooth)).astype(np.float32)


def write_vocabulary(writer: Any, folder: Path, config: dict[str, Any], pre: str) -> None:
    """Write the byte-level vocabulary of tokenizer.json, and the chat template."""
    stored = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    tokens: dict[int, tuple[str, int]] = {i: (f"[PAD{i}]", 5) for i in range(config["vocab_size"])}
    tokens |= {i: (token, 1) for token, i in stored["model"]["vocab"].items()}
    tokens |= {each["id"]: (each["content"], 3 if each["special"] else 4) for each in stored["added_tokens"]}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list([tokens[i][0] for i in sorted(tokens)])
    writer.add_token_types([tokens[i][1] for i in sorted(tokens)])
    merges = stored["model"]["merges"]
    writer.add_token_merges([each if isinstance(each, str) else " ".join(each) for each in merges])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_add_bos_token("TemplateProcessing" in json.dumps(stored["post_processor"]))
    settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    template = folder / "chat_template.jinja"
    text = template.read_text(encoding="utf-8") if template.exists() else settings.get("chat_template")
    if text:
        writer.add_chat_template(text)


def stored_as(name: str, values: Any, form: str) -> tuple[Any, Any]:
    """Return the bytes of a tensor in a form, and the form's type."""
    if values.ndim == 1 or name.endswith("ffn_gate_inp.weight"):
        form = "F32"
    elif name in TABLES and form not in ("F32", "F16", "BF16"):
        form = "Q8_0"
    chosen = gguf.GGMLQuantizationType[form]
    if values.shape[-1] % gguf.GGML_QUANT_SIZES[chosen][0]:
        chosen = gguf.GGMLQuantizationType.F32
    return gguf.quants.quantize(values, chosen), chosen


def interleaved_experts(layer: str, name: str, values: Any) -> Iterator[tuple[str, Any]]:
    """Yield a tensor of gpt-oss's experts, of which gates and ups alternate, [E, in, out] or a bias [E, out]."""
    kind = "bias" if name.endswith("_bias") else "weight"
    parts = {"gate": values[..., ::2], "up": values[..., 1::2]} if name.startswith("gate_up") else {"down": values}
    for part, each in parts.items():
        yield (
            f"blk.{layer}.ffn_{part}_exps.{kind}",
            np.ascontiguousarray(each if kind == "bias" else each.swapaxes(1, 2)),
        )


def converted(folder: Path, config: dict[str, Any], architecture: str) -> Iterator[tuple[str, Any]]:
    """Yield the name and elements of each tensor as GGUF has them."""
    kind = next(each for each, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(kind, config["num_hidden_layers"])
    heads = {"attn_q": config["num_attention_heads"]}
    heads["attn_k"] = config.get("num_key_value_heads") or heads["attn_q"]
    experts: dict[str, dict[int, Any]] = {}
    for name, values in read_tensors(folder):
        if ".experts." in name and architecture == "gpt-oss":
            yield from interleaved_experts(name.split(".")[2], name.split(".experts.")[1], values)
            continue
        if ".experts." in name:
            layer, expert, matrix = name.split(".")[2], *name.split(".")[-3:-1]
            experts.setdefault(f"blk.{layer}.ffn_{EXPERTS[matrix]}_exps.weight", {})[int(expert)] = values
            continue
        found = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if found is None:
            raise SystemExit(f"{folder}: gguf has no name for {name} of {architecture}")
        module = found.split(".")[-2]
        if architecture in ROTATED and module in heads:
            values = rotated_pairs(values, heads[module])
        if found.endswith("attn_sinks"):
            found += ".weight"
        if found.endswith("ffn_gate_inp_shexp.weight"):
            values = values[0]
        yield found, values + 1 if architecture in ADDED and name.endswith("norm.weight") else values
    for name, each in experts.items():
        yield name, np.stack([each[i] for i in sorted(each)])


def convert(folder: Path, file: Path, form: str = "BF16", *, pre: str | None = None) -> None:
    """Write the checkpoint in `folder` as GGUF to `file`, with matrices in `form`.

    `pre`: write the vocabulary, with this name of its pre-tokenizer; None: write none.
    """
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    architecture = ARCHITECTURES.get(config["architectures"][0])
    if architecture is None:
        raise SystemExit(f"{config['architectures'][0]} is not converted, only {', '.join(ARCHITECTURES)}")
    writer = gguf.GGUFWriter(file, architecture)
    write_sizes(writer, config)
    if pre is None:
        writer.add_tokenizer_model("none")
    else:
        write_vocabulary(writer, folder, config, pre)
    for name, values in converted(folder, config, architecture):
        data, kind = stored_as(name, values, form)
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    arguments = [each for each in sys.argv[1:] if each != "--vocabulary"]
    convert(Path(arguments[0]), Path(arguments[1]), *arguments[2:], pre="gpt-2" if "--vocabulary" in sys.argv else None)
