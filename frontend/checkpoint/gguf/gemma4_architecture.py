"""GEMMA4: the entry of gemma4. Its full layers have heads of another size and number than sliding ones; in some models
the last layers use the keys and values of earlier ones and have wider MLPs."""

from __future__ import annotations

from typing import Any

from ....ipc.spec.models.config_file import MAX_LAYERS
from .architecture import WINDOWS, Architecture, Fields, by_layer, count, known_number, layer_types, present
from .metadata import Metadata

SLIDING = "sliding_attention"
SHARED = "attention.shared_kv_layers"  # the last layers, which use the keys and values of earlier ones
UNROTATED = 1e29  # a frequency that is divided by more than that turns nothing


def kinds(data: Metadata) -> list[str]:
    found, num_layers = layer_types(data), data.count("block_count", most=MAX_LAYERS)
    if found is None or len(found) != num_layers:
        key = f"{data.architecture}.attention.sliding_window_pattern"
        data.refuse(f"{key} must say for each of {num_layers} layers whether it has a window")
    return found


def sizes_by_layer(data: Metadata) -> dict[str, dict[str, int]]:
    """Return, by the number of a layer, the size and number of its key heads."""
    sliding, full = data.count("attention.key_length_swa", least=1), data.count("attention.key_length", least=1)
    sizes = zip(kinds(data), by_layer(data, "attention.head_count_kv"), strict=True)
    return {
        str(layer): {"head_dim": sliding if kind == SLIDING else full, "num_key_value_heads": heads}
        for layer, (kind, heads) in enumerate(sizes)
    }


def inner_size(data: Metadata) -> int:
    """Return the size of the MLPs. ConfigError unless all are of one size, those of SHARED may be twice as wide."""
    sizes, first = by_layer(data, "feed_forward_length"), num_own(data)
    if sizes != [sizes[0]] * first + [sizes[0] * (1 + has_wide_layers(data))] * (len(sizes) - first):
        data.refuse(
            f"{data.architecture}.feed_forward_length {sizes!r:.100} is not supported: the last layers "
            f"({data.architecture}.{SHARED}) may be twice as wide as the others"
        )
    return sizes[0]


def has_wide_layers(data: Metadata) -> bool:
    sizes = by_layer(data, "feed_forward_length")
    return sizes[-1] != sizes[0]


def num_own(data: Metadata) -> int:
    """Return the number of layers that have keys and values of their own."""
    return max(data.count("block_count", most=MAX_LAYERS) - data.count(SHARED, 0, MAX_LAYERS), 0)


def has_keys_as_values(data: Metadata) -> bool:
    full = (layer for layer, kind in enumerate(kinds(data)) if kind != SLIDING)
    return not data.has(f"blk.{next(full, 0)}.attn_v.weight")


def per_layer_embeddings(data: Metadata) -> int:
    key = "embedding_length_per_layer_input"
    if size := data.count(key, 0):
        data.refuse(
            f"{data.architecture}.{key} {size}, embeddings for each layer, is not supported in GGUF: take the model's "
            "safetensors"
        )
    return 0


def known_count(name: str) -> Any:
    return lambda data: None if data.get(name) is None else data.count(name, least=1)


def ropes(data: Metadata, head_dim: int) -> dict[str, Any]:
    """Return a rotary embedding for each kind of layer. In full layers a part of the pairs does not turn: the file
    divides its frequencies by 1e30."""
    turning = data.count("rope.dimension_count_swa", head_dim)
    if turning != head_dim:
        data.refuse(f"{data.architecture}.rope.dimension_count_swa {turning} of {head_dim} is not supported")
    theta = data.number("rope.freq_base", 10000.0)
    full: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    if data.has("rope_freqs.weight"):
        factors = data.floats("rope_freqs.weight")
        num_turning = factors.count(1.0)
        if any(factor < UNROTATED for factor in factors[num_turning:]):
            data.refuse(f"tensor rope_freqs.weight {factors!r:.100} is not supported: pairs turn whole or not at all")
        full |= {"rope_type": "proportional", "partial_rotary_factor": num_turning / len(factors)}
    sliding = {"rope_type": "default", "rope_theta": data.number("rope.freq_base_swa", theta)}
    return {"rope_parameters": {"full_attention": full, SLIDING: sliding}}


FIELDS: Fields = {
    **WINDOWS,
    "head_dim": count("attention.key_length_swa"),
    "num_key_value_heads": lambda data: by_layer(data, "attention.head_count_kv")[0],
    "per_layer_config": sizes_by_layer,
    "intermediate_size": inner_size,
    "use_double_wide_mlp": has_wide_layers,
    "num_kv_shared_layers": lambda data: data.count(SHARED, 0, MAX_LAYERS),
    "attention_k_eq_v": has_keys_as_values,
    "hidden_size_per_layer_input": per_layer_embeddings,
    "final_logit_softcapping": known_number("final_logit_softcapping"),
    "enable_moe_block": present("blk.0.ffn_gate_inp.weight"),
    "num_experts": known_count("expert_count"),
    "top_k_experts": known_count("expert_used_count"),
    "moe_intermediate_size": known_count("expert_feed_forward_length"),
}
GEMMA4 = Architecture("Gemma4ForCausalLM", FIELDS, rope=ropes)
