"""EXPERT_FAMILIES: architectures with a mixture of experts, in the form of FAMILIES (`families.py`)."""

from __future__ import annotations

from collections.abc import Callable

from . import model_fields as fields
from .config_file import ConfigFile
from .families import ATTENTION_BIAS, ERNIE
from .family_rules import (
    LOCAL_EXPERTS,
    ROUTED_EXPERTS,
    Family,
    Rule,
    activation,
    flag,
    head_dim_of,
    head_norms,
    if_flag,
    rms,
    rope,
    sliding_layers,
)
from .model_config import ActivationConfig, ExpertsConfig, LayerConfig, RopeConfig, TensorNames
from .model_fields import FULL, SLIDING

SWIGLU_ALPHA = 1.702  # the only supported value


def after_dense_layers(default: int) -> Callable[[ConfigFile], list[LayerConfig]]:
    """Return the rule for experts in all layers but the first first_k_dense_replace."""

    def rule(file: ConfigFile) -> list[LayerConfig]:
        num_dense = file.whole("first_k_dense_replace", default)
        return [LayerConfig(has_experts=layer >= num_dense) for layer in range(file.positive("num_hidden_layers"))]

    return rule


def experts_everywhere(file: ConfigFile) -> list[LayerConfig]:
    return [LayerConfig(has_experts=True)] * file.positive("num_hidden_layers")


def dots1_layers(file: ConfigFile) -> list[LayerConfig]:
    """Return the layers. Those from max_window_layers on have windows, unless layer_types lists the kinds; the first
    first_k_dense_replace layers are dense."""
    window, first = fields.window_of(file), file.whole("max_window_layers")
    num_layers, num_dense = file.positive("num_hidden_layers"), file.whole("first_k_dense_replace", 0)
    kinds = [SLIDING if window is not None and layer >= first else FULL for layer in range(num_layers)]
    if "layer_types" in file:
        kinds = fields.layer_kinds(file)
    return [
        LayerConfig(window=window if kind == SLIDING else None, has_experts=layer >= num_dense)
        for layer, kind in enumerate(kinds)
    ]


def qwen2_moe_layers(file: ConfigFile) -> list[LayerConfig]:
    """Return the layers. With use_sliding_window, every second layer before max_window_layers has a window, unless
    layer_types lists the kinds. Every decoder_sparse_step-th layer has experts, except those in mlp_only_layers."""
    window = fields.window_of(file) if file.flag("use_sliding_window") else None
    last, step = file.whole("max_window_layers"), file.whole("decoder_sparse_step", 1) or 1
    dense = set(file.wholes("mlp_only_layers"))
    num_layers = file.positive("num_hidden_layers")
    kinds = [SLIDING if layer % 2 == 0 and layer < last else FULL for layer in range(num_layers)]
    if "layer_types" in file:
        kinds = fields.layer_kinds(file)
    return [
        LayerConfig(
            window=window if kind == SLIDING else None, has_experts=layer not in dense and (layer + 1) % step == 0
        )
        for layer, kind in enumerate(kinds)
    ]


def gpt_oss_layers(file: ConfigFile) -> list[LayerConfig]:
    layers = sliding_layers(2)(file)
    return [LayerConfig(window=layer.window, has_experts=True) for layer in layers]


def ernie_layers(file: ConfigFile) -> list[LayerConfig]:
    """Return the layers. Every moe_layer_interval-th one from moe_layer_start_index to moe_layer_end_index (−1: the
    last layer) has experts."""
    num_layers, interval = file.positive("num_hidden_layers"), file.positive("moe_layer_interval", 1)
    first, last = file.whole("moe_layer_start_index", 1), file.whole("moe_layer_end_index", -1, least=-1)
    last = num_layers - 1 if last == -1 else last
    return [
        LayerConfig(has_experts=(layer + 1) % interval == 0 and first <= layer <= last) for layer in range(num_layers)
    ]


