"""DELTA_FAMILIES: architectures in which gated delta nets stand beside attention, in the form of FAMILIES."""

from __future__ import annotations

import msgspec

from ..config_file import ConfigFile
from ..expert_families import qwen2_experts
from ..families import ATTENTION_BIAS, OLMO2, POST_NORMS
from ..family_rules import Family, Rule, activation, head_norms, rms, rope
from ..model_config import LayerConfig, NormConfig, RopeConfig, StateConfig, StateNames, TensorNames
from ..model_fields import rope_field
from .layer_mixers import layer_kinds, mixed_layers

KINDS = ("linear_attention", "full_attention")
# Fields of ours, for orders of rows in GGUF files. APART: Qwen3-Next has its parts q, k and v in one tensor, all heads
# of each, and z in another. TILED: Qwen3.5's value heads are in the order of StateConfig.are_key_heads_tiled.
APART = "linear_qkv_and_z_apart"
TILED = "linear_key_heads_tiled"


def delta_net(
    file: ConfigFile,
    projections: dict[str, str],
    names: StateNames,
    norm: NormConfig,
    *,
    by_key_head: tuple[str, ...] = (),
    are_key_heads_tiled: bool = False,
    beta_scale: float = 1.0,
) -> StateConfig:
    """Parse the sizes of gated delta nets. ConfigError if value heads do not divide among key heads."""
    num_heads, key_heads = file.positive("linear_num_value_heads"), file.positive("linear_num_key_heads")
    if num_heads % key_heads:
        file.refuse(f"linear_num_value_heads {num_heads} is not a multiple of linear_num_key_heads {key_heads}")
    act = activation()(file).kind
    if act != "silu":
        file.refuse_native(f"hidden_act {act} in the convolutions of gated delta nets has no native layers")
    return StateConfig(
        kind="gated_delta",
        num_heads=num_heads,
        key_heads=key_heads,
        key_dim=file.positive("linear_key_head_dim"),
        value_dim=file.positive("linear_value_head_dim"),
        conv_size=file.positive("linear_conv_kernel_dim"),
        beta_scale=beta_scale,
        norm=norm,
        projections=projections,
        by_key_head=by_key_head,
        are_key_heads_tiled=are_key_heads_tiled,
        names=names,
    )


def qwen_kinds(file: ConfigFile) -> list[str]:
    period, num_layers = file.positive("full_attention_interval", 4), file.positive("num_hidden_layers")
    return layer_kinds(file, KINDS, [KINDS[(layer + 1) % period == 0] for layer in range(num_layers)])


def qwen_layers(file: ConfigFile) -> list[LayerConfig]:
    return mixed_layers(qwen_kinds(file))


def sparse_layers(file: ConfigFile) -> list[LayerConfig]:
    return mixed_layers(qwen_kinds(file), first_expert=0)


def next_layers(file: ConfigFile) -> list[LayerConfig]:
    """Return Qwen3-Next's layers. Every decoder_sparse_step-th one has experts, except those in mlp_only_layers."""
    step, dense = file.whole("decoder_sparse_step", 1) or 1, set(file.wholes("mlp_only_layers"))
    return [
        msgspec.structs.replace(own, has_experts=layer not in dense and (layer + 1) % step == 0)
        for layer, own in enumerate(qwen_layers(file))
    ]


def next_net(file: ConfigFile) -> StateConfig:
    """Return the gated delta nets. Files have parts by key head, but GGUF files only those of decay and beta."""
    projections = {"in_proj_qkvz": "qkvz", "in_proj_ba": "ba"}
    by_key_head = tuple(projections)
    if file.flag(APART):
        projections = {"in_proj_qkv": "qkv", "in_proj_z": "z", "in_proj_ba": "ba"}
        by_key_head = ("in_proj_ba",)
    return delta_net(file, projections, StateNames(block="linear_attn"), rms()(file), by_key_head=by_key_head)


def qwen_net(file: ConfigFile) -> StateConfig:
    projections = {"in_proj_qkv": "qkv", "in_proj_z": "z", "in_proj_b": "b", "in_proj_a": "a"}
    is_tiled, names = file.flag(TILED), StateNames(block="linear_attn")
    return delta_net(file, projections, names, rms()(file), are_key_heads_tiled=is_tiled)


