"""FAMILIES: what each architecture has in place of Llama's fields of ModelConfig, one entry a family.

A rule is a value, or a function of the config.json. A family without an entry's field has Llama's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from . import model_fields as fields
from .config_file import ConfigFile
from .model_config import ActivationConfig, HeadNormsConfig, LayerConfig, NormConfig, RopeConfig, TensorNames
from .model_fields import FULL, SLIDING

Rule: TypeAlias = Any  # a value of a field of ModelConfig, or Callable[[ConfigFile], value]

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
}


def heads_of(file: ConfigFile) -> int:
    return file.positive("num_attention_heads")


def kv_heads_of(file: ConfigFile) -> int:
    return file.positive("num_key_value_heads") if "num_key_value_heads" in file else heads_of(file)


def head_dim_of(file: ConfigFile) -> int:
    return fields.head_dim(file, file.positive("hidden_size"), heads_of(file))


def number(name: str, default: float = 1.0) -> Callable[[ConfigFile], float]:
    return lambda file: file.number(name, default)


def flag(name: str, default: bool = False) -> Callable[[ConfigFile], bool]:
    return lambda file: file.flag(name, default)


def inverse_root(name: str) -> Callable[[ConfigFile], float]:
    """Return the attention scale 1 / √field."""
    return lambda file: 1 / math.sqrt(file.positive(name))


def rms(offset: float = 0.0, eps: str = "rms_norm_eps", default: float = 1e-6) -> Callable[[ConfigFile], NormConfig]:
    return lambda file: NormConfig(eps=file.number(eps, default), offset=offset)


def layer_norm(
    eps: str, default: float = 1e-5, *, has_bias: bool = True, has_weight: bool = True, offset: float = 0.0
) -> Callable[[ConfigFile], NormConfig]:
    def rule(file: ConfigFile) -> NormConfig:
        epsilon = file.number(eps, default)
        return NormConfig(kind="layer", eps=epsilon, has_weight=has_weight, has_bias=has_bias, offset=offset)

    return rule


def activation(
    name: str = "hidden_act", default: str = "silu", *, is_gated: bool = True
) -> Callable[[ConfigFile], ActivationConfig]:
    def rule(file: ConfigFile) -> ActivationConfig:
        kind: Any = file.choice(name, ACTIVATIONS, default)
        return ActivationConfig(kind=kind, is_gated=is_gated)

    return rule


def rope(*, is_paired: bool = False, default_part: float = 1.0) -> Callable[[ConfigFile], list[RopeConfig]]:
    return lambda file: [fields.rope_of(file, head_dim_of(file), is_paired=is_paired, default_part=default_part)]


def head_norms(norm: Callable[[ConfigFile], NormConfig], **more: bool) -> Callable[[ConfigFile], HeadNormsConfig]:
    return lambda file: HeadNormsConfig(norm=norm(file), **more)


def all_layers(file: ConfigFile) -> list[LayerConfig]:
    return [LayerConfig()] * file.positive("num_hidden_layers")


def windows_everywhere(file: ConfigFile) -> list[LayerConfig]:
    return [LayerConfig(window=fields.window_of(file))] * file.positive("num_hidden_layers")


def qwen_windows(file: ConfigFile) -> list[LayerConfig]:
    """Qwen has windows only with use_sliding_window, from layer max_window_layers on unless layer_types says more."""
    num_layers = file.positive("num_hidden_layers")
    window = fields.window_of(file) if file.flag("use_sliding_window") else None
    if "layer_types" in file:
        return fields.layers_of(fields.layer_kinds(file), window)
    first = int(file.get("max_window_layers"))
    return [LayerConfig(window=window if layer >= first else None) for layer in range(num_layers)]


def qwen_expert_layers(file: ConfigFile) -> list[LayerConfig]:
    num_layers, step = file.positive("num_hidden_layers"), int(file.get("decoder_sparse_step") or 1)
    dense, window = set(file.get("mlp_only_layers") or ()), None
    if file.flag("use_sliding_window"):
        window = fields.window_of(file)
    return [
        LayerConfig(window=window, has_experts=layer not in dense and (layer + 1) % step == 0)
        for layer in range(num_layers)
    ]


def mixtral_layers(file: ConfigFile) -> list[LayerConfig]:
    return [LayerConfig(window=fields.window_of(file), has_experts=True)] * file.positive("num_hidden_layers")


def sliding_layers(period: int) -> Callable[[ConfigFile], list[LayerConfig]]:
    """Full attention in each `period`-th layer or by layer_types, windows in the others."""
    return lambda file: fields.layers_of(fields.layer_kinds(file, period), fields.window_of(file))


def local_and_global(period: int) -> Callable[[ConfigFile], list[LayerConfig]]:
    """As `sliding_layers`; full layers have the first rotary embedding, sliding ones the second."""
    return lambda file: fields.layers_of(
        fields.layer_kinds(file, period), fields.window_of(file), lambda layer, kind: int(kind == SLIDING)
    )


def nope_on_full(period: int) -> Callable[[ConfigFile], list[LayerConfig]]:
    """As `sliding_layers`; full layers have no positions."""
    return lambda file: fields.layers_of(
        fields.layer_kinds(file, period), fields.window_of(file), lambda layer, kind: None if kind == FULL else 0
    )


def smollm3_layers(file: ConfigFile) -> list[LayerConfig]:
    """no_rope_layers has 1 for a layer with positions; by default each no_rope_layer_interval-th has none."""
    num_layers, interval = file.positive("num_hidden_layers"), int(file.get("no_rope_layer_interval", 4))
    listed = file.get("no_rope_layers") or [int((layer + 1) % interval != 0) for layer in range(num_layers)]
    kinds = fields.layer_kinds(file) if file.flag("use_sliding_window") else [FULL] * num_layers
    return fields.layers_of(kinds, fields.window_of(file), lambda layer, kind: 0 if listed[layer] else None)


LLAMA: Mapping[str, Rule] = {
    "vocab_size": lambda file: file.positive("vocab_size"),
    "hidden_size": lambda file: file.positive("hidden_size"),
    "intermediate_size": lambda file: file.positive("intermediate_size"),
    "num_layers": lambda file: file.positive("num_hidden_layers"),
    "num_heads": heads_of,
    "num_kv_heads": kv_heads_of,
    "head_dim": head_dim_of,
    "max_position_embeddings": lambda file: file.positive("max_position_embeddings"),
    "layers": all_layers,
    "ropes": rope(),
    "norm": rms(),
    "attention_scale": lambda file: head_dim_of(file) ** -0.5,
    "activation": activation(),
    "tie_word_embeddings": flag("tie_word_embeddings"),
}


@dataclass(frozen=True)
class Family:
    """An architecture's differences from Llama."""

    own: Mapping[str, Rule] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)  # transformers', of fields that a file may leave out
    renamed: Mapping[str, str] = field(default_factory=dict)  # the file's name of a field by Llama's
    text_field: str = ""  # of the object that holds the text model's fields; empty: they are not nested

    def prepare(self, file: ConfigFile) -> ConfigFile:
        """Return the file with Llama's names and with defaults."""
        if self.text_field in file:
            file = file.nested(self.text_field)
        return file.with_names(self.renamed).with_defaults(self.defaults)

    def rules(self) -> Mapping[str, Rule]:
        return {**LLAMA, **self.own}


