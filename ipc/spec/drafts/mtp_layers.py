"""Layers for multi-token prediction in the checkpoints of models, found by the names of their tensors.

    Qwen3-Next, Qwen3.5   mtp.fc, mtp.layers.0, behind mtp.norm the lm_head of the model
    DeepSeek-V3, GLM-4.5  model.layers.N with eh_proj, enorm, hnorm and shared_head, N layers before it
    MiMo                  model.mtp_layers.0 with input_proj, token_layernorm, hidden_layernorm and final_layernorm

If there are several such layers, the first makes all drafts.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import msgspec

from ...errors import ConfigError
from ..models.model_config import LayerConfig, ModelConfig
from .head_config import HeadConfig, HeadNames


def mtp_head(folder: Path, tensors: Collection[str], model: ModelConfig) -> tuple[ModelConfig, HeadConfig]:
    """Return a config of which the last layer is the head's, and that of the head. tensors: names of those in the
    model's checkpoint `folder`. ConfigError if it has no such layer."""
    beside = [*model.names.roots, "model."]
    deep = [f"{root}layers.{model.num_layers}." for root in beside]
    own = [f"{root}mtp_layers.0." for root in beside]
    if "mtp.fc.weight" in tensors:
        return _qwen_head(tensors, model)
    for layer in deep:
        if f"{layer}eh_proj.weight" in tensors:
            return _deep_head(layer, tensors, model)
    for layer in own:
        if f"{layer}input_proj.weight" in tensors:
            return _mimo_head(layer, tensors, model)
    looked = ", ".join(["mtp.fc", *(f"{layer}eh_proj" for layer in deep), *(f"{layer}input_proj" for layer in own)])
    raise ConfigError(
        f"{folder}: method mtp needs a layer for multi-token prediction, but there is none of the tensors {looked}: "
        "choose a checkpoint with such layers, or leave the method out"
    )


def _qwen_head(tensors: Collection[str], model: ModelConfig) -> tuple[ModelConfig, HeadConfig]:
    names = HeadNames(
        layer="mtp.layers.0.",
        projection="mtp.fc",
        embedding_norm="mtp.pre_fc_norm_embedding",
        state_norm="mtp.pre_fc_norm_hidden",
        norm="mtp.norm",
    )
    layer = msgspec.structs.replace(model.names, layers="mtp.layers")
    return _with_layers(model, layer, [_layer(tensors, names.layer, model)]), _head(model, names, continues_normed=True)


def _deep_head(layer: str, tensors: Collection[str], model: ModelConfig) -> tuple[ModelConfig, HeadConfig]:
    names = HeadNames(
        layer=layer,
        projection=f"{layer}eh_proj",
        embedding_norm=f"{layer}enorm",
        state_norm=f"{layer}hnorm",
        norm=f"{layer}shared_head.norm",
        head=f"{layer}shared_head.head" if f"{layer}shared_head.head.weight" in tensors else "",
    )
    inner = msgspec.structs.replace(model.names, layers=layer.removesuffix(f".{model.num_layers}."))
    layers = [*model.layers, _layer(tensors, layer, model)]
    return _with_layers(model, inner, layers), _head(model, names, continues_normed=False)


def _mimo_head(layer: str, tensors: Collection[str], model: ModelConfig) -> tuple[ModelConfig, HeadConfig]:
    names = HeadNames(
        layer=layer,
        projection=f"{layer}input_proj",
        embedding_norm=f"{layer}token_layernorm",
        state_norm=f"{layer}hidden_layernorm",
        norm=f"{layer}final_layernorm",
    )
    inner = msgspec.structs.replace(model.names, layers=layer.removesuffix(".0."))
    head = _head(model, names, continues_normed=True, is_state_first=True)
    return _with_layers(model, inner, [_layer(tensors, layer, model)]), head


def _layer(tensors: Collection[str], prefix: str, model: ModelConfig) -> LayerConfig:
    """Return the head's layer: like the last of the model's that see all tokens, with experts if it has their
    tensors."""
    like = next(each for each in reversed(model.layers) if each.has_attention and each.window is None)
    experts = f"{prefix}{model.names.experts}.{model.names.expert_list}"
    has_experts = model.experts is not None and any(name.startswith(experts) for name in tensors)
    return msgspec.structs.replace(like, mixer="attention", has_mlp=True, has_experts=has_experts, kv_layer=None)


def _with_layers(model: ModelConfig, names: msgspec.Struct, layers: list[LayerConfig]) -> ModelConfig:
    return msgspec.structs.replace(model, names=names, layers=layers, num_layers=len(layers))


def _head(model: ModelConfig, names: HeadNames, *, continues_normed: bool, is_state_first: bool = False) -> HeadConfig:
    return HeadConfig(
        kind="mtp",
        depths=[],
        state_size=model.hidden_size,
        vocab_size=model.vocab_size,
        continues_normed=continues_normed,
        is_state_first=is_state_first,
        names=names,
    )