def has_ropes(file: ConfigFile) -> bool:
    """Return whether layers have positions. Published files say null for rope_theta: they have none."""
    parameters = file.part(rope_field(file))
    return "rope_theta" in parameters or "rope_theta" not in parameters.fields()


def olmo_ropes(file: ConfigFile) -> list[RopeConfig]:
    return rope()(file) if has_ropes(file) else []


def olmo_layers(file: ConfigFile) -> list[LayerConfig]:
    num_layers = file.positive("num_hidden_layers")
    kinds = [KINDS[layer % 4 == 3] for layer in range(num_layers)]
    if KINDS[1] not in kinds:
        kinds[-1] = KINDS[1]
    index = 0 if has_ropes(file) else None
    return [msgspec.structs.replace(own, rope=index) for own in mixed_layers(layer_kinds(file, KINDS, kinds))]


def olmo_net(file: ConfigFile) -> StateConfig:
    """Return the gated delta nets. By default they have as many heads as attention, with keys of 3/4 of hidden_size."""
    num_heads = file.positive("num_attention_heads")
    key_heads = file.positive("linear_num_key_heads", num_heads)
    key_dim = file.positive("linear_key_head_dim", int(0.75 * file.positive("hidden_size") / key_heads))
    found = {
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": file.positive("linear_num_value_heads", num_heads),
        "linear_key_head_dim": key_dim,
        "linear_value_head_dim": file.positive("linear_value_head_dim", 2 * key_dim),
    }
    names = StateNames(
        block="linear_attn",
        conv="{part}_conv1d",
        norm="o_norm",
        output="o_proj",
        layer_norms=("attention_layer_norm", "", "feedforward_layer_norm", ""),
    )
    projections = {f"{part}_proj": part for part in "qkvab"} | {"g_proj": "z"}
    beta_scale = 2.0 if file.flag("linear_allow_neg_eigval", True) else 1.0
    return delta_net(file.with_fields(found), projections, names, NormConfig(eps=1e-5), beta_scale=beta_scale)


QWEN: dict[str, Rule] = {
    **ATTENTION_BIAS,
    "norm": rms(offset=1.0),
    "head_norms": head_norms(rms(offset=1.0)),
    "has_output_gate": True,
    "ropes": rope(part=0.25),
    "layers": qwen_layers,
    "state": qwen_net,
}
NAMES = TensorNames(shared_expert="shared_expert", roots=["model.language_model."], ignored=["mtp.", "model.visual."])
SIZES = {
    "head_dim": 256,
    "num_attention_heads": 16,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "max_position_embeddings": 32768,
}
DENSE = Family({**QWEN, "names": NAMES}, {**SIZES, "num_key_value_heads": 4}, text_field="text_config")
SPARSE = Family(
    {**QWEN, "names": NAMES, "layers": sparse_layers, "experts": qwen2_experts},
    {
        **SIZES,
        "num_key_value_heads": 2,
        "intermediate_size": 1,  # no layer is dense
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_experts_per_tok": 8,
        "num_experts": 256,
        "norm_topk_prob": True,
    },
    text_field="text_config",
)
DELTA_FAMILIES: dict[str, Family] = {
    "Qwen3NextForCausalLM": Family(
        {**QWEN, "names": NAMES, "layers": next_layers, "experts": qwen2_experts, "state": next_net},
        {
            **SIZES,
            "num_key_value_heads": 2,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "num_experts_per_tok": 10,
            "num_experts": 512,
            "norm_topk_prob": True,
        },
    ),
    "OlmoHybridForCausalLM": Family(
        {
            **OLMO2,
            "norm": rms(),
            "head_norms": head_norms(rms(), spans_heads=True),
            "layers": olmo_layers,
            "state": olmo_net,
            "ropes": olmo_ropes,
            "names": msgspec.structs.replace(
                POST_NORMS, saved_norms={"post_attention_layernorm": "feedforward_layer_norm"}
            ),
        },
        {
            "num_attention_heads": 30,
            "linear_conv_kernel_dim": 4,
            "max_position_embeddings": 65536,
            "eos_token_id": 100257,
        },
    ),
    "Qwen3_5ForCausalLM": DENSE,
    "Qwen3_5ForConditionalGeneration": DENSE,
    "Qwen3_5MoeForCausalLM": SPARSE,
    "Qwen3_5MoeForConditionalGeneration": SPARSE,
}
