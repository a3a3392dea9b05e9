"""EXPERT_ARCHITECTURES: the architectures with a mixture of experts, in the form of `architectures.py`."""

from __future__ import annotations

from .architecture import ATTENTION_BIAS, WINDOW, Architecture, Fields, count

EXPERTS: Fields = {
    "num_experts": count("expert_count"),
    "num_experts_per_tok": count("expert_used_count"),
    "moe_intermediate_size": count("expert_feed_forward_length"),
    "norm_topk_prob": True,
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
}
