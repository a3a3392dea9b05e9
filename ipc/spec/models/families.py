"""FAMILIES: the fields of ModelConfig in which each architecture differs from Llama, one entry for each."""

from __future__ import annotations

import msgspec

from . import family_rules as rules
from .family_rules import Family, flag, head_norms, layer_norm, number, rms, rope
from .model_config import NormConfig, TensorNames

SANDWICH = TensorNames(
    attention_output_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    mlp_output_norm="post_feedforward_layernorm",
)
POST_NORMS = TensorNames(
    input_norm="",
    attention_output_norm="post_attention_layernorm",
    mlp_norm="",
    mlp_output_norm="post_feedforward_layernorm",
)
VISION = ["vision_tower.", "model.vision_tower.", "multi_modal_projector.", "model.multi_modal_projector."]
ATTENTION_BIAS = {"has_qkv_bias": flag("attention_bias"), "has_output_bias": flag("attention_bias")}
BIASES = {**ATTENTION_BIAS, "has_mlp_bias": flag("mlp_bias")}
ALL_BIASES = {"has_qkv_bias": True, "has_output_bias": True, "has_mlp_bias": True}
QWEN3 = {**ATTENTION_BIAS, "layers": rules.qwen_windows, "head_norms": head_norms(rms())}
UNGATED = rules.activation(is_gated=False)
GEMMA = {
    **ATTENTION_BIAS,
    "norm": rms(offset=1.0),
    "embedding_scale": rules.scaled_hidden,
    "tie_word_embeddings": flag("tie_word_embeddings", True),
}
GEMMA2 = {
    **GEMMA,
    "names": SANDWICH,
    "activation": rules.activation("hidden_activation", "gelu_pytorch_tanh"),
    "attention_scale": rules.inverse_root("query_pre_attn_scalar"),
    "attention_softcap": number("attn_logit_softcapping", 0.0),
    "logit_softcap": number("final_logit_softcapping", 0.0),
    "layers": rules.sliding_layers(2),
}
GEMMA2_DEFAULTS = {
    "head_dim": 256,
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}
GEMMA3 = {
    **GEMMA2,
    "attention_softcap": 0.0,
    "head_norms": head_norms(rms(offset=1.0)),
    "is_encoder": flag("use_bidirectional_attention"),
    "layers": rules.gemma3_layers,
    "ropes": rules.local_ropes(),
    "names": msgspec.structs.replace(
        SANDWICH, roots=["language_model.model.", "model.language_model."], ignored=VISION
    ),
}
GEMMA3_DEFAULTS = {
    "vocab_size": 262208,
    "head_dim": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131072,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "rope_theta": 1e6,
}
GLM = {
    "has_qkv_bias": flag("attention_bias", True),
    "ropes": rope(is_paired=True, part=0.5),
    "norm": rms(default=1.5625e-7),
}
COHERE = {
    **ATTENTION_BIAS,
    "norm": layer_norm("layer_norm_eps", has_bias=False),
    "is_parallel": True,
    "logit_scale": number("logit_scale", 0.0625),
    "tie_word_embeddings": flag("tie_word_embeddings", True),
    "names": TensorNames(mlp_norm=""),
}
OLMO2 = {
    **ATTENTION_BIAS,
    "norm": rms(default=1e-5),
    "names": POST_NORMS,
    "head_norms": head_norms(rms(default=1e-5), spans_heads=True),
}
ERNIE = {
    "ropes": rope(is_paired=True),
    "norm": rms(default=1e-5),
    "has_qkv_bias": flag("use_bias"),
    "has_output_bias": flag("use_bias"),
    "has_mlp_bias": flag("use_bias"),
    "tie_word_embeddings": flag("tie_word_embeddings", True),
}

MINISTRAL3 = {
    "norm": rms(default=1e-5),
    "layers": rules.windows_everywhere,
    "query_scaling": rules.ministral_scaling,
    "names": TensorNames(roots=["language_model.model.", "model.language_model."], ignored=VISION),
}

FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(BIASES),
    "MistralForCausalLM": Family(
        {"layers": rules.windows_everywhere}, {"num_key_value_heads": 8, "sliding_window": 4096}
    ),
    "MixtralForCausalLM": Family(
        {
            "layers": rules.mixtral_layers,
            "experts": rules.mixtral_experts,
            "names": TensorNames(experts="block_sparse_moe", expert_matrices=("w1", "w3", "w2")),
        },
        {
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
        },
        rules.LOCAL_EXPERTS,
    ),
    "Qwen2ForCausalLM": Family(
        {"layers": rules.qwen_windows, "has_qkv_bias": True},
        {"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28},
    ),
    "Qwen3ForCausalLM": Family(
        QWEN3, {"num_key_value_heads": 32, "head_dim": 128, "sliding_window": 4096, "max_window_layers": 28}
    ),
    "Qwen3MoeForCausalLM": Family(
        {
            **QWEN3,
            "layers": rules.qwen_expert_layers,
            "experts": rules.qwen3_experts,
        },
        {
            "num_key_value_heads": 4,
            "sliding_window": 4096,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
        },
        rules.LOCAL_EXPERTS,
    ),
    "GemmaForCausalLM": Family({**GEMMA, "activation": rules.gemma_activation}, {"head_dim": 256}),
    "Gemma2ForCausalLM": Family(GEMMA2, GEMMA2_DEFAULTS),
    "VaultGemmaForCausalLM": Family(
        {**GEMMA2, "names": TensorNames(mlp_norm="pre_feedforward_layernorm")}, GEMMA2_DEFAULTS
    ),
    "Gemma3ForCausalLM": Family(GEMMA3, {**GEMMA3_DEFAULTS, "vocab_size": 262144}),
    "PhiForCausalLM": Family(
        {
            **ALL_BIASES,
            "has_head_bias": True,
            "is_parallel": True,
            "norm": layer_norm("layer_norm_eps"),
            "head_norms": rules.if_flag("qk_layernorm", head_norms(layer_norm("layer_norm_eps"))),
            "ropes": rope(part=0.5),
            "activation": UNGATED,
            "names": TensorNames(
                norm="model.final_layernorm",
                mlp_norm="",
                output="self_attn.dense",
                up="mlp.fc1",
                down="mlp.fc2",
                query_norm="self_attn.q_layernorm",
                key_norm="self_attn.k_layernorm",
            ),
        },
        {"hidden_act": "gelu_new"},
    ),
    "Phi3ForCausalLM": Family(
        {
            "norm": rms(default=1e-5),
            "layers": rules.windows_everywhere,
            "ropes": rope(part=1.0),
            "names": TensorNames(qkv="self_attn.qkv_proj", gate_up="mlp.gate_up_proj"),
        }
    ),
    "OlmoForCausalLM": Family(
        {
            **ATTENTION_BIAS,
            "norm": NormConfig(kind="layer", eps=1e-5, has_weight=False),
            "qkv_clip": number("clip_qkv", 0.0),
        }
    ),
    "Olmo2ForCausalLM": Family(OLMO2),
    "Olmo3ForCausalLM": Family(
        {**OLMO2, "layers": rules.local_and_global(4), "ropes": rules.local_ropes(500000.0)},
        {"sliding_window": 4096, "rope_theta": 500000.0},
    ),
    "GraniteForCausalLM": Family(
        {
            **BIASES,
            "attention_scale": number("attention_multiplier"),
            "embedding_scale": number("embedding_multiplier"),
            "residual_scale": number("residual_multiplier"),
            "logit_scale": rules.inverse("logits_scaling"),
        }
    ),
    "GlmForCausalLM": Family(
        {**GLM, "names": TensorNames(gate_up="mlp.gate_up_proj")}, {"head_dim": 128, "num_key_value_heads": 2}
    ),
    "Glm4ForCausalLM": Family(
        {
            **GLM,
            "names": TensorNames(
                attention_output_norm="post_self_attn_layernorm",
                mlp_output_norm="post_mlp_layernorm",
                gate_up="mlp.gate_up_proj",
            ),
        },
        {"head_dim": 128, "num_key_value_heads": 2},
    ),
    "CohereForCausalLM": Family(
        {
            **COHERE,
            "ropes": rope(is_paired=True),
            "head_norms": rules.if_flag(
                "use_qk_norm", head_norms(layer_norm("layer_norm_eps", has_bias=False), has_weight_per_head=True)
            ),
        },
        {"rope_theta": 500000.0},
    ),
    "Cohere2ForCausalLM": Family(
        {**COHERE, "ropes": rope(is_paired=True), "layers": rules.cohere2_layers}, {"sliding_window": 4096}
    ),
    "SmolLM3ForCausalLM": Family(
        {**BIASES, "layers": rules.smollm3_layers, "tie_word_embeddings": flag("tie_word_embeddings", True)},
        {"num_key_value_heads": 4, "rope_theta": 2e6},
    ),
    "Starcoder2ForCausalLM": Family(
        {
            "norm": layer_norm("norm_epsilon"),
            "layers": rules.windows_everywhere,
            "activation": UNGATED,
            "has_qkv_bias": flag("use_bias", True),
            "has_output_bias": flag("use_bias", True),
            "has_mlp_bias": flag("use_bias", True),
            "tie_word_embeddings": flag("tie_word_embeddings", True),
            "names": TensorNames(up="mlp.c_fc", down="mlp.c_proj"),
        },
        {"num_key_value_heads": 2, "hidden_act": "gelu_pytorch_tanh"},
    ),
    "NemotronForCausalLM": Family(
        {
            **BIASES,
            "norm": layer_norm("norm_eps", offset=1.0),
            "ropes": rope(part=0.5),
            "activation": UNGATED,
        },
        {"hidden_act": "relu2"},
        {"partial_rotary_factor": "rotary_percent"},
    ),
    "StableLmForCausalLM": Family(
        {
            "norm": layer_norm("layer_norm_eps"),
            "ropes": rope(part=0.25),
            "has_qkv_bias": flag("use_qkv_bias"),
            "is_parallel": flag("use_parallel_residual"),
            "head_norms": rules.if_flag(
                "qk_layernorm", head_norms(layer_norm("layer_norm_eps", has_bias=False), has_weight_per_head=True)
            ),
            "names": rules.stablelm_names,
        },
        {"num_key_value_heads": 32},
    ),
    "ArceeForCausalLM": Family({**BIASES, "norm": rms(default=1e-5), "activation": UNGATED}, {"hidden_act": "relu2"}),
    "HeliumForCausalLM": Family(
        {
            "norm": rms(default=1e-8),
            "ropes": rope(is_paired=True),
            "has_qkv_bias": flag("attention_bias"),
            "has_mlp_bias": flag("mlp_bias"),
        },
        {"head_dim": 128, "rope_theta": 1e5},
    ),
    "Ernie4_5ForCausalLM": Family(ERNIE, {"head_dim": 128, "num_key_value_heads": 2, "rope_theta": 5e5}),
    "SeedOssForCausalLM": Family(
        {
            "has_qkv_bias": flag("attention_bias", True),
            "has_output_bias": flag("attention_out_bias"),
            "has_mlp_bias": flag("mlp_bias"),
        },
        {"head_dim": 128, "num_key_value_heads": 8},
    ),
    "HunYuanDenseV1ForCausalLM": Family(
        {
            **ATTENTION_BIAS,
            "norm": rms(default=1e-5),
            "head_norms": head_norms(rms(default=1e-5), is_after_rope=True),
            "names": TensorNames(query_norm="self_attn.query_layernorm", key_norm="self_attn.key_layernorm"),
        }
    ),
    "Exaone4ForCausalLM": Family(
        {
            "norm": rms(default=1e-5),
            "head_norms": head_norms(rms(default=1e-5)),
            "layers": rules.exaone4_layers,
            "names": POST_NORMS,
        },
        {"num_key_value_heads": 32, "sliding_window": 4096},
    ),
    "GPTNeoXForCausalLM": Family(
        {
            "norm": layer_norm("layer_norm_eps"),
            "ropes": rope(part=0.25),
            "is_parallel": flag("use_parallel_residual", True),
            "activation": UNGATED,
            "has_qkv_bias": flag("attention_bias", True),
            "has_output_bias": flag("attention_bias", True),
            "has_mlp_bias": True,
            "names": rules.neox_names,
        },
        {"hidden_act": "gelu"},
        {"partial_rotary_factor": "rotary_pct", "rope_theta": "rotary_emb_base"},
    ),
    "GPT2LMHeadModel": Family(
        {
            **ALL_BIASES,
            "norm": layer_norm("layer_norm_epsilon"),
            "intermediate_size": rules.positive_or("n_inner", 4),
            "attention_scale": rules.gpt2_scale,
            "activation": rules.activation("activation_function", "gelu_new", is_gated=False),
            "num_learned_positions": lambda file: file.positive("max_position_embeddings"),
            "layers": rules.layers_without_rope,
            "ropes": [],
            "tie_word_embeddings": flag("tie_word_embeddings", True),
            "names": TensorNames(
                embedding="model.wte",
                positions="model.wpe",
                layers="model.h",
                norm="model.ln_f",
                input_norm="ln_1",
                mlp_norm="ln_2",
                qkv="attn.c_attn",
                output="attn.c_proj",
                up="mlp.c_fc",
                down="mlp.c_proj",
                is_transposed=True,
                roots=["transformer.", ""],
            ),
        },
        {"n_positions": 1024},
        {
            "hidden_size": "n_embd",
            "num_hidden_layers": "n_layer",
            "num_attention_heads": "n_head",
            "max_position_embeddings": "n_positions",
        },
    ),
    "Ministral3ForCausalLM": Family(
        MINISTRAL3,
        {
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e6,
                "factor": 16.0,
                "original_max_position_embeddings": 16384,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.1,
            },
        },
    ),
    "FalconForCausalLM": Family(
        {
            "norm": layer_norm("layer_norm_epsilon"),
            "intermediate_size": rules.positive_or("ffn_hidden_size", 4),
            "num_kv_heads": rules.falcon_kv_heads,
            "is_parallel": lambda file: file.flag("new_decoder_architecture") or file.flag("parallel_attn", True),
            "ropes": rules.falcon_ropes,
            "activation": rules.activation("activation", "gelu", is_gated=False),
            "has_qkv_bias": flag("bias"),
            "has_output_bias": flag("bias"),
            "has_mlp_bias": flag("bias"),
            "tie_word_embeddings": flag("tie_word_embeddings", True),
            "names": rules.falcon_names,
        },
        {"max_position_embeddings": 2048},
    ),
    "Jais2ForCausalLM": Family(
        {
            "norm": layer_norm("layer_norm_eps"),
            "activation": UNGATED,
            "has_qkv_bias": flag("attention_bias", True),
            "has_output_bias": flag("attention_bias", True),
            "has_mlp_bias": flag("mlp_bias", True),
        },
        {"hidden_act": "relu2"},
    ),
}
