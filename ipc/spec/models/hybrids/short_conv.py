"""CONV_FAMILIES: architectures in which short convolutions stand beside attention, in the form of FAMILIES: LFM2."""

from __future__ import annotations

from ..config_file import ConfigFile
from ..family_rules import Family, Rule, head_norms, rms
from ..model_config import ActivationConfig, ExpertsConfig, LayerConfig, StateConfig, StateNames, TensorNames
from ..model_fields import experts_of
from .layer_mixers import layer_kinds, mixed_layers

KINDS = ("conv", "full_attention")
NORM = "norm_eps"


def kinds(file: ConfigFile) -> list[str]:
    num_layers = file.positive("num_hidden_layers")
    attending = set(file.wholes("full_attn_idxs", list(range(num_layers))))
    return layer_kinds(file, KINDS, [KINDS[layer in attending] for layer in range(num_layers)])


def layers(file: ConfigFile) -> list[LayerConfig]:
    return mixed_layers(kinds(file))


def sparse_layers(file: ConfigFile) -> list[LayerConfig]:
    return mixed_layers(kinds(file), file.whole("num_dense_layers", 2))


def short_conv(file: ConfigFile) -> StateConfig:
    has_bias, conv_size = file.flag("conv_bias"), file.positive("conv_L_cache", 3)
    if conv_size == 1:
        file.refuse_native("conv_L_cache 1, convolutions of a single token, has no native layers")
    return StateConfig(
        kind="conv",
        num_heads=file.positive("hidden_size"),
        conv_size=conv_size,
        conv_parts="v",
        has_conv_activation=False,
        has_conv_bias=has_bias,
        has_projection_bias=has_bias,
        has_output_bias=has_bias,
        gate="product",
        projections={"in_proj": "uzv"},
        names=StateNames(block="conv", conv="conv"),
    )


def inner_size(file: ConfigFile) -> int:
    """Return the MLP's inner size. With block_auto_adjust_ff_dim it is 2/3 of the field, times a factor, rounded up."""
    size = file.positive("block_ff_dim") if "block_ff_dim" in file else file.positive("intermediate_size")
    if not file.flag("block_auto_adjust_ff_dim", True):
        return size
    multiple = file.positive("block_multiple_of", 256)
    size = int(file.above_zero("block_ffn_dim_multiplier", 1.0) * int(2 * size / 3))
    return -(-size // multiple) * multiple


def experts(file: ConfigFile) -> ExpertsConfig:
    return experts_of(
        file,
        "moe_intermediate_size",
        score="sigmoid",
        has_choice_bias=file.flag("use_expert_bias", True),
        scale=file.number("routed_scaling_factor", 1.0),
    )


def is_tied(file: ConfigFile) -> bool:
    return file.flag("tie_embedding") if "tie_embedding" in file else file.flag("tie_word_embeddings", True)


NAMES = TensorNames(
    norm="model.embedding_norm",
    input_norm="operator_norm",
    mlp_norm="ffn_norm",
    output="self_attn.out_proj",
    query_norm="self_attn.q_layernorm",
    key_norm="self_attn.k_layernorm",
    gate="feed_forward.w1",
    up="feed_forward.w3",
    down="feed_forward.w2",
    experts="feed_forward",
    expert_matrices=("w1", "w3", "w2"),
    choice_bias="expert_bias",
)
LFM2: dict[str, Rule] = {
    "norm": rms(eps=NORM, default=1e-5),
    "head_norms": head_norms(rms(eps=NORM, default=1e-5)),
    "intermediate_size": inner_size,
    "layers": layers,
    "state": short_conv,
    "activation": ActivationConfig(),
    "tie_word_embeddings": is_tied,
    "names": NAMES,
}
SIZES = {
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 128_000,
    "rope_theta": 1e6,
    "eos_token_id": 2,
    "bos_token_id": 1,
}
CONV_FAMILIES: dict[str, Family] = {
    "Lfm2ForCausalLM": Family(LFM2, SIZES),
    "Lfm2MoeForCausalLM": Family(
        {
            **LFM2,
            "layers": sparse_layers,
            "experts": experts,
            "intermediate_size": lambda file: file.positive("intermediate_size"),
        },
        {
            **SIZES,
            "moe_intermediate_size": 1792,
            "num_experts_per_tok": 4,
            "num_experts": 32,
            "norm_topk_prob": True,
        },
    ),
}