def sigmoid_experts(file: ConfigFile) -> ExpertsConfig:
    """Return the config for DeepSeek-V3's router (arXiv 2412.19437, section 2.1.2): sigmoid scores, groups of experts
    and shared experts."""
    num_groups, top_groups = file.positive("n_group", 1), file.positive("topk_group", 1)
    num_experts = file.positive("n_routed_experts")
    if num_experts % num_groups or top_groups > num_groups:
        file.refuse(
            f"n_routed_experts has {num_experts} experts, n_group {num_groups} and topk_group {top_groups} do not fit "
            "together"
        )
    top_k, num_eligible = file.positive("num_experts_per_tok"), num_experts // num_groups * top_groups
    if top_k > num_eligible:
        file.refuse(
            f"num_experts_per_tok {top_k} is above the {num_eligible} experts in topk_group {top_groups} groups"
        )
    size = file.positive("moe_intermediate_size")
    return fields.experts_of(
        file,
        "moe_intermediate_size",
        score="sigmoid",
        has_choice_bias=True,
        num_groups=num_groups,
        top_groups=top_groups,
        group_score="top2",
        scale=file.number("routed_scaling_factor", 1.0),
        shared_size=size * file.whole("n_shared_experts", 0),
        activation=activation()(file),
    )


def gpt_oss_experts(file: ConfigFile) -> ExpertsConfig:
    alpha = file.number("swiglu_alpha", SWIGLU_ALPHA)
    if alpha != SWIGLU_ALPHA:
        file.refuse_native(f"swiglu_alpha {alpha} has no native layers, known is {SWIGLU_ALPHA}")
    clamped = ActivationConfig(kind="swiglu_clamped", limit=file.number("swiglu_limit", 7.0))
    return fields.experts_of(
        file, "intermediate_size", score="softmax_of_chosen", has_bias=True, activation=clamped, is_normalized=False
    )


def ernie_experts(file: ConfigFile) -> ExpertsConfig:
    if file.flag("use_bias"):
        file.refuse_native("use_bias true has no native layers in a model with experts")
    size = file.positive("moe_intermediate_size")
    return fields.experts_of(
        file,
        "moe_intermediate_size",
        has_choice_bias=True,
        is_normalized=True,
        shared_size=size * file.whole("moe_num_shared_experts", 0),
        activation=activation()(file),
    )


def qwen2_experts(file: ConfigFile) -> ExpertsConfig:
    return fields.experts_of(
        file,
        "moe_intermediate_size",
        shared_size=file.positive("shared_expert_intermediate_size"),
        has_shared_gate=True,
        activation=activation()(file),
    )


def olmoe_experts(file: ConfigFile) -> ExpertsConfig:
    if "clip_qkv" in file:
        file.refuse_native("clip_qkv behind the norms of query and key has no native layers")
    return fields.experts_of(file, "intermediate_size", activation=activation()(file))


def minimax_experts(file: ConfigFile) -> ExpertsConfig:
    act = activation()(file)
    return fields.experts_of(
        file, "intermediate_size", score="sigmoid", has_choice_bias=True, is_normalized=True, activation=act
    )


def minimax_ropes(file: ConfigFile) -> list[RopeConfig]:
    """Return the rotary embedding. Published files give its size as rotary_dim, the rotated elements of a head."""
    head_dim = head_dim_of(file)
    rotary_dim = file.positive("rotary_dim", head_dim)
    if rotary_dim > head_dim or rotary_dim % 2:
        file.refuse(f"rotary_dim {rotary_dim} must be an even part of head_dim {head_dim}")
    return rope(part=rotary_dim / head_dim)(file)


def without_speculation(file: ConfigFile) -> TensorNames:
    """Return names that ignore the layers after the last one, which predict further tokens."""
    num_layers, num_further = file.positive("num_hidden_layers"), file.whole("num_nextn_predict_layers", 0)
    return TensorNames(ignored=[f"model.layers.{num_layers + further}." for further in range(num_further)])


SIGMOID: dict[str, Rule] = {"experts": sigmoid_experts, "names": without_speculation}

