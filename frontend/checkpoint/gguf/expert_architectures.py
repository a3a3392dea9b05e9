"""EXPERT_ARCHITECTURES: the architectures with a mixture of experts, in the form of `architectures.py`."""

from __future__ import annotations

from collections.abc import Callable

from ....ipc.spec.models.config_file import MAX_LAYERS, MAX_SIZE
from .architecture import ATTENTION_BIAS, WINDOW, Architecture, Fields, count, head_dim, present, scaled
from .gemma4_architecture import GEMMA4
from .metadata import Metadata

NEXTN = "nextn_predict_layers"  # layers behind the last one, which predict further tokens and are not run
SIGMOID_KEY = 2  # of expert_gating_func


EXPERTS: Fields = {
    "num_experts": count("expert_count"),
    "num_experts_per_tok": count("expert_used_count"),
    "moe_intermediate_size": count("expert_feed_forward_length"),
    "norm_topk_prob": True,
}


def whole(name: str, default: int = 0, most: int = MAX_SIZE) -> Callable[[Metadata], int]:
    return lambda data: data.count(name, default, most)


def layers_that_run(data: Metadata) -> int:
    """Return the number of layers without those that predict further tokens."""
    num_layers, num_further = data.count("block_count", most=MAX_LAYERS, least=1), data.count(NEXTN, 0, MAX_LAYERS)
    if num_further >= num_layers:
        data.refuse(f"{data.architecture}.{NEXTN} {num_further} leaves none of {num_layers} layers (block_count)")
    return num_layers - num_further


def further_layers(data: Metadata) -> range:
    """Return the layers that predict further tokens, which are not run."""
    return range(layers_that_run(data), data.count("block_count", most=MAX_LAYERS))


FURTHER: Fields = {"num_hidden_layers": layers_that_run, "num_nextn_predict_layers": whole(NEXTN, most=MAX_LAYERS)}


def sigmoid(data: Metadata) -> str:
    """Return the score of experts. ConfigError if the file asks for another one than the architecture has."""
    if (value := data.get("expert_gating_func", SIGMOID_KEY)) != SIGMOID_KEY:
        known = f"known is {SIGMOID_KEY}, sigmoid"
        data.refuse(f"{data.architecture}.expert_gating_func {value!r:.100} is not supported, {known}")
    return "sigmoid"


SIGMOID: Fields = {
    "n_routed_experts": count("expert_count"),
    "num_experts_per_tok": count("expert_used_count"),
    "moe_intermediate_size": count("expert_feed_forward_length"),
    "n_shared_experts": whole("expert_shared_count"),
    "first_k_dense_replace": whole("leading_dense_block_count", most=MAX_LAYERS),
    "routed_scaling_factor": scaled("expert_weights_scale"),
    "norm_topk_prob": lambda data: data.get("expert_weights_norm", False),
    "n_group": whole("expert_group_count", 1),
    "topk_group": whole("expert_group_used_count", 1),
    "scoring_func": sigmoid,
}
MIXTRAL = Architecture(
    "MixtralForCausalLM",
    {"num_local_experts": count("expert_count"), "num_experts_per_tok": count("expert_used_count")},
    is_rotated=True,
)
EXPERT_ARCHITECTURES: dict[str, Architecture] = {
    "gpt-oss": Architecture(
        "GptOssForCausalLM",
        {
            **WINDOW,
            "attention_bias": True,
            "intermediate_size": count("expert_feed_forward_length"),
            "num_local_experts": count("expert_count"),
            "num_experts_per_tok": count("expert_used_count"),
        },
        renamed={"mlp_norm": "post_attention_norm"},
        scaling={"truncate": False},
    ),
    "qwen2moe": Architecture(
        "Qwen2MoeForCausalLM",
        {
            **EXPERTS,
            "norm_topk_prob": False,
            "shared_expert_intermediate_size": count("expert_shared_feed_forward_length"),
        },
    ),
    "qwen3moe": Architecture("Qwen3MoeForCausalLM", {**ATTENTION_BIAS, **EXPERTS}),
    "dots1": Architecture(
        "Dots1ForCausalLM",
        {**ATTENTION_BIAS, **SIGMOID, "max_window_layers": count("block_count")},  # no windows
    ),
    "ernie4_5-moe": Architecture(
        "Ernie4_5_MoeForCausalLM",
        {
            "use_bias": present("blk.0.attn_q.bias"),
            "moe_num_experts": count("expert_count"),
            "moe_k": count("expert_used_count"),
            "moe_intermediate_size": count("expert_feed_forward_length"),
            "moe_num_shared_experts": whole("expert_shared_count"),
            "moe_layer_start_index": whole("leading_dense_block_count", most=MAX_LAYERS),
            "moe_layer_interval": whole("interleave_moe_layer_step", 1),
        },
    ),
    "gemma4": GEMMA4,
    "glm4moe": Architecture(  # also SolarOpen's, which has neither dense layers nor norms of heads
        "Glm4MoeForCausalLM",
        {
            **ATTENTION_BIAS,
            **SIGMOID,
            **FURTHER,
            "use_qk_norm": present("blk.0.attn_q_norm.weight"),
        },
        renamed={"mlp_norm": "post_attention_norm"},
        passed_over=(NEXTN,),
    ),
    "minimax-m2": Architecture(
        "MiniMaxM2ForCausalLM",
        {
            "num_local_experts": count("expert_count"),
            "num_experts_per_tok": count("expert_used_count"),
            "intermediate_size": count("expert_feed_forward_length"),
            "rotary_dim": lambda data: data.count("rope.dimension_count", head_dim(data), least=1),
            "scoring_func": sigmoid,
        },
    ),
    "olmoe": Architecture(
        "OlmoeForCausalLM",
        {
            **ATTENTION_BIAS,
            "num_experts": count("expert_count"),
            "num_experts_per_tok": count("expert_used_count"),
            "norm_topk_prob": False,
        },
    ),
}
