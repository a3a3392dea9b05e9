"""GEMMA4: Gemma 4's family, whose full layers have heads of another size and, in some models, keys as values."""

from __future__ import annotations

import msgspec

from . import model_fields as fields
from .config_file import ConfigFile
from .families import GEMMA, SANDWICH, VISION
from .family_rules import Family, Rule, activation, head_dim_of, head_norms, kv_heads_of, number, rms
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
    """Return the first of the layers that attend to keys and values of layers before them."""
    return file.positive("num_hidden_layers") - int(file.get("num_kv_shared_layers", 0))


def layers(file: ConfigFile) -> list[LayerConfig]:
    if file.get("use_bidirectional_attention") == "all":
        file.refuse("use_bidirectional_attention all is not supported: give a causal model")
    if int(file.get("hidden_size_per_layer_input")):
        file.refuse_native("embeddings of each layer (hidden_size_per_layer_input) have no native layers")
    kinds, first, window = kinds_of(file), first_sharing(file), fields.window_of(file)
    has_keys_as_values, num_kv_heads = file.flag("attention_k_eq_v"), kv_heads_of(file)
    if has_keys_as_values and "num_global_key_value_heads" in file:
        num_kv_heads = file.positive("num_global_key_value_heads")
    head_dim, inner_size = file.positive("global_head_dim"), file.positive("intermediate_size")
    own_kinds = kinds[:first]
    if set(kinds) != set(own_kinds):
        file.refuse(f"num_kv_shared_layers {len(kinds) - first} leaves no layer of some type with its own keys")

    def layer_of(layer: int, kind: str) -> LayerConfig:
        is_full, is_sharing = kind == FULL, layer >= first
        return LayerConfig(
            window=None if is_full else window,
            rope=int(not is_full),
            has_experts=file.flag("enable_moe_block"),
            head_dim=head_dim if is_full else None,
            num_kv_heads=num_kv_heads if is_full else None,
            intermediate_size=2 * inner_size if is_sharing and file.flag("use_double_wide_mlp") else None,
            are_values_keys=is_full and has_keys_as_values,
            kv_layer=first - 1 - own_kinds[::-1].index(kind) if is_sharing else None,
        )

    return [layer_of(layer, kind) for layer, kind in enumerate(kinds)]


def ropes(file: ConfigFile) -> list[RopeConfig]:
    return fields.ropes_by_kind(file, head_dim_of(file), 10000.0, file.positive("global_head_dim"))


def experts(file: ConfigFile) -> ExpertsConfig | None:
    if not file.flag("enable_moe_block"):
        return None
    act = activation("hidden_activation", "gelu_pytorch_tanh")(file)
    return fields.experts_of(file, "moe_intermediate_size", is_normalized=True, activation=act, is_beside_mlp=True)


def names(file: ConfigFile) -> TensorNames:
    """Files may hold the unused keys and values of layers that attend to those of others."""
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
        "global_head_dim": 512,
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
