"""Rules, which compute fields of ModelConfig from config.json, and Family, the rules of an architecture.

A rule is a value, or a function of the ConfigFile. A family without a rule of its own for a field has Llama's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import msgspec

from . import model_fields as fields
from .config_file import ConfigFile, named
from .model_config import (
    ActivationConfig,
    ExpertsConfig,
    HeadNormsConfig,
    LayerConfig,
    NormConfig,
    RopeConfig,
    TensorNames,
)
from .model_fields import FULL, SLIDING

Rule: TypeAlias = Any  # a value of a field of ModelConfig, or Callable[[ConfigFile], value]

LOCAL_EXPERTS = {"num_experts": "num_local_experts"}  # two names of one field, for Family.renamed
ROUTED_EXPERTS = {"num_local_experts": "n_routed_experts"}
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
    """Return the rule for an attention scale of 1 / √(the field `name`)."""
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


def gemma_activation(file: ConfigFile) -> ActivationConfig:
    """Return the activation. Gemma's first files say gelu and mean its approximation by tanh."""
    kind: Any = file.choice("hidden_act", {**ACTIVATIONS, "gelu": "gelu_tanh"}, "gelu_pytorch_tanh")
    return ActivationConfig(kind=kind)


def rope(*, is_paired: bool = False, part: float | None = None) -> Callable[[ConfigFile], list[RopeConfig]]:
    """Return the rule for one rotary embedding. `part`: rotated share of a head if no field states it; None: whole
    heads are rotated in all models of the family."""
    return lambda file: [fields.rope_of(file, head_dim_of(file), is_paired=is_paired, part=part)]


def head_norms(norm: Callable[[ConfigFile], NormConfig], **more: bool) -> Callable[[ConfigFile], HeadNormsConfig]:
    return lambda file: HeadNormsConfig(norm=norm(file), **more)


def all_layers(file: ConfigFile) -> list[LayerConfig]:
    return [LayerConfig()] * file.positive("num_hidden_layers")


def layers_without_rope(file: ConfigFile) -> list[LayerConfig]:
    return [LayerConfig(rope=None)] * file.positive("num_hidden_layers")


def windows_everywhere(file: ConfigFile) -> list[LayerConfig]:
    return [LayerConfig(window=fields.window_of(file))] * file.positive("num_hidden_layers")


def qwen_windows(file: ConfigFile) -> list[LayerConfig]:
    """Return the layers. Qwen has windows only with use_sliding_window: from layer max_window_layers on, unless
    layer_types lists the kinds."""
    num_layers = file.positive("num_hidden_layers")
    window = fields.window_of(file) if file.flag("use_sliding_window") else None
    if "layer_types" in file:
        return fields.layers_of(fields.layer_kinds(file), window)
    first = file.whole("max_window_layers")
    return [LayerConfig(window=window if layer >= first else None) for layer in range(num_layers)]


def qwen_expert_layers(file: ConfigFile) -> list[LayerConfig]:
    num_layers, step = file.positive("num_hidden_layers"), file.whole("decoder_sparse_step", 1) or 1
    dense, window = set(file.wholes("mlp_only_layers")), None
    if file.flag("use_sliding_window"):
        window = fields.window_of(file)
    return [
        LayerConfig(window=window, has_experts=layer not in dense and (layer + 1) % step == 0)
        for layer in range(num_layers)
    ]


def mixtral_layers(file: ConfigFile) -> list[LayerConfig]:
    return [LayerConfig(window=fields.window_of(file), has_experts=True)] * file.positive("num_hidden_layers")


def mixtral_experts(file: ConfigFile) -> ExpertsConfig:
    return fields.experts_of(file, "intermediate_size", is_normalized=True, activation=activation()(file))


def qwen3_experts(file: ConfigFile) -> ExpertsConfig:
    return fields.experts_of(file, "moe_intermediate_size", activation=activation()(file))


