"""MAMBA_FAMILIES: architectures in which Mamba2 stands beside attention, in the form of FAMILIES."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import msgspec

from .. import family_rules as rules
from .. import model_fields as fields
from ..config_file import ConfigFile, is_number, shown
from ..expert_families import sigmoid_experts
from ..families import ATTENTION_BIAS, BIASES
from ..family_rules import Family, Rule, activation, flag, number, rms, rope
from ..model_config import ExpertsConfig, LayerConfig, NormConfig, RopeConfig, StateConfig, StateNames, TensorNames
from .layer_mixers import OLD_KINDS, layer_kinds, mixed_layers

MAMBA, ATTENTION = KINDS = ("linear_attention", "full_attention")
INFINITY = {"__float__": "Infinity"}  # as transformers saves it
SCALED_PARTS = "zvkqa"  # the parts of in_proj, in their order
PATTERN = {"M": MAMBA, "*": ATTENTION, "-": "mlp", "E": "moe"}  # of hybrid_override_pattern


def dt_limits(file: ConfigFile) -> tuple[float, float | None]:
    """Parse time_step_limit, two numbers of which the second may be infinite, in one of two spellings."""
    limits = file.get("time_step_limit", [0.0, math.inf])
    if not isinstance(limits, list | tuple) or len(limits) != 2:
        file.refuse(f"time_step_limit must be a list of two numbers, it is {shown(limits)}")
    least, most = limits
    is_bounded = most != math.inf and most != INFINITY
    if not is_number(least) or (is_bounded and not is_number(most)):
        file.refuse(f"time_step_limit must be a list of two numbers, it is {shown(limits)}")
    return float(least), float(most) if is_bounded else None


def mamba_of(file: ConfigFile, inner_size: int, **more: Any) -> StateConfig:
    """Parse the sizes of Mamba2 mixers. `inner_size`: elements of all heads together. ConfigError if the heads do not
    have this size together, or do not divide among groups."""
    num_heads, groups = file.positive("mamba_n_heads"), file.positive("mamba_n_groups")
    head_dim = inner_size // num_heads
    if file.get("mamba_d_head") != "auto":
        head_dim = file.positive("mamba_d_head")
    if head_dim * num_heads != inner_size or num_heads % groups:
        file.refuse(
            f"mamba_n_heads {num_heads} of mamba_d_head {head_dim} do not make {inner_size} elements, or do not divide "
            f"into mamba_n_groups {groups}"
        )
    act = activation()(file).kind
    if act != "silu":
        file.refuse_native(f"hidden_act {act} in the convolutions of Mamba2 has no native layers")
    least, most = dt_limits(file)
    has_bias = file.flag("mamba_proj_bias")
    own = {
        "kind": "mamba2",
        "num_heads": num_heads,
        "key_heads": groups,
        "key_dim": file.positive("mamba_d_state"),
        "value_dim": head_dim,
        "conv_size": file.positive("mamba_d_conv"),
        "conv_parts": "vkq",
        "has_conv_bias": file.flag("mamba_conv_bias", True),
        "has_projection_bias": has_bias,
        "has_output_bias": has_bias,
        "min_dt": least,
        "max_dt": most,
        "gate": "silu_then_norm",
        "norm": rms(default=1e-5)(file),
        "norm_groups": groups,
        "has_skip": True,
        "projections": {"in_proj": SCALED_PARTS},
        "names": StateNames(block="mamba"),
    }
    return StateConfig(**{**own, **more})


def expanded(file: ConfigFile) -> int:
    return file.positive("mamba_expand") * file.positive("hidden_size")


def mamba(file: ConfigFile) -> StateConfig:
    return mamba_of(file, expanded(file))


def granite_mamba(file: ConfigFile) -> StateConfig:
    return mamba_of(file, expanded(file), norm=rms()(file))


def granite_layers(file: ConfigFile) -> list[LayerConfig]:
    """Return the layers. They have no positions, unless position_embedding_type is rope."""
    kinds = layer_kinds(file, KINDS, [MAMBA] * file.positive("num_hidden_layers"))
    layers = mixed_layers(kinds, 0 if file.whole("num_local_experts") else None)
    index = 0 if file.text("position_embedding_type", "none") == "rope" else None
    return [msgspec.structs.replace(layer, rope=index) for layer in layers]


def granite_experts(file: ConfigFile) -> ExpertsConfig | None:
    """Return the experts. Each token also passes the MLP of shared_intermediate_size, alone if there are no experts."""
    if not file.whole("num_local_experts"):
        return None
    return fields.experts_of(
        file,
        "intermediate_size",
        score="softmax_of_chosen",
        is_normalized=False,
        shared_size=file.positive("shared_intermediate_size"),
        activation=activation()(file),
    )


def bamba_layers(file: ConfigFile) -> list[LayerConfig]:
    attending = set(file.wholes("attn_layer_indices"))
    return mixed_layers([KINDS[layer in attending] for layer in range(file.positive("num_hidden_layers"))])


def bamba_ropes(file: ConfigFile) -> list[RopeConfig]:
    """Return the rotary embedding. transformers rotates half of a head whatever the file says."""
    return rope(part=0.5)(file.with_fields({"partial_rotary_factor": None}))


def falcon_layers(file: ConfigFile) -> list[LayerConfig]:
    return [LayerConfig(mixer="both")] * file.positive("num_hidden_layers")


def falcon_mamba(file: ConfigFile) -> StateConfig:
    inner_size = file.positive("mamba_d_ssm") if "mamba_d_ssm" in file else expanded(file)
    has_norm = file.flag("mamba_rms_norm")
    gate = "norm_then_silu" if file.flag("mamba_norm_before_gate", True) else "silu_then_norm"
    found = multipliers(file, "ssm_multipliers", 5)
    return mamba_of(
        file,
        inner_size,
        gate=gate if has_norm else "silu",
        norm=rms(default=1e-5)(file) if has_norm else None,
        has_output_bias=file.flag("projectors_bias"),
        input_scale=file.number("ssm_in_multiplier", 1.0),
        output_scale=file.number("ssm_out_multiplier", 1.0),
        part_scales={} if set(found) == {1.0} else dict(zip(SCALED_PARTS, found, strict=True)),
    )


def multipliers(file: ConfigFile, name: str, count: int) -> list[float]:
    """Return the numbers of a field that may be left out, then ones."""
    found = file.get(name, [1.0] * count)
    if not isinstance(found, list | tuple) or len(found) != count or not all(map(is_number, found)):
        file.refuse(f"{name} must be a list of {count} numbers, it is {shown(found)}")
    return list(map(float, found))


def falcon_scale(file: ConfigFile) -> float:
    """Return the scale of scores, in which the factor of keys is contained."""
    return file.number("key_multiplier", 1.0) / math.sqrt(rules.head_dim_of(file))


def factor(name: str, index: int) -> Callable[[ConfigFile], float]:
    """Return the rule for one of two numbers in a field."""
    return lambda file: multipliers(file, name, 2)[index]


nemotron_activation = activation("mlp_hidden_act", "relu2", is_gated=False)


def nemotron_kinds(file: ConfigFile) -> list[str]:
    """Return the kind of each layer, from layers_block_type or from hybrid_override_pattern."""
    kinds = file.get("layers_block_type") or file.get("layer_types")
    if "hybrid_override_pattern" in file and kinds is None:
        pattern = file.text("hybrid_override_pattern")
        kinds = [PATTERN.get(letter, letter) for letter in pattern]
    if not isinstance(kinds, list) or not kinds:
        file.refuse(f"layers_block_type must be a list with the type of each layer, it is {shown(kinds)}")
    kinds = [OLD_KINDS.get(kind, kind) if isinstance(kind, str) else kind for kind in kinds]
    for kind in kinds:
        if kind == "moe" and file.get("moe_latent_size") is not None:
            file.refuse_native("moe_latent_size, a projection before the experts, has no native layers")
        if kind == "moe" and file.flag("mlp_bias"):
            file.refuse_native("mlp_bias, biases in shared experts, has no native layers")
        if kind not in PATTERN.values():
            file.refuse(f"layers_block_type {kind!s:.100} is not supported, known are {', '.join(PATTERN.values())}")
    return kinds


def nemotron_layers(file: ConfigFile) -> list[LayerConfig]:
    """Return the layers, each of which is a mixer, an MLP or experts alone. None has positions."""
    own: dict[str, Any] = {
        MAMBA: {"mixer": "state", "has_mlp": False},
        ATTENTION: {"mixer": "attention", "has_mlp": False},
        "mlp": {"mixer": "none"},
        "moe": {"mixer": "none", "has_experts": True},
    }
    return [LayerConfig(rope=None, **own[kind]) for kind in nemotron_kinds(file)]


def nemotron_experts(file: ConfigFile) -> ExpertsConfig | None:
    """Return the experts, which are chosen as DeepSeek-V3's are and have no gates; None if no layer has any."""
    if "moe" not in nemotron_kinds(file):
        return None
    return msgspec.structs.replace(
        sigmoid_experts(file),
        activation=nemotron_activation(file),
        shared_size=file.positive("moe_shared_expert_intermediate_size"),
    )


