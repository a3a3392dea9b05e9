"""Write a checkpoint with random weights and a real model's shape, in ordinary Hugging Face form.

    python scripts/bench/inputs/make_checkpoint.py 135m OUT --dtype bfloat16 --seed 0

For benchmarks and tests: config.json, safetensors (sharded if large), generation_config.json and a byte-level
tokenizer, so that text works. Needs torch, safetensors and tokenizers. Equal name, dtype and seed: equal bytes.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from tokenloom.scripts.bench.inputs.hybrid_shapes import FINAL_NORMS, HYBRID_KINDS, layer_shapes, qwen_fields

Config: TypeAlias = dict[str, object]  # config.json

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
SHARD_BYTES = 2 << 30
POOL_ELEMENTS = (1 << 24) + 43  # a prime: rows of a larger tensor, which repeats the pool, never align
BOS, EOS = "<|begin|>", "<|end|>"
BOS_ID, EOS_ID = 256, 257
QWEN_MATRICES = ("gate_proj", "up_proj", "down_proj")  # of a feed-forward block, Llama's and Mistral's too
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
QWEN3: Config = {
    "use_sliding_window": False,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
}
LLAMA3_ROPE: Config = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}

KINDS: dict[str, Config] = {  # fields of config.json that a family adds to Llama's or replaces
    **HYBRID_KINDS,
    "gemma3_text": {
        "architectures": ["Gemma3ForCausalLM"],
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": 512,
        "sliding_window_pattern": 6,
        "query_pre_attn_scalar": 64,
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
        "rope_parameters": None,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 65536,
    },
    "llama": {"architectures": ["LlamaForCausalLM"]},
    "mistral": {"architectures": ["MistralForCausalLM"], "sliding_window": 4096, "tie_word_embeddings": False},
    "mixtral": {
        "architectures": ["MixtralForCausalLM"],
        "sliding_window": None,
        "tie_word_embeddings": False,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": False},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], **QWEN3},
    "qwen3_moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        **QWEN3,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "tie_word_embeddings": False,
    },
}


def config_of(
    kind: str, hidden: int, layers: int, heads: int, kv_heads: int, mlp: int, vocab: int, **more: object
) -> Config:
    """Return config.json of a model of a family; `more` overrides and adds fields."""
    return {
        "model_type": kind,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": hidden // heads,
        "intermediate_size": mlp,
        "vocab_size": vocab,
        "hidden_act": "silu",
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": True,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        **KINDS[kind],
        **more,
    }


CONFIGS: dict[str, Config] = {
    "135m": config_of("llama", 576, 30, 9, 3, 1536, 49152),
    "0.6b": config_of("qwen3", 1024, 28, 16, 8, 3072, 151936, head_dim=128),
    "3b": config_of("llama", 3072, 28, 24, 8, 8192, 128256, rope_parameters=LLAMA3_ROPE),
    "8b": config_of("qwen3", 4096, 36, 32, 8, 12288, 151936, head_dim=128, tie_word_embeddings=False),
    "14b": config_of("qwen3", 5120, 40, 40, 8, 17408, 151936, head_dim=128, tie_word_embeddings=False),
    "30b-a3b": config_of("qwen3_moe", 2048, 48, 32, 4, 6144, 151936, head_dim=128, moe_intermediate_size=768),
    "190m-qwen3.5": config_of("qwen3_5_text", 1024, 8, 8, 2, 3072, 32000, head_dim=128, **qwen_fields(8, 16, 16)),
    "60m-qwen3.5": config_of("qwen3_5_text", 512, 8, 8, 2, 1536, 32000, **qwen_fields(8, 4, 8)),
    "170m-bamba": config_of("bamba", 1024, 8, 16, 4, 3072, 32000, mamba_n_heads=32, attn_layer_indices=[3, 7]),
    "140m-lfm2": config_of("lfm2", 1024, 8, 16, 4, 3072, 32000, layer_types=(["conv"] * 3 + ["full_attention"]) * 2),
    "50m-granite-h": config_of(
        *("granitemoehybrid", 512, 8, 8, 2, 1536, 32000),
        mamba_n_heads=16,
        shared_intermediate_size=1536,
        layer_types=(["mamba"] * 3 + ["attention"]) * 2,
    ),
    "20m-gemma3": config_of("gemma3_text", 256, 12, 4, 2, 1024, 32000, head_dim=64),
    "tiny-llama": config_of("llama", 96, 2, 3, 1, 200, 307),
    "tiny-mistral": config_of("mistral", 64, 2, 4, 2, 136, 331, sliding_window=48),
    "tiny-mixtral": config_of("mixtral", 64, 2, 4, 2, 72, 271, num_local_experts=5),
    "tiny-qwen2": config_of("qwen2", 128, 2, 8, 1, 264, 293),
    "tiny-qwen3": config_of("qwen3", 64, 2, 2, 2, 152, 277, head_dim=80, tie_word_embeddings=False),
    "tiny-qwen3_moe": config_of(
        "qwen3_moe",
        *(64, 3, 4, 2, 120, 283),
        head_dim=32,
        moe_intermediate_size=40,
        num_experts=12,
        num_experts_per_tok=3,
        mlp_only_layers=[1],
    ),
}


def tensor_shapes(config: Mapping[str, object]) -> dict[str, tuple[int, ...]]:
    """Return the name and shape of every tensor of the checkpoint that `config` describes, in layer order."""

    def number(name: str) -> int:
        value = config[name]
        assert isinstance(value, int)
        return value

    hidden, vocab = number("hidden_size"), number("vocab_size")
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden)}
    if config["model_type"] in HYBRID_KINDS:
        for layer in range(number("num_hidden_layers")):
            shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in layer_shapes(config, layer).items()}
        return shapes | {f"{FINAL_NORMS.get(str(config['model_type']), 'model.norm')}.weight": (hidden,)}
    head_dim = number("head_dim")
    query, key = number("num_attention_heads") * head_dim, number("num_key_value_heads") * head_dim
    is_qwen2 = config["model_type"] == "qwen2"
    has_qkv_bias, has_output_bias = is_qwen2 or bool(config.get("attention_bias")), bool(config.get("attention_bias"))
    matrices = {
        "self_attn.q_proj": (query, hidden, has_qkv_bias),
        "self_attn.k_proj": (key, hidden, has_qkv_bias),
        "self_attn.v_proj": (key, hidden, has_qkv_bias),
        "self_attn.o_proj": (hidden, query, has_output_bias),
    }
    vectors = {"input_layernorm": hidden, "post_attention_layernorm": hidden}
    if config["model_type"] == "gemma3_text":
        vectors |= {"pre_feedforward_layernorm": hidden, "post_feedforward_layernorm": hidden}
    if config["model_type"] in ("gemma3_text", "qwen3", "qwen3_moe"):
        vectors |= {"self_attn.q_norm": head_dim, "self_attn.k_norm": head_dim}
    for layer in range(number("num_hidden_layers")):
        for name, (rows, columns, has_bias) in (matrices | _mlp_shapes(config, layer)).items():
            shapes[f"model.layers.{layer}.{name}.weight"] = (rows, columns)
            if has_bias:
                shapes[f"model.layers.{layer}.{name}.bias"] = (rows,)
        for name, size in vectors.items():
            shapes[f"model.layers.{layer}.{name}.weight"] = (size,)
    shapes["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocab, hidden)
    return shapes


def _mlp_shapes(config: Mapping[str, object], layer: int) -> dict[str, tuple[int, int, bool]]:
    """Return [out, in] of a layer's feed-forward matrices, and whether they have a bias."""
    hidden, has_bias = config["hidden_size"], bool(config.get("mlp_bias"))
    num_experts = config.get("num_experts", config.get("num_local_experts"))
    dense_layers, step = config.get("mlp_only_layers", []), config.get("decoder_sparse_step", 1)
    assert isinstance(hidden, int) and isinstance(dense_layers, list) and isinstance(step, int)

    def matrices(where: str, names: Sequence[str], inner: object) -> dict[str, tuple[int, int, bool]]:
        assert isinstance(hidden, int) and isinstance(inner, int)
        into, out = (inner, hidden, has_bias), (hidden, inner, has_bias)
        return dict(zip([f"{where}.{name}" for name in names], (into, into, out), strict=True))

    if num_experts is None or layer in dense_layers or (layer + 1) % step:
        return matrices("mlp", QWEN_MATRICES, config["intermediate_size"])
    is_mixtral = config["model_type"] == "mixtral"
    block, *names = ("block_sparse_moe", "w1", "w3", "w2") if is_mixtral else ("mlp", *QWEN_MATRICES)
    inner = config["intermediate_size" if is_mixtral else "moe_intermediate_size"]
    assert isinstance(num_experts, int)
    shapes = {f"{block}.gate": (num_experts, hidden, False)}
    for expert in range(num_experts):
        shapes |= matrices(f"{block}.experts.{expert}", names, inner)
    return shapes


