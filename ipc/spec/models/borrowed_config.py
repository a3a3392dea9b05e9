"""The ModelConfig of an architecture that runs on transformers' layers.

Only workers know such an architecture, from transformers itself. This module reads the fields that other processes
need: the vocabulary, the longest position, end tokens, whether layers keep states, and sizes, under any of the names
that families use.
"""

from __future__ import annotations

from .config_file import ConfigFile
from .model_config import LayerConfig, ModelConfig, NormConfig, RopeConfig
from .quantization_config import parse_quantization

# The names under which a file may have each size.
NAMES = {
    "vocab_size": ("vocab_size",),
    "hidden_size": ("hidden_size", "d_model", "n_embd", "dim", "embedding_dim"),
    "num_layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_blocks"),
    "num_heads": ("num_attention_heads", "n_head", "n_heads", "num_heads", "mamba_n_heads"),
    "num_kv_heads": ("num_key_value_heads", "num_kv_heads", "n_head_kv"),
    "max_position_embeddings": ("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx", "model_max_length"),
}
NO_LIMIT = 1 << 20  # positions of a model whose file names no limit, such as one without attention
TEXT_FIELDS = ("text_config", "llm_config", "language_config")  # of the language model in a model that takes media

# Types of layers that keep a state besides keys and values; types of models that have such layers but may not list
# them.
STATE_LAYERS = frozenset(("linear_attention", "mamba", "mamba2", "conv", "hybrid", "hybrid_sliding", "recurrent"))
STATE_MODELS = frozenset(
    (
        "bailing_hybrid",
        "bamba",
        "falcon_h1",
        "falcon_mamba",
        "granitemoehybrid",
        "jamba",
        "kimi_linear",
        "lfm2",
        "lfm2_moe",
        "lfm3",
        "mamba",
        "mamba2",
        "minimax",
        "nemotron_h",
        "olmo_hybrid",
        "qwen3_5_moe_text",
        "qwen3_5_text",
        "qwen3_next",
        "recurrent_gemma",
        "rwkv",
        "xlstm",
        "zamba",
        "zamba2",
    )
)


def text_of(file: ConfigFile) -> ConfigFile:
    """Return the fields of the language model."""
    return next((file.nested(name) for name in TEXT_FIELDS if name in file), file)


def borrowed_config(file: ConfigFile, architecture: str, eos_token_ids: list[int]) -> ModelConfig:
    """Return the configuration of a model that runs on transformers' layers. ConfigError if `file` lacks a size, or its
    quantization is not served."""
    quantization = parse_quantization(file)
    if quantization is not None and quantization.layout == "mxfp4":
        file.refuse(
            f"{architecture} runs on transformers' layers, which serve no mxfp4: take the checkpoint with floats"
        )
    hidden_size, num_heads = _size(file, "hidden_size"), _size(file, "num_heads", 1)
    head_dim = file.positive("head_dim") if "head_dim" in file else max(hidden_size // num_heads, 1)
    kinds = _layer_kinds(file)
    num_layers = _size(file, "num_layers", len(kinds))
    return ModelConfig(
        architecture=architecture,
        implementation="transformers",
        vocab_size=_size(file, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=_size(file, "num_kv_heads", num_heads),
        head_dim=head_dim,
        max_position_embeddings=_size(file, "max_position_embeddings", NO_LIMIT),
        layers=[LayerConfig()] * num_layers,
        ropes=[RopeConfig()],
        norm=NormConfig(eps=0.0),
        attention_scale=1.0,
        has_state=file.text("model_type") in STATE_MODELS or not STATE_LAYERS.isdisjoint(kinds),
        dtype=file.text("dtype") or file.text("torch_dtype") or "float32",
        tie_word_embeddings=file.flag("tie_word_embeddings"),
        quantization=quantization,
        eos_token_ids=eos_token_ids,
        bos_token_id=file.whole("bos_token_id", least=-1) if "bos_token_id" in file else None,
    )


def _size(file: ConfigFile, size: str, default: int = 0) -> int:
    """Return a size of the file, under any of its names. `default`: the size if the file has none; 0: ConfigError."""
    found = next((name for name in NAMES[size] if name in file), None)
    if found is None and default:
        return default
    if found is None:
        file.refuse(f"there is no {' or '.join(NAMES[size])}")
    return file.positive(found)


def _layer_kinds(file: ConfigFile) -> list[str]:
    """Return the type of each layer; empty if the file does not list types."""
    kinds = file.get("layer_types") or file.get("layers_block_type") or file.get("block_types")
    return list(map(str, kinds)) if isinstance(kinds, list) else []
