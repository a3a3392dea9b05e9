"""Conversion of a GGUF file's metadata to the fields of a config.json, by architecture.

The keys are defined by ggml-org/ggml's docs/gguf.md and llama.cpp's gguf-py. ARCHITECTURES (`architectures.py`) has the
properties of an architecture that are built into llama.cpp and have no key.
"""

from __future__ import annotations

from typing import Any

from ....ipc.spec.models.config_file import MAX_LAYERS
from .architecture import Architecture, Fields, count, head_dim, num_kv_heads
from .architectures import ARCHITECTURES, VARIANTS
from .metadata import Metadata

_EPSILONS = (  # families' names of the norms' epsilon
    *("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps"),
)


_SIZES: Fields = {  # rules for fields of every model, unless its architecture has its own
    "hidden_size": count("embedding_length"),
    "num_hidden_layers": count("block_count"),
    "intermediate_size": count("feed_forward_length"),
    "num_attention_heads": count("attention.head_count"),
    "max_position_embeddings": count("context_length"),
    "num_key_value_heads": num_kv_heads,
    "head_dim": head_dim,
}


def architecture_of(data: Metadata) -> Architecture:
    """Return the entry for a file; ConfigError if its architecture is not read."""
    for fits, variant in VARIANTS.get(data.architecture, ()):
        if fits(data):
            return variant
    if data.architecture not in ARCHITECTURES:
        data.refuse(
            f"architecture {data.architecture!r:.100} is not supported in GGUF, known are {', '.join(ARCHITECTURES)}: "
            "take the model's safetensors"
        )
    return ARCHITECTURES[data.architecture]


def config_of(data: Metadata) -> dict[str, Any]:
    """Return the fields of config.json. ConfigError if the metadata are invalid or the model is not supported."""
    found = architecture_of(data)
    config: dict[str, Any] = {"architectures": [found.name], "dtype": "bfloat16"}
    data.count("block_count", most=MAX_LAYERS)
    config |= _values_of({**_SIZES, **found.fields}, data)
    _refuse_unsupported(data, found, head_dim(data))
    if not data.has("token_embd.weight"):
        data.refuse("tensor token_embd.weight is missing: it is no language model, or a part of one in several files")
    config["vocab_size"] = data.tensors["token_embd.weight"].shape[0]
    config["tie_word_embeddings"] = not data.has("output.weight")
    epsilon = data.known_number("attention.layer_norm_rms_epsilon")
    epsilon = data.known_number("attention.layer_norm_epsilon") if epsilon is None else epsilon
    config |= {} if epsilon is None else dict.fromkeys(_EPSILONS, epsilon)
    config |= found.rope(data, config["head_dim"])
    if "rope_scaling" in config:
        config["rope_scaling"] |= _values_of(found.scaling, data)
    config |= {f"{name}_token_id": data.token_id(name) for name in ("bos", "eos")}
    config["quantization_config"] = {"quant_method": "gguf"}
    return dict.fromkeys(found.unset) | {name: value for name, value in config.items() if value is not None}


def eos_ids(data: Metadata) -> list[int]:
    """Return the sorted ids of the tokens that end an answer: those that the metadata name, and those of
    `end_tokens`."""
    eos, *others = (data.token_id(name) for name in ("eos", "eot", "eom"))
    found = {eos} | ({*others} - data.other_ids) | data.end_ids
    return sorted(each for each in found if each is not None)


def _values_of(fields: Fields, data: Metadata) -> dict[str, Any]:
    """Return the values of rules, without those that are None."""
    values = {name: rule(data) if callable(rule) else rule for name, rule in fields.items()}
    return {name: value for name, value in values.items() if value is not None}


def _refuse_unsupported(data: Metadata, architecture: Architecture, key_length: int) -> None:
    """Raise ConfigError if the metadata ask for something that the architecture's layers do not have."""
    for name in ("rope.dimension_sections", "nextn_predict_layers"):
        value = data.get(name, 0)
        is_set = any(value) if isinstance(value, list) else value
        if is_set and name not in architecture.passed_over:
            data.refuse(f"{data.architecture}.{name} {value!r:.100} is not supported: take the model's safetensors")
    if (value_length := data.get("attention.value_length", key_length)) != key_length:
        data.refuse(
            f"heads of keys and of values have different sizes, {data.architecture}.attention.key_length "
            f"{key_length} and {data.architecture}.attention.value_length {value_length!r:.100}: not supported"
        )