class RandomTensors:
    """Source of normal noise, scaled so that a random model has varied attention and logits with standard deviation 3.

    Tensors above POOL_ELEMENTS repeat one pool of noise from their own offset: drawing 14 billion takes minutes.
    """

    def __init__(self, seed: int, dtype: torch.dtype) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self._dtype = dtype
        self._pool: Tensor | None = None

    def draw(self, name: str, shape: tuple[int, ...]) -> Tensor:
        size = math.prod(shape)
        if size > POOL_ELEMENTS:
            return self._repeat(size).mul_(_deviation(name, shape)).view(shape)
        noise = torch.randn(size, generator=self._generator).mul_(_deviation(name, shape))
        if name.endswith("norm.weight"):
            noise += 1.0
        return noise.to(self._dtype).view(shape)

    def _repeat(self, size: int) -> Tensor:
        if self._pool is None:
            self._pool = torch.randn(POOL_ELEMENTS, generator=self._generator).to(self._dtype)
        result = torch.empty(size, dtype=self._dtype)
        offset = int(torch.randint(POOL_ELEMENTS, (1,), generator=self._generator))
        start = 0
        while start < size:
            part = self._pool[offset : offset + size - start]
            result[start : start + len(part)] = part
            start, offset = start + len(part), 0
        return result