def sliding_layers(period: int) -> Callable[[ConfigFile], list[LayerConfig]]:
    """Return the rule for full attention in every `period`-th layer, unless layer_types lists the kinds, and windows in
    the other layers."""
    return lambda file: fields.layers_of(fields.layer_kinds(file, period), fields.window_of(file))


def local_and_global(period: int) -> Callable[[ConfigFile], list[LayerConfig]]:
    """Return the rule of `sliding_layers`, in which full layers have the first rotary embedding and sliding layers the
    second."""
    return lambda file: fields.layers_of(
        fields.layer_kinds(file, period), fields.window_of(file), lambda layer, kind: int(kind == SLIDING)
    )


def gemma3_layers(file: ConfigFile) -> list[LayerConfig]:
    """Return the layers. In EmbeddingGemma, whose tokens see those behind them, the window is divided between both
    sides of a token."""
    layers = local_and_global(file.positive("sliding_window_pattern", 6))(file)
    if not file.flag("use_bidirectional_attention"):
        return layers
    return [
        layer if layer.window is None else msgspec.structs.replace(layer, window=layer.window // 2 + 1)
        for layer in layers
    ]


def smollm3_layers(file: ConfigFile) -> list[LayerConfig]:
    """Return the layers. no_rope_layers has 1 for a layer with positions; by default every no_rope_layer_interval-th
    layer has none."""
    num_layers, interval = file.positive("num_hidden_layers"), file.positive("no_rope_layer_interval", 4)
    listed = file.wholes("no_rope_layers") or [int((layer + 1) % interval != 0) for layer in range(num_layers)]
    if len(listed) != num_layers:
        file.refuse(f"no_rope_layers has {len(listed)} entries, num_hidden_layers is {num_layers}")
    kinds = fields.layer_kinds(file) if file.flag("use_sliding_window") else [FULL] * num_layers
    return fields.layers_of(kinds, fields.window_of(file), lambda layer, kind: 0 if listed[layer] else None)


def scaled_hidden(file: ConfigFile) -> float:
    """Return Gemma's embedding scale √hidden_size."""
    return math.sqrt(file.positive("hidden_size"))


def inverse(name: str, default: float = 1.0) -> Callable[[ConfigFile], float]:
    return lambda file: 1 / file.above_zero(name, default)


def local_ropes(theta: float = 10000.0) -> Callable[[ConfigFile], list[RopeConfig]]:
    """Return the rule for the rotary embeddings of full and of sliding layers. `theta`: that of sliding layers if no
    field states it."""
    return lambda file: fields.ropes_by_kind(file, head_dim_of(file), theta)


def cohere2_layers(file: ConfigFile) -> list[LayerConfig]:
    """Return the layers. Sliding layers have positions, full layers have none; without a window all layers are full."""
    kinds, window = fields.layer_kinds(file, file.positive("sliding_window_pattern", 4)), fields.window_of(file)
    return fields.layers_of(kinds, window, lambda layer, kind: 0 if kind == SLIDING and window else None)


def exaone4_layers(file: ConfigFile) -> list[LayerConfig]:
    """Return the layers. Sliding layers have positions, full layers have none; without a window all layers are full and
    have positions. sliding_window_pattern is a period, or a text such as LLLG."""
    window, pattern = fields.window_of(file), file.get("sliding_window_pattern")
    if window is None:
        return all_layers(file)
    period = len(pattern) if isinstance(pattern, str) else file.positive("sliding_window_pattern", 4)
    kinds = fields.layer_kinds(file, period)
    return fields.layers_of(kinds, window, lambda layer, kind: 0 if kind == SLIDING else None)


def ministral_scaling(file: ConfigFile) -> tuple[float, int] | None:
    parameters = file.part(fields.rope_field(file))
    if "llama_4_scaling_beta" not in parameters:
        return None
    return parameters.number("llama_4_scaling_beta"), parameters.positive(fields.ORIGINAL_LENGTH)


def neox_names(file: ConfigFile) -> TensorNames:
    return TensorNames(
        embedding="gpt_neox.embed_in",
        layers="gpt_neox.layers",
        norm="gpt_neox.final_layer_norm",
        head="embed_out",
        qkv="attention.query_key_value",
        qkv_layout="by_kv_head",
        output="attention.dense",
        up="mlp.dense_h_to_4h",
        down="mlp.dense_4h_to_h",
    )


def falcon_names(file: ConfigFile) -> TensorNames:
    """Return the tensor names. In newer files attention and MLP have a norm each, unless num_ln_in_parallel_attn is 1.
    In all others they share one norm if they run in parallel, and have one each if they run one after the other."""
    is_new = file.flag("new_decoder_architecture")
    num_norms = file.positive("num_ln_in_parallel_attn", 2 if is_new else 1)
    input_norm, mlp_norm = "input_layernorm", "" if file.flag("parallel_attn", True) else "post_attention_layernorm"
    if is_new and num_norms == 2:
        input_norm, mlp_norm = "ln_attn", "ln_mlp"
    return TensorNames(
        embedding="transformer.word_embeddings",
        layers="transformer.h",
        norm="transformer.ln_f",
        input_norm=input_norm,
        mlp_norm=mlp_norm,
        qkv="self_attention.query_key_value",
        qkv_layout="stacked" if file.flag("multi_query", True) and not is_new else "by_kv_head",
        output="self_attention.dense",
        up="mlp.dense_h_to_4h",
        down="mlp.dense_4h_to_h",
    )


def falcon_kv_heads(file: ConfigFile) -> int:
    if file.flag("new_decoder_architecture"):
        return file.positive("num_kv_heads") if "num_kv_heads" in file else heads_of(file)
    return 1 if file.flag("multi_query", True) else heads_of(file)


def falcon_ropes(file: ConfigFile) -> list[RopeConfig]:
    if file.flag("alibi"):
        file.refuse("alibi positions are not supported: models with rotary positions are")
    return [fields.rope_of(file, head_dim_of(file))]


def stablelm_names(file: ConfigFile) -> TensorNames:
    return TensorNames(
        mlp_norm="" if file.flag("use_parallel_residual") else "post_attention_layernorm",
        query_norm="self_attn.q_layernorm.norms.{head}",
        key_norm="self_attn.k_layernorm.norms.{head}",
    )


def if_flag(name: str, rule: Callable[[ConfigFile], Any]) -> Callable[[ConfigFile], Any]:
    """Return a rule with the value of `rule` if the field `name` is true, else None."""
    return lambda file: rule(file) if file.flag(name) else None


def gpt2_scale(file: ConfigFile) -> float:
    if file.flag("scale_attn_by_inverse_layer_idx") or not file.flag("scale_attn_weights", True):
        file.refuse(
            "only attention scaled by 1 / √head_dim is supported, neither scale_attn_by_inverse_layer_idx true nor "
            "scale_attn_weights false"
        )
    if file.flag("add_cross_attention"):
        file.refuse("add_cross_attention true is not supported: there is no encoder")
    return 1 / math.sqrt(head_dim_of(file))


def positive_or(name: str, factor: int) -> Callable[[ConfigFile], int]:
    """Return the rule for the field `name`, or `factor` times hidden_size if the file leaves it out."""
    return lambda file: file.positive(name) if name in file else factor * file.positive("hidden_size")


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
    """The rules in which an architecture differs from Llama, and its fields' defaults and names."""

    own: Mapping[str, Rule] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)  # transformers' values of fields left out
    renamed: Mapping[str, str] = field(default_factory=dict)  # our name of a field → another name that a file may use
    text_field: str = ""  # name of the object that holds the text model's fields; empty: they are not nested

    def prepare(self, file: ConfigFile) -> ConfigFile:
        """Return the text model's fields, under Llama's names too, with defaults for those left out."""
        if self.text_field in file:
            file = file.nested(self.text_field)
        return file.with_names(self.renamed).with_defaults(named(self.defaults, self.renamed))

    def rules(self) -> Mapping[str, Rule]:
        return {**LLAMA, **self.own}
