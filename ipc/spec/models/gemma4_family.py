"""GEMMA4: Gemma 4's family. Its full layers have heads of another size and, in some models, use keys as values."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from . import model_fields as fields
from .config_file import ConfigFile
from .families import GEMMA, SANDWICH, VISION
from .family_rules import Family, Rule, activation, head_dim_of, head_norms, number, rms
from .model_config import ExpertsConfig, LayerConfig, NormConfig, RopeConfig, TensorNames
from .model_fields import FULL, SLIDING

ROOTS = ["language_model.model.", "model.language_model."]
OTHER_MODELS = [*VISION, "model.audio_tower.", "model.embed_vision.", "model.embed_audio."]  # in the same files
ROPES = {
    SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
}


def kinds_of(file: ConfigFile) -> list[str]:
    """Return the kind of each layer; the last is always full."""
    return [*fields.layer_kinds(file, 6)[:-1], FULL]


def first_sharing(file: ConfigFile) -> int:
    """Return the index of the first layer that uses an earlier layer's keys and values; all layers after it do, too."""
    num_layers, num_sharing = file.positive("num_hidden_layers"), file.whole("num_kv_shared_layers", 0)
    if num_sharing >= num_layers:
        file.refuse(f"num_kv_shared_layers {num_sharing} must be below num_hidden_layers {num_layers}")
    return num_layers - num_sharing


def sizes(file: ConfigFile) -> list[Mapping[str, int]]:
    """Return each layer's head_dim and num_key_value_heads where they differ from the model's. They are read from
    per_layer_config, by the layer's number (transformers since 5.23), or from older fields for all full layers."""
    kinds, listed = kinds_of(file), file.part("per_layer_config")
    if "per_layer_config" not in file:
        full = {"head_dim": file.positive("global_head_dim", 512)}
        if full["head_dim"] % 2:
            file.refuse(f"global_head_dim {full['head_dim']} is odd, rotary embeddings need pairs")
        if file.flag("attention_k_eq_v") and "num_global_key_value_heads" in file:
            full["num_key_value_heads"] = file.positive("num_global_key_value_heads")
        return [full if kind == FULL else {} for kind in kinds]
    own_by_layer = {layer: listed.part(layer) for layer in listed.fields()}
    if others := {name for own in own_by_layer.values() for name in own.fields()} - {"head_dim", "num_key_value_heads"}:
        file.refuse_native(f"per_layer_config with {', '.join(sorted(others)):.200} has no native layers")
    if unknown := own_by_layer.keys() - set(map(str, range(len(kinds)))):
        file.refuse(f"per_layer_config has {', '.join(sorted(unknown)):.200}, layers are 0 to {len(kinds) - 1}")
    return [
        {name: own.positive(name) for name in own.fields() if name in own} if own else {}
        for own in (own_by_layer.get(str(layer)) for layer in range(len(kinds)))
    ]


def layers(file: ConfigFile) -> list[LayerConfig]:
    if file.whole("hidden_size_per_layer_input", 0):
        file.refuse_native("embeddings of each layer (hidden_size_per_layer_input) have no native layers")
    kinds, first, window = kinds_of(file), first_sharing(file), fields.window_of(file)
    has_keys_as_values, inner_size = file.flag("attention_k_eq_v"), file.positive("intermediate_size")
    own_kinds = kinds[:first]
    if set(kinds) != set(own_kinds):
        file.refuse(f"num_kv_shared_layers {len(kinds) - first} leaves no layer of some type with its own keys")

    def layer_of(layer: int, kind: str, own: Mapping[str, int]) -> LayerConfig:
        is_full, is_sharing = kind == FULL, layer >= first
        return LayerConfig(
            window=None if is_full else window,
            rope=int(not is_full),
            has_experts=file.flag("enable_moe_block"),
            head_dim=own.get("head_dim"),
            num_kv_heads=own.get("num_key_value_heads"),
            intermediate_size=2 * inner_size if is_sharing and file.flag("use_double_wide_mlp") else None,
            are_values_keys=is_full and has_keys_as_values,
            kv_layer=first - 1 - own_kinds[::-1].index(kind) if is_sharing else None,
        )

    return [layer_of(layer, kind, own) for layer, (kind, own) in enumerate(zip(kinds, sizes(file), strict=True))]


def ropes(file: ConfigFile) -> list[RopeConfig]:
    """Return the rotary embeddings of full and sliding layers. ConfigError if layers of a kind, which share one, have
    heads of different sizes."""
    sliding, full = (_head_dim_of_kind(file, kind) for kind in (SLIDING, FULL))
    return fields.ropes_by_kind(file, sliding, 10000.0, full)


def _head_dim_of_kind(file: ConfigFile, kind: str) -> int:
    head_dim, layers = head_dim_of(file), zip(sizes(file), kinds_of(file), strict=True)
    found = {own.get("head_dim", head_dim) for own, each in layers if each == kind} or {head_dim}
    if len(found) > 1:
        file.refuse_native(f"per_layer_config with {kind} layers of different head_dim has no native layers")
    return found.pop()


def experts(file: ConfigFile) -> ExpertsConfig | None:
    if not file.flag("enable_moe_block"):
        return None
    act = activation("hidden_activation", "gelu_pytorch_tanh")(file)
    return fields.experts_of(file, "moe_intermediate_size", is_normalized=True, activation=act, is_beside_mlp=True)


def names(file: ConfigFile) -> TensorNames:
    """Return the tensor names. `ignored` has the other models in the file, and the unused key and value tensors of
    layers that use an earlier layer's keys and values."""
    unused = [
        f"{root}layers.{layer}.self_attn.{part}"
        for root in ("model.", *ROOTS)
        for layer in range(first_sharing(file), file.positive("num_hidden_layers"))
        for part in ("k_proj.", "v_proj.", "k_norm.")
    ]
    return msgspec.structs.replace(
        SANDWICH, experts="", router="router.proj", roots=ROOTS, ignored=[*OTHER_MODELS, *unused]
    )


RULES: dict[str, Rule] = {
    **GEMMA,
    "norm": rms(),
    "layers": layers,
    "ropes": ropes,
    "names": names,
    "experts": experts,
    "head_norms": head_norms(rms()),
    "value_norm": lambda file: NormConfig(eps=file.number("rms_norm_eps", 1e-6), has_weight=False),
    "has_layer_scale": True,
    "attention_scale": 1.0,
    "activation": activation("hidden_activation", "gelu_pytorch_tanh"),
    "logit_softcap": number("final_logit_softcapping", 0.0),
}
GEMMA4 = Family(
    RULES,
    {
        "head_dim": 256,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "sliding_window": 512,
        "max_position_embeddings": 131072,
        "hidden_size_per_layer_input": 256,
        "rope_parameters": ROPES,
    },
    {"num_experts_per_tok": "top_k_experts"},
    "text_config",
)
GEMMA4_FAMILIES = {"Gemma4ForCausalLM": GEMMA4, "Gemma4ForConditionalGeneration": GEMMA4}