def _deviation(name: str, shape: tuple[int, ...]) -> float:
    if len(shape) == 1:
        return 0.1
    if name in ("model.embed_tokens.weight", "lm_head.weight"):
        return 3.0 / math.sqrt(shape[1])
    return 1.0 / math.sqrt(shape[1])


def write_checkpoint(
    folder: Path,
    config: Mapping[str, object],
    dtype: str = "float32",
    seed: int = 0,
    shard_bytes: int = SHARD_BYTES,
    report: Callable[[str], None] = lambda line: None,
) -> Path:
    """Write config, weights and tokenizer into `folder`, which is created if missing; return it."""
    folder.mkdir(parents=True, exist_ok=True)
    _write_json(folder / "config.json", {**config, "dtype": dtype})
    _write_json(
        folder / "generation_config.json",
        {"bos_token_id": config["bos_token_id"], "eos_token_id": config["eos_token_id"]},
    )
    write_tokenizer(folder)
    shards = _shards(tensor_shapes(config), DTYPES[dtype].itemsize, shard_bytes)
    tensors = RandomTensors(seed, DTYPES[dtype])
    file_by_name: dict[str, str] = {}
    total_bytes = 0
    for number, shapes in enumerate(shards, 1):
        file = "model.safetensors" if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        drawn = {name: tensors.draw(name, shape) for name, shape in shapes.items()}
        save_file(drawn, folder / file, metadata={"format": "pt"})
        file_by_name |= dict.fromkeys(drawn, file)
        total_bytes += sum(tensor.nbytes for tensor in drawn.values())
        report(f"{file}: {len(drawn)} tensors, {total_bytes / 1e9:.2f} GB so far")
    if len(shards) > 1:
        index = {"metadata": {"total_size": total_bytes}, "weight_map": file_by_name}
        _write_json(folder / "model.safetensors.index.json", index)
    return folder


def _shards(
    shapes: dict[str, tuple[int, ...]], element_bytes: int, shard_bytes: int
) -> list[dict[str, tuple[int, ...]]]:
    shards: list[dict[str, tuple[int, ...]]] = [{}]
    filled = 0
    for name, shape in shapes.items():
        size = math.prod(shape) * element_bytes
        if shards[-1] and filled + size > shard_bytes:
            shards.append({})
            filled = 0
        shards[-1][name] = shape
        filled += size
    return shards


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer whose token i < 256 is byte i; then begin and end. Higher ids decode to nothing."""
    letters = letter_by_byte()
    tokenizer = Tokenizer(models.BPE(vocab={letter: byte for byte, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(BOS, special=True), AddedToken(EOS, special=True)])
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": BOS,
            "eos_token": EOS,
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        },
    )


def letter_by_byte() -> list[str]:
    """Return GPT-2's byte-level alphabet: printable bytes are themselves, the others map to U+0100 and above."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    letters = {byte: chr(byte) for byte in printable}
    others = (byte for byte in range(256) if byte not in letters)
    return [letter for _, letter in sorted((letters | {b: chr(256 + i) for i, b in enumerate(others)}).items())]


def _write_json(path: Path, value: Mapping[str, object]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=CONFIGS)
    parser.add_argument("out", type=Path)
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    start = time.perf_counter()
    write_checkpoint(options.out, CONFIGS[options.name], options.dtype, options.seed, report=print)
    print(f"{options.out}: {options.name} in {options.dtype}, {time.perf_counter() - start:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
