"""Architecture: how a GGUF file of one `general.architecture` becomes a checkpoint, and the rules it is made of.

A rule is the value of a field of config.json, or a function of the metadata. ARCHITECTURES (`architectures.py`) has the
entries.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ....ipc.spec.models.config_file import MAX_LAYERS, MAX_SIZE, is_whole
from .metadata import Metadata
from .rope import rope_of

Fields = Mapping[str, "Callable[[Metadata], Any] | object"]


@dataclass(frozen=True)
class Architecture:
    """An architecture of config.json, and how tensors of a GGUF file differ from its own."""

    name: str
    fields: Fields = field(default_factory=dict)  # further fields: values, or functions of the metadata
    is_rotated: bool = False  # in rows of query and key, the two rotary halves of a head alternate
    added: float = 0.0  # is to be added to the weights of norms
    renamed: Mapping[str, str] = field(default_factory=dict)  # replaces entries of tensors.WHOLE and tensors.IN_LAYER
    rope: Callable[[Metadata, int], dict[str, Any]] = rope_of  # fields of rotary embeddings, from the size of heads
    scaling: Fields = field(default_factory=dict)  # further fields of rope_scaling
    unset: tuple[
        str, ...
    ] = ()  # fields that are null, rather than their family's defaults, in a file without their keys
    of_head: Mapping[str, str] = field(default_factory=dict)  # modules of a head → the model's
    passed_over: tuple[str, ...] = ()  # keys that change nothing here, and are refused elsewhere


def count(name: str) -> Callable[[Metadata], int]:
    return lambda data: data.count(name, least=1)


def num_kv_heads(data: Metadata) -> int:
    return data.count("attention.head_count_kv", data.count("attention.head_count"), least=1)


def head_dim(data: Metadata) -> int:
    heads = max(data.count("attention.head_count"), 1)
    return data.count("attention.key_length", data.count("embedding_length") // heads, least=1)


def by_layer(data: Metadata, key: str, *, least: int = 1) -> list[int]:
    """Return the value of a key for each layer; a file may have one for all."""
    value, num_layers = data.whole(key), data.count("block_count", most=MAX_LAYERS)
    values = value if isinstance(value, list) else [value] * num_layers
    if len(values) != num_layers or not all(is_whole(each) and least <= each <= MAX_SIZE for each in values):
        data.refuse(
            f"{data.architecture}.{key} must be a whole number of at least {least}, or a list with one for each layer, "
            f"{num_layers}, it is {value!r:.100}"
        )
    return values


def known_number(name: str) -> Callable[[Metadata], float | None]:
    return lambda data: data.known_number(name)


def scaled(name: str, default: float = 1.0) -> Callable[[Metadata], float]:
    return lambda data: float(data.number(name, default) or default)


def present(*tensors: str) -> Callable[[Metadata], bool]:
    return lambda data: all(map(data.has, tensors))


def in_any_layer(tensor: str) -> Callable[[Metadata], bool]:
    """Return the rule for whether some layer has a tensor of this name."""
    return lambda data: any(name.startswith("blk.") and name.endswith(f".{tensor}") for name in data.tensors)


def query_scalar(num_layers: int) -> Callable[[Metadata], int]:
    """Return the rule for Gemma's query_pre_attn_scalar: the head size, but in the 27B model, with `num_layers` layers,
    hidden size / heads."""

    def rule(data: Metadata) -> int:
        if data.get("block_count") == num_layers:
            return data.count("embedding_length") // max(data.count("attention.head_count"), 1)
        return data.count("attention.key_length")

    return rule


ATTENTION_BIAS = {"attention_bias": present("blk.0.attn_q.bias")}
BIASES = {**ATTENTION_BIAS, "mlp_bias": present("blk.0.ffn_up.bias")}


def window(data: Metadata) -> int | None:
    return data.count("attention.sliding_window", 0) or None  # 0: none


def layer_types(data: Metadata) -> list[str] | None:
    """Return the kind of each layer by sliding_window_pattern, a list or a period; None if there is no pattern. Without
    a window all layers are full."""
    pattern = data.whole("attention.sliding_window_pattern")
    layers = range(data.count("block_count", most=MAX_LAYERS))
    if window(data) is None:
        return ["full_attention" for _ in layers]
    if isinstance(pattern, int) and not isinstance(pattern, bool) and pattern > 0:
        pattern = [(layer + 1) % pattern != 0 for layer in layers]
    if not isinstance(pattern, list):
        return None
    return ["sliding_attention" if each else "full_attention" for each in pattern]


WINDOW = {"sliding_window": window}
WINDOWS = {**WINDOW, "layer_types": layer_types}  # only some layers have the window