def nemotron_mamba(file: ConfigFile) -> StateConfig:
    """Return the mixers. transformers bounds dt by time_step_min alone, in place of time_step_limit."""
    own = file.with_fields({"time_step_limit": [file.number("time_step_min", 0.001), math.inf]})
    own = own.with_fields({"hidden_act": file.text("mamba_hidden_act", "silu")})
    inner_size = file.positive("mamba_n_heads") * file.positive("mamba_d_head")
    has_bias = file.flag("use_bias")
    return mamba_of(
        own,
        inner_size,
        norm=nemotron_norm(file),
        has_projection_bias=has_bias,
        has_output_bias=has_bias,
        names=StateNames(block="mixer"),
    )


def nemotron_norm(file: ConfigFile) -> NormConfig:
    return rms(eps="layer_norm_epsilon", default=1e-5)(file)


def feed_forward() -> TensorNames:
    """Return the names of Bamba and Falcon-H1."""
    return TensorNames(
        norm="model.final_layernorm",
        mlp_norm="pre_ff_layernorm",
        gate="feed_forward.gate_proj",
        up="feed_forward.up_proj",
        down="feed_forward.down_proj",
    )


SIZES = {
    "num_attention_heads": 32,
    "mamba_n_heads": 128,
    "mamba_d_head": "auto",
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GRANITE: dict[str, Rule] = {
    **ATTENTION_BIAS,
    "layers": granite_layers,
    "state": granite_mamba,
    "attention_scale": number("attention_multiplier"),
    "embedding_scale": number("embedding_multiplier"),
    "residual_scale": number("residual_multiplier"),
    "logit_scale": rules.inverse("logits_scaling"),
    "intermediate_size": lambda file: file.positive("shared_intermediate_size"),
    "experts": granite_experts,
    "names": TensorNames(
        gate_up="shared_mlp.input_linear",
        down="shared_mlp.output_linear",
        experts="block_sparse_moe",
        expert_list="",
        expert_stacks=("input_linear.weight", "output_linear.weight"),
        router="router.layer",
        shared_expert="",
    ),
}
FALCON: dict[str, Rule] = {
    **BIASES,
    "norm": rms(default=1e-5),
    "layers": falcon_layers,
    "state": falcon_mamba,
    "attention_scale": falcon_scale,
    "attention_input_scale": number("attention_in_multiplier"),
    "attention_output_scale": number("attention_out_multiplier"),
    "gate_scale": factor("mlp_multipliers", 0),
    "mlp_output_scale": factor("mlp_multipliers", 1),
    "embedding_scale": number("embedding_multiplier"),
    "logit_scale": number("lm_head_multiplier"),
    "names": feed_forward(),
}
NEMOTRON: dict[str, Rule] = {
    "norm": nemotron_norm,
    "num_layers": lambda file: len(nemotron_kinds(file)),
    "layers": nemotron_layers,
    "state": nemotron_mamba,
    "ropes": [],
    "activation": nemotron_activation,
    "experts": nemotron_experts,
    "has_mlp_bias": flag("mlp_bias"),
    "tie_word_embeddings": False,  # whatever the file says, as in transformers
    "names": TensorNames(
        embedding="model.embeddings",
        norm="model.norm_f",
        input_norm="norm",
        mlp_norm="norm",
        query="mixer.q_proj",
        key="mixer.k_proj",
        value="mixer.v_proj",
        output="mixer.o_proj",
        up="mixer.up_proj",
        down="mixer.down_proj",
        experts="mixer",
        roots=["backbone."],
        ignored=["mtp."],
    ),
}
MAMBA_FAMILIES: dict[str, Family] = {
    "GraniteMoeHybridForCausalLM": Family(
        GRANITE,
        {
            **SIZES,
            "shared_intermediate_size": 1024,
            "max_position_embeddings": 2048,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
        },
        {"layer_types": "layers_block_type"},
    ),
    "BambaForCausalLM": Family(
        {
            **BIASES,
            "norm": rms(default=1e-5),
            "layers": bamba_layers,
            "state": mamba,
            "ropes": bamba_ropes,
            "names": feed_forward(),
        },
        {**SIZES, "num_key_value_heads": 8, "max_position_embeddings": 262144},
    ),
    "FalconH1ForCausalLM": Family(
        FALCON, {**SIZES, "num_key_value_heads": 8, "max_position_embeddings": 8192, "mamba_d_ssm": 1024}
    ),
    "NemotronHForCausalLM": Family(
        NEMOTRON,
        {
            **SIZES,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "intermediate_size": 21504,
            "max_position_embeddings": 4096,
            "mamba_d_head": 64,
            "mamba_n_groups": 8,
            "mamba_d_state": 128,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 7688,
            "moe_shared_expert_intermediate_size": 7688,
            "norm_topk_prob": True,
        },
        {
            "mamba_n_heads": "mamba_num_heads",
            "mamba_d_head": "mamba_head_dim",
            "mamba_n_groups": "n_groups",
            "mamba_d_state": "ssm_state_size",
            "mamba_d_conv": "conv_kernel",
            "mamba_conv_bias": "use_conv_bias",
        },
    ),
}
