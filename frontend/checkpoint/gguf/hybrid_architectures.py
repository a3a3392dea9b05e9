"""HYBRID_ARCHITECTURES: the architectures in which some layers keep a state, in the form of `architectures.py`.

In a file, a layer attends if it has KV heads (attention.head_count_kv, a list), or by a rule of its own in Qwen's.
Scales that a family has in config.json are contained in the weights of Falcon-H1's files.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ....ipc.spec.models.config_file import MAX_LAYERS
from .architecture import Architecture, Fields, by_layer, count, head_dim, in_any_layer, known_number, scaled
from .expert_architectures import EXPERTS, FURTHER, NEXTN, SIGMOID, layers_that_run, sigmoid, whole
from .metadata import Metadata

STATE, ATTENTION = "linear_attention", "full_attention"
KV_HEADS, INNER_SIZE = "attention.head_count_kv", "feed_forward_length"
RECURRENT = "attention.recurrent_layers"
SECTIONS = "rope.dimension_sections"  # of time, row and column, which are one and the same number for text
ATTENTION_BIAS: Fields = {"attention_bias": in_any_layer("attn_q.bias")}


def kinds(data: Metadata) -> list[str]:
    """Return the kind of each layer: one without KV heads keeps a state."""
    return [ATTENTION if heads else STATE for heads in by_layer(data, KV_HEADS, least=0)]


def most_by_layer(key: str) -> Callable[[Metadata], int]:
    """Return the rule for the one number that all layers have of which a file does not say 0."""

    def rule(data: Metadata) -> int:
        stated = {number for number in by_layer(data, key, least=0) if number}
        if len(stated) > 1:
            data.refuse(f"{data.architecture}.{key} {data.whole(key)!r:.100} is not supported: layers differ")
        return max(stated, default=1)

    return rule


def quotient(key: str, divisor: str) -> Callable[[Metadata], int]:
    """Return the rule for one key's number divided by another's. ConfigError if the quotient is not whole."""

    def rule(data: Metadata) -> int:
        number, by = data.count(key, least=1), data.count(divisor, least=1)
        if number % by:
            data.refuse(f"{data.architecture}.{key} {number} is not a multiple of {data.architecture}.{divisor} {by}")
        return number // by

    return rule


def qwen_kinds(data: Metadata) -> list[str]:
    """Return the kind of each layer, from a list of flags or from the period of layers that attend."""
    num_layers, flags = data.count("block_count", most=MAX_LAYERS), data.whole(RECURRENT)
    if flags is None:
        period = data.count("full_attention_interval", 4, least=1)
        flags = [(layer + 1) % period != 0 for layer in range(num_layers)]
    if not isinstance(flags, list) or len(flags) != num_layers:
        layers = f"{num_layers} layers ({data.architecture}.block_count)"
        data.refuse(f"{data.architecture}.{RECURRENT} must say for each of {layers} whether it keeps a state")
    return [STATE if each else ATTENTION for each in flags[: layers_that_run(data)]]


def nemotron_kinds(data: Metadata) -> list[str]:
    """Return the kind of each layer, which is a mixer or an MLP alone: MLPs have an inner size."""
    sizes = zip(by_layer(data, KV_HEADS, least=0), by_layer(data, INNER_SIZE, least=0), strict=True)
    return [ATTENTION if heads else "mlp" if size else STATE for heads, size in sizes]


def nemotron_expert_kinds(data: Metadata) -> list[str]:
    """Return the kind of each layer of a file that may have experts. A dense MLP is known by its tensor alone: for the
    converter only layers of experts have an inner size."""
    heads = by_layer(data, KV_HEADS, least=0)
    kinds = []
    for layer in range(layers_that_run(data)):
        if heads[layer]:
            kinds.append(ATTENTION)
        elif data.has(f"blk.{layer}.ffn_up_exps.weight"):
            kinds.append("moe")
        else:
            kinds.append("mlp" if data.has(dense_up(layer)) else STATE)
    return kinds


def dense_up(layer: int) -> str:
    return f"blk.{layer}.ffn_up.weight"


def dense_size(data: Metadata) -> int:
    """Return the inner size of dense MLPs; 1 if there are none. ConfigError if they differ."""
    ups = (dense_up(layer) for layer in range(layers_that_run(data)))
    sizes = {data.shape_of(name)[0] for name in ups if data.has(name)}
    if len(sizes) > 1:
        data.refuse(f"dense MLPs of {len(sizes)} inner sizes, {sorted(sizes)!r:.100}, are not supported")
    return max(sizes, default=1)


def attention_scale(data: Metadata) -> float:
    return data.number("attention.scale", 0.0) or head_dim(data) ** -0.5


def shared_size(data: Metadata) -> int:
    """Return the inner size of Granite's dense MLP, beside experts or alone."""
    return data.count("expert_shared_feed_forward_length", data.count(INNER_SIZE, least=1), least=1)


def positions(data: Metadata) -> str:
    """Return the kind of Granite's positions. The key is a switch for them in llama.cpp, too."""
    return "rope" if data.get("rope.scaling.finetuned", True) else "nope"