EXPERT_FAMILIES: dict[str, Family] = {
    "GptOssForCausalLM": Family(
        {
            **ATTENTION_BIAS,
            "layers": gpt_oss_layers,
            "has_sinks": True,
            "experts": gpt_oss_experts,
            "names": TensorNames(router="router", are_experts_interleaved=True, sinks="self_attn.sinks"),
        },
        {
            "attention_bias": True,
            "head_dim": 64,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "rope_theta": 150000.0,
            "sliding_window": 128,
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 32.0,
                "original_max_position_embeddings": 4096,
                "truncate": False,
            },
        },
        LOCAL_EXPERTS,
    ),
    "Glm4MoeForCausalLM": Family(
        {
            **SIGMOID,
            "layers": after_dense_layers(1),
            "ropes": rope(part=0.5),
            "head_norms": if_flag("use_qk_norm", head_norms(rms())),
            "has_qkv_bias": flag("attention_bias"),
        },
        {
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "moe_intermediate_size": 1408,
            "n_routed_experts": 128,
            "n_shared_experts": 1,
            "num_experts_per_tok": 8,
            "norm_topk_prob": True,
        },
        ROUTED_EXPERTS,
    ),
    "Dots1ForCausalLM": Family(
        {**SIGMOID, **ATTENTION_BIAS, "layers": dots1_layers, "head_norms": head_norms(rms())},
        {
            "num_key_value_heads": 32,
            "moe_intermediate_size": 1408,
            "sliding_window": 4096,
            "max_window_layers": 62,
        },
        ROUTED_EXPERTS,
    ),
    "Ernie4_5_MoeForCausalLM": Family(
        {
            **ERNIE,
            "layers": ernie_layers,
            "experts": ernie_experts,
            "names": TensorNames(
                choice_bias="moe_statics.e_score_correction_bias", is_choice_bias_row=True, ignored=["model.mtp_"]
            ),
        },
        {
            "num_key_value_heads": 4,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "moe_intermediate_size": 1536,
            "moe_num_experts": 64,
            "moe_num_shared_experts": 2,
            "moe_k": 6,
        },
        {"num_experts": "moe_num_experts", "num_experts_per_tok": "moe_k"},
    ),
    "SolarOpenForCausalLM": Family(
        {
            **SIGMOID,
            "layers": experts_everywhere,
            "ropes": rope(part=1.0),
            "has_qkv_bias": flag("attention_bias"),
        },
        {
            "head_dim": 128,
            "num_key_value_heads": 8,
            "intermediate_size": 1,  # no layer is dense
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "moe_intermediate_size": 1280,
            "n_routed_experts": 128,
            "n_shared_experts": 1,
            "num_experts_per_tok": 8,
            "norm_topk_prob": True,
        },
        ROUTED_EXPERTS,
    ),
    "MiniMaxM2ForCausalLM": Family(
        {
            "layers": experts_everywhere,
            "ropes": minimax_ropes,
            "head_norms": head_norms(rms(), spans_heads=True),
            "experts": minimax_experts,
            "names": TensorNames(
                experts="block_sparse_moe",
                expert_matrices=("w1", "w3", "w2"),
                choice_bias="e_score_correction_bias",
            ),
        },
        {
            "head_dim": 128,
            "num_key_value_heads": 8,
            "rope_theta": 5e6,
            "num_local_experts": 256,
            "num_experts_per_tok": 8,
        },
        LOCAL_EXPERTS,
    ),
    "OlmoeForCausalLM": Family(
        {
            **ATTENTION_BIAS,
            "layers": experts_everywhere,
            "norm": rms(default=1e-5),
            "head_norms": head_norms(rms(default=1e-5), spans_heads=True),
            "experts": olmoe_experts,
        },
        {"num_experts": 64, "num_experts_per_tok": 8},
        LOCAL_EXPERTS,
    ),
    "Qwen2MoeForCausalLM": Family(
        {
            "layers": qwen2_moe_layers,
            "experts": qwen2_experts,
            "has_qkv_bias": flag("qkv_bias", True),
            "names": TensorNames(shared_expert="shared_expert"),
        },
        {
            "num_key_value_heads": 16,
            "sliding_window": 4096,
            "max_window_layers": 28,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
            "num_experts": 60,
            "num_experts_per_tok": 4,
        },
    ),
}