GEMMA = {"norm": rms(offset=1.0), "embedding_scale": lambda file: math.sqrt(file.positive("hidden_size"))}
SANDWICH = TensorNames(
    attention_output_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    mlp_output_norm="post_feedforward_layernorm",
)
POST_NORMS = TensorNames(
    input_norm="",
    attention_output_norm="post_attention_layernorm",
    mlp_norm="",
    mlp_output_norm="post_feedforward_layernorm",
)
ATTENTION_BIAS = {"has_qkv_bias": flag("attention_bias"), "has_output_bias": flag("attention_bias")}
QWEN3 = {**ATTENTION_BIAS, "layers": qwen_windows, "head_norms": head_norms(rms())}

FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family({**ATTENTION_BIAS, "has_mlp_bias": flag("mlp_bias")}),
    "MistralForCausalLM": Family({"layers": windows_everywhere}, {"num_key_value_heads": 8, "sliding_window": 4096}),
    "MixtralForCausalLM": Family(
        {
            "layers": mixtral_layers,
            "experts": lambda file: fields.experts_of(file, "intermediate_size", is_normalized=True),
        },
        {
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
        },
    ),
    "Qwen2ForCausalLM": Family(
        {"layers": qwen_windows, "has_qkv_bias": True},
        {"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28},
    ),
    "Qwen3ForCausalLM": Family(
        QWEN3, {"num_key_value_heads": 32, "head_dim": 128, "sliding_window": 4096, "max_window_layers": 28}
    ),
    "Qwen3MoeForCausalLM": Family(
        {
            **QWEN3,
            "layers": qwen_expert_layers,
            "experts": lambda file: fields.experts_of(file, "moe_intermediate_size"),
        },
        {
            "num_key_value_heads": 4,
            "sliding_window": 4096,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
        },
    ),
}
