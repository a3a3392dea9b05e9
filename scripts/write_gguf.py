"""Convert a bfloat16 Llama or Qwen3 checkpoint to GGUF for peer_llama_cpp.py: python write_gguf.py FOLDER FILE.gguf
[Q8_0|Q4_0]

For benchmarks on token ids: weights and sizes are right, there is no vocabulary. Needs gguf, numpy and safetensors, not
tokenloom. Names and layouts follow llama.cpp's convert_hf_to_gguf.py: matrices keep bfloat16 or get another form (the
embedding and the head Q8_0 beside Q4_0), vectors become float32, and Llama's query and key rows are permuted from
rotated halves to rotated pairs.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np

NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
LAYER_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
ARCHITECTURES = {"LlamaForCausalLM": "llama", "Qwen3ForCausalLM": "qwen3"}


def read_tensors(folder: Path) -> Iterator[tuple[str, Any]]:
    """Yield the name and bfloat16 bits, uint16 [shape], of every tensor; parsed here, since numpy has no bfloat16."""
    for path in sorted(folder.glob("*.safetensors")):
        data = np.memmap(path, np.uint8, mode="r")
        header_bytes = int(data[:8].view(np.uint64)[0])
        header = json.loads(bytes(data[8 : 8 + header_bytes]))
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            if entry["dtype"] != "BF16":
                raise SystemExit(f"{path}: {name} is {entry['dtype']}, only BF16 is converted")
            begin, end = (8 + header_bytes + offset for offset in entry["data_offsets"])
            yield name, np.frombuffer(bytes(data[begin:end]), np.uint16).reshape(entry["shape"])


def gguf_name(name: str) -> str:
    if name in NAMES:
        return NAMES[name]
    _, _, layer, rest = name.split(".", 3)
    stem, kind = rest.rsplit(".", 1)
    return f"blk.{layer}.{LAYER_NAMES[stem]}.{kind}"


def rotated_pairs(bits: Any, num_heads: int) -> Any:
    """Permute rows [heads * D, in]: element i of a head's first half moves beside element i of its second half."""
    rows, columns = bits.shape
    return bits.reshape(num_heads, 2, rows // num_heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def write_sizes(writer: Any, config: dict[str, Any]) -> None:
    rope = config.get("rope_parameters") or {}
    if rope.get("rope_type", "default") != "default":
        raise SystemExit(f"rope type {rope['rope_type']} is not converted")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(float(rope.get("rope_theta", config.get("rope_theta", 10000.0))))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("none")


def stored(name: str, bits: Any, form: str) -> tuple[Any, Any]:
    """Return the bytes of a matrix in a form, and the form's type."""
    if form == "BF16":
        return np.ascontiguousarray(bits).view(np.uint8), gguf.GGMLQuantizationType.BF16
    chosen = gguf.GGMLQuantizationType["Q8_0" if name in NAMES else form]
    return gguf.quants.quantize((bits.astype(np.uint32) << 16).view(np.float32), chosen), chosen


def convert(folder: Path, file: Path, form: str = "BF16") -> None:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    architecture = ARCHITECTURES.get(config["architectures"][0])
    if architecture is None:
        raise SystemExit(f"{config['architectures'][0]} is not converted, only {', '.join(ARCHITECTURES)}")
    writer = gguf.GGUFWriter(file, architecture)
    write_sizes(writer, config)
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    for name, bits in read_tensors(folder):
        if bits.ndim == 1:
            writer.add_tensor(gguf_name(name), (bits.astype(np.uint32) << 16).view(np.float32))
            continue
        projection = name.split(".")[-2]
        if architecture == "llama" and projection in heads:
            bits = rotated_pairs(bits, heads[projection])
        data, kind = stored(name, bits, form)
        writer.add_tensor(gguf_name(name), data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