MIXED: Fields = {**ATTENTION_BIAS, "layer_types": kinds, "num_key_value_heads": most_by_layer(KV_HEADS)}
MAMBA: Fields = {
    "mamba_d_conv": count("ssm.conv_kernel"),
    "mamba_d_state": count("ssm.state_size"),
    "mamba_n_groups": count("ssm.group_count"),
    "mamba_n_heads": count("ssm.time_step_rank"),
    "mamba_d_head": quotient("ssm.inner_size", "ssm.time_step_rank"),
    "mamba_conv_bias": in_any_layer("ssm_conv1d.bias"),
    "mamba_proj_bias": in_any_layer("ssm_in.bias"),
}
GRANITE: Fields = {
    **MIXED,
    **MAMBA,
    "mamba_expand": quotient("ssm.inner_size", "embedding_length"),
    "position_embedding_type": positions,
    "shared_intermediate_size": shared_size,
    "num_local_experts": whole("expert_count"),
    "num_experts_per_tok": whole("expert_used_count"),
    "attention_multiplier": attention_scale,
    "embedding_multiplier": scaled("embedding_scale"),
    "residual_multiplier": scaled("residual_scale"),
    "logits_scaling": scaled("logit_scale"),
}
FALCON: Fields = {
    **ATTENTION_BIAS,
    **MAMBA,
    "mamba_d_ssm": count("ssm.inner_size"),
    "mamba_rms_norm": in_any_layer("ssm_norm.weight"),
    "mamba_norm_before_gate": False,
    "projectors_bias": in_any_layer("ssm_out.bias"),
    "mlp_bias": in_any_layer("ffn_up.bias"),
}
NEMOTRON: Fields = {
    **{name: rule for name, rule in MAMBA.items() if name != "mamba_proj_bias"},
    "layers_block_type": nemotron_kinds,
    "num_key_value_heads": most_by_layer(KV_HEADS),
    "intermediate_size": most_by_layer(INNER_SIZE),
    "use_bias": in_any_layer("ssm_in.bias"),
    "mlp_bias": in_any_layer("ffn_up.bias"),
    "time_step_min": 0.0,  # llama.cpp bounds no steps; the model's own code neither
}
NEMOTRON_EXPERTS: Fields = {
    **NEMOTRON,
    **SIGMOID,
    **FURTHER,
    "layers_block_type": nemotron_expert_kinds,
    "intermediate_size": dense_size,
    "moe_intermediate_size": most_by_layer("expert_feed_forward_length"),
    "num_experts_per_tok": most_by_layer("expert_used_count"),
    "moe_shared_expert_intermediate_size": count("expert_shared_feed_forward_length"),
    "moe_latent_size": known_number("moe_latent_size"),
    "mlp_bias": lambda data: any(in_any_layer(f"{up}.bias")(data) for up in ("ffn_up", "ffn_up_shexp")),
}
LFM2: Fields = {
    "layer_types": lambda data: ["conv" if kind == STATE else kind for kind in kinds(data)],
    "num_key_value_heads": most_by_layer(KV_HEADS),
    "conv_L_cache": count("shortconv.l_cache"),
    "conv_bias": in_any_layer("shortconv.conv.bias"),
    "block_auto_adjust_ff_dim": False,
}
LFM2_NAMES = {"norm": "token_embd_norm"}
QWEN: Fields = {
    **ATTENTION_BIAS,
    **FURTHER,
    "layer_types": qwen_kinds,
    "linear_conv_kernel_dim": count("ssm.conv_kernel"),
    "linear_key_head_dim": count("ssm.state_size"),
    "linear_num_key_heads": count("ssm.group_count"),
    "linear_num_value_heads": count("ssm.time_step_rank"),
    "linear_value_head_dim": quotient("ssm.inner_size", "ssm.time_step_rank"),
}
QWEN_EXPERTS: Fields = {
    **EXPERTS,
    "intermediate_size": whole(INNER_SIZE, 1),  # no layer is dense
    "shared_expert_intermediate_size": count("expert_shared_feed_forward_length"),
}
TILED: Fields = {"linear_key_heads_tiled": True}


def qwen(name: str, fields: Fields, passed_over: Sequence[str] = ()) -> Architecture:
    return Architecture(
        name,
        {**QWEN, **fields},
        added=-1.0,
        renamed={"mlp_norm": "post_attention_norm"},
        passed_over=(NEXTN, *passed_over),
    )


HYBRID_ARCHITECTURES: dict[str, Architecture] = {
    "falcon-h1": Architecture("FalconH1ForCausalLM", FALCON),
    "granitehybrid": Architecture(  # also Bamba's
        "GraniteMoeHybridForCausalLM", GRANITE, is_rotated=True, renamed={"gate_up": ""}
    ),
    "lfm2": Architecture("Lfm2ForCausalLM", LFM2, renamed=LFM2_NAMES),
    "lfm2moe": Architecture(
        "Lfm2MoeForCausalLM",
        {
            **LFM2,
            **EXPERTS,
            "num_dense_layers": whole("leading_dense_block_count", most=MAX_LAYERS),
            "use_expert_bias": in_any_layer("exp_probs_b.bias"),
            "routed_scaling_factor": scaled("expert_weights_scale"),
            "scoring_func": sigmoid,
        },
        renamed=LFM2_NAMES,
    ),
    "nemotron_h": Architecture("NemotronHForCausalLM", NEMOTRON, is_rotated=True),
    "nemotron_h_moe": Architecture("NemotronHForCausalLM", NEMOTRON_EXPERTS, is_rotated=True, passed_over=(NEXTN,)),
    "qwen3next": qwen(
        "Qwen3NextForCausalLM",
        {**QWEN_EXPERTS, "linear_qkv_and_z_apart": lambda data: not in_any_layer("ssm_in.weight")(data)},
    ),
    "qwen35": qwen("Qwen3_5ForCausalLM", TILED, (SECTIONS,)),
    "qwen35moe": qwen("Qwen3_5MoeForCausalLM", {**QWEN_EXPERTS, **TILED}, (SECTIONS,)),
}
