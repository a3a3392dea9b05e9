"""The config.json of a tiny model of every decoder family, for `checkpoints.tiny_checkpoint`.

Each is spelled as the family's published files spell it and leaves out the fields that they leave out. Its
values are far from the defaults, so that a field that is not read changes the logits: epsilons of 0.02, windows of 8
positions, small rotary bases. All norms, biases, scales and sinks are random.
"""

from __future__ import annotations

import itertools
from typing import Any

from .audio_configs import AUDIO_MODELS
from .vision_configs import VISION_MODELS, MediaModel, with_ids

Config = dict[str, Any]  # config.json

EPS = 0.02
MEDIUM_ID = 260  # the placeholder
WINDOW: Config = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}
SHAPE: Config = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 88,
    "vocab_size": 271,
    "max_position_embeddings": 512,
    "rope_theta": 300.0,
}
SHORT_FACTORS = [1.0, 1.1, 1.3, 1.6, 2.0, 2.5, 3.1, 3.8]
LONG_FACTORS = [1.2, 1.9, 3.0, 4.5, 6.5, 9.0, 12.0, 15.0]
YARN: Config = {
    "rope_type": "yarn",
    "factor": 4.0,
    "beta_fast": 8.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 32,
}
EXPERTS: Config = {"num_experts_per_tok": 3, "moe_intermediate_size": 40}
SIGMOID_EXPERTS: Config = {
    **EXPERTS,
    "num_key_value_heads": 2,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.7,
    "hidden_act": "silu",
    "rms_norm_eps": EPS,
    "tie_word_embeddings": False,
}


def _config(model_type: str, architecture: str, **fields: Any) -> Config:
    """Return a config of SHAPE with `fields` replaced, added or (None) removed."""
    config = {"architectures": [architecture], "model_type": model_type, **SHAPE, **fields}
    return {name: value for name, value in config.items() if value is not None}


def _rms(model_type: str, architecture: str, **fields: Any) -> Config:
    return _config(model_type, architecture, **{"hidden_act": "silu", "rms_norm_eps": EPS, **fields})


def _with_media(model: MediaModel, **text: Any) -> Config:
    """Return the config of a model that takes media. It tests the language model, with given embeddings in the place of
    the token MEDIUM_ID; `text` replaces fields."""
    names = ("image_token_id", "image_token_index", "audio_token_id", "audio_token_index")
    (medium,) = [model.config[name] for name in names if name in model.config]
    markers = sorted(model.markers.values(), key=lambda token: token != medium)
    config: Config = with_ids(model.config, dict(zip(markers, itertools.count(MEDIUM_ID), strict=False)))
    inner = config.get("text_config", config)
    inner |= {"vocab_size": SHAPE["vocab_size"], "rope_theta": SHAPE["rope_theta"], "rms_norm_eps": EPS, **text}
    return config


GEMMA2: Config = {
    "hidden_act": None,
    "hidden_activation": "gelu_pytorch_tanh",
    "head_dim": 24,
    "query_pre_attn_scalar": 20,
    "sliding_window": 8,
    "attn_logit_softcapping": 2.0,
    "final_logit_softcapping": 3.0,
}
GEMMA3: Config = {
    "hidden_activation": "gelu_pytorch_tanh",
    "head_dim": 24,
    "query_pre_attn_scalar": 20,
    "sliding_window": 8,
    "sliding_window_pattern": 2,
    "rope_local_base_freq": 50.0,
    "rope_scaling": {"factor": 4.0, "rope_type": "linear"},
}
GEMMA4: Config = {
    "hidden_act": None,
    "hidden_activation": "gelu_pytorch_tanh",
    "head_dim": 16,
    "global_head_dim": 32,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": 3.0,
    "rope_theta": None,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 300.0},
    },
}
FALCON: Config = {
    "num_key_value_heads": None,
    "intermediate_size": None,
    "max_position_embeddings": None,
    "alibi": False,
    "bias": False,
    "layer_norm_epsilon": EPS,
    "multi_query": True,
    "parallel_attn": True,
}
MINISTRAL3: Config = {
    "head_dim": 24,
    "rope_parameters": {
        **YARN,
        "rope_theta": 300.0,
        "mscale": 1.0,
        "mscale_all_dim": 0.5,
        "llama_4_scaling_beta": 0.3,
    },
}
TOWER: Config = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}  # vision
LAYER_NORM: Config = {"layer_norm_eps": EPS}

DENSE: dict[str, Config] = {
    "gemma": _rms("gemma", "GemmaForCausalLM", hidden_act="gelu_pytorch_tanh", head_dim=24),
    "gemma2": _rms("gemma2", "Gemma2ForCausalLM", **GEMMA2),
    "gemma3_text": _rms("gemma3_text", "Gemma3ForCausalLM", **GEMMA3, num_hidden_layers=4, hidden_act=None),
    "gemma4": _rms("gemma4_text", "Gemma4ForCausalLM", **GEMMA4),
    "gemma4_vision": {
        "architectures": ["Gemma4ForConditionalGeneration"],
        "model_type": "gemma4",
        "audio_config": None,
        "text_config": {**SHAPE, "model_type": "gemma4_text", "rms_norm_eps": EPS, **GEMMA4},
        "vision_config": {
            "model_type": "gemma4_vision",
            **TOWER,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "patch_size": 14,
            "position_embedding_size": 16,
        },
        "image_token_id": 260,
        "boi_token_id": 261,
        "eoi_token_id": 262,
        "tie_word_embeddings": True,
    },
    "vaultgemma": _rms("vaultgemma", "VaultGemmaForCausalLM", **GEMMA2),
    "phi": _config(
        "phi",
        "PhiForCausalLM",
        num_key_value_heads=None,
        hidden_act="gelu_new",
        partial_rotary_factor=0.5,
        tie_word_embeddings=False,
        **LAYER_NORM,
    ),
    "phi3": _rms(
        "phi3",
        "Phi3ForCausalLM",
        sliding_window=8,
        original_max_position_embeddings=128,
        rope_scaling={"type": "longrope", "short_factor": SHORT_FACTORS, "long_factor": LONG_FACTORS},
        tie_word_embeddings=False,
    ),
    "phi4": _rms("phi3", "Phi3ForCausalLM", sliding_window=None, rope_scaling=None, tie_word_embeddings=False),
    "phi4_mini": _rms(
        "phi3",
        "Phi3ForCausalLM",
        partial_rotary_factor=0.75,
        original_max_position_embeddings=128,
        rope_scaling={"type": "longrope", "short_factor": SHORT_FACTORS[:6], "long_factor": LONG_FACTORS[:6]},
        tie_word_embeddings=True,
    ),
    "olmo": _config("olmo", "OlmoForCausalLM", hidden_act="silu", clip_qkv=0.7, tie_word_embeddings=False),
    "olmo2": _rms("olmo2", "Olmo2ForCausalLM", tie_word_embeddings=False),
    "olmo3": _rms(
        "olmo3",
        "Olmo3ForCausalLM",
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
        sliding_window=8,
        rope_theta=500000.0,  # transformers reads no other value for sliding layers from this spelling
        rope_scaling={**YARN, "attention_factor": 1.2},
        tie_word_embeddings=False,
    ),
    "granite": _rms(
        "granite",
        "GraniteForCausalLM",
        attention_bias=False,
        attention_multiplier=0.4,
        embedding_multiplier=3.0,
        logits_scaling=2.5,
        residual_multiplier=0.4,
        mlp_bias=False,
        tie_word_embeddings=True,
    ),
    "glm": _rms("glm", "GlmForCausalLM", head_dim=16, attention_bias=True, partial_rotary_factor=0.5),
    "glm4": _rms("glm4", "Glm4ForCausalLM", head_dim=16, attention_bias=True, partial_rotary_factor=0.5),
    "cohere": _config("cohere", "CohereForCausalLM", hidden_act="silu", logit_scale=0.3, **LAYER_NORM),
    "cohere_plus": _config(
        "cohere", "CohereForCausalLM", hidden_act="silu", logit_scale=0.3, use_qk_norm=True, **LAYER_NORM
    ),
    "cohere2": _config(
        "cohere2",
        "Cohere2ForCausalLM",
        num_hidden_layers=4,
        hidden_act="silu",
        logit_scale=0.3,
        sliding_window=8,
        sliding_window_pattern=2,
        **LAYER_NORM,
    ),
    "smollm3": _rms(
        "smollm3", "SmolLM3ForCausalLM", no_rope_layers=[1, 0, 1], no_rope_layer_interval=2, use_sliding_window=False
    ),
    "starcoder2": _config(
        "starcoder2",
        "Starcoder2ForCausalLM",
        hidden_act="gelu_pytorch_tanh",
        norm_epsilon=EPS,
        sliding_window=8,
        use_bias=True,
    ),
    "nemotron": _config(
        "nemotron",
        "NemotronForCausalLM",
        head_dim=24,
        hidden_act="relu2",
        norm_eps=EPS,
        partial_rotary_factor=0.5,
        tie_word_embeddings=False,
    ),
    "stablelm": _config(
        "stablelm",
        "StableLmForCausalLM",
        hidden_act="silu",
        partial_rotary_factor=0.25,
        use_qkv_bias=True,
        tie_word_embeddings=False,
        **LAYER_NORM,
    ),
    "stablelm_12b": _config(
        "stablelm",
        "StableLmForCausalLM",
        hidden_act="silu",
        partial_rotary_factor=0.25,
        qk_layernorm=True,
        use_parallel_residual=True,
        tie_word_embeddings=False,
        **LAYER_NORM,
    ),
    "arcee": _rms("arcee", "ArceeForCausalLM", hidden_act="relu2", rope_scaling=YARN, tie_word_embeddings=False),
    "helium": _rms("helium", "HeliumForCausalLM", head_dim=16, tie_word_embeddings=False),
    "ernie4_5": _rms("ernie4_5", "Ernie4_5ForCausalLM", head_dim=24, use_bias=False, tie_word_embeddings=True),
    "seed_oss": _rms("seed_oss", "SeedOssForCausalLM", head_dim=24, attention_bias=True, tie_word_embeddings=False),
    "hunyuan_v1_dense": _rms(
        "hunyuan_v1_dense",
        "HunYuanDenseV1ForCausalLM",
        head_dim=24,
        use_qk_norm=True,
        rope_scaling={"type": "dynamic", "alpha": 3.0, "beta_fast": 32, "beta_slow": 1, "factor": 1.0},
        tie_word_embeddings=True,
    ),
    "exaone4": _rms(
        "exaone4",
        "Exaone4ForCausalLM",
        head_dim=24,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
        sliding_window=8,
        sliding_window_pattern="LLLG",
        tie_word_embeddings=False,
    ),
    "gpt_neox": _config(
        "gpt_neox",
        "GPTNeoXForCausalLM",
        num_key_value_heads=None,
        rope_theta=None,
        hidden_act="gelu",
        rotary_emb_base=300,
        rotary_pct=0.25,
        use_parallel_residual=True,
        tie_word_embeddings=False,
        **LAYER_NORM,
    ),
    "gpt2": {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "activation_function": "gelu_new",
        "n_embd": 64,
        "n_head": 4,
        "n_layer": 3,
        "n_ctx": 512,
        "n_positions": 512,
        "layer_norm_epsilon": EPS,
        "vocab_size": 271,
    },
    "ministral3": _rms("ministral3", "Ministral3ForCausalLM", **MINISTRAL3, rope_theta=None, tie_word_embeddings=False),
    "falcon": _config("falcon", "FalconForCausalLM", **FALCON, new_decoder_architecture=False),
    "falcon_40b": _config("falcon", "FalconForCausalLM", **FALCON, new_decoder_architecture=True, num_kv_heads=2),
    "jais2": _config("jais2", "Jais2ForCausalLM", hidden_act="relu2", attention_bias=True, mlp_bias=True, **LAYER_NORM),
    "apertus": _rms(
        "apertus",
        "ApertusForCausalLM",
        hidden_act="xielu",
        rope_scaling={
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        tie_word_embeddings=False,
    ),
}

SPARSE: dict[str, Config] = {
    "gemma4_moe": _rms(
        "gemma4_text",
        "Gemma4ForCausalLM",
        **GEMMA4,
        enable_moe_block=True,
        num_experts=8,
        top_k_experts=3,
        moe_intermediate_size=40,
    ),
    "gpt_oss": _rms(
        "gpt_oss",
        "GptOssForCausalLM",
        head_dim=16,
        intermediate_size=40,
        num_local_experts=8,
        num_experts_per_tok=3,
        attention_bias=True,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        sliding_window=8,
        swiglu_limit=1.5,
        rope_scaling={**YARN, "truncate": False},
        tie_word_embeddings=False,
    ),
    "glm4_moe": _rms(
        "glm4_moe",
        "Glm4MoeForCausalLM",
        **SIGMOID_EXPERTS,
        head_dim=24,
        attention_bias=True,
        partial_rotary_factor=0.5,
        use_qk_norm=True,
    ),
    "dots1": _rms("dots1", "Dots1ForCausalLM", **SIGMOID_EXPERTS, head_dim=24, sliding_window=None),
    "ernie4_5_moe": _rms(
        "ernie4_5_moe",
        "Ernie4_5_MoeForCausalLM",
        moe_num_experts=8,
        moe_k=3,
        moe_intermediate_size=40,
        moe_num_shared_experts=2,
        moe_layer_start_index=1,
        moe_layer_end_index=2,
        moe_layer_interval=1,
        use_bias=False,
        tie_word_embeddings=True,
    ),
    "qwen2_moe": _rms(
        "qwen2_moe",
        "Qwen2MoeForCausalLM",
        **EXPERTS,
        num_experts=8,
        norm_topk_prob=False,
        shared_expert_intermediate_size=56,
        decoder_sparse_step=1,
        mlp_only_layers=[1],
        use_sliding_window=False,
        sliding_window=8,
        max_window_layers=2,
        tie_word_embeddings=False,
    ),
}

SPARSE |= {
    "solar_open": _rms("solar_open", "SolarOpenForCausalLM", **SIGMOID_EXPERTS, head_dim=24, intermediate_size=None),
    "minimax_m2": _rms(
        "minimax_m2",
        "MiniMaxM2ForCausalLM",
        head_dim=16,
        rotary_dim=8,
        intermediate_size=40,
        num_local_experts=8,
        num_experts_per_tok=3,
        scoring_func="sigmoid",
        tie_word_embeddings=False,
    ),
    "olmoe": _rms(
        "olmoe",
        "OlmoeForCausalLM",
        num_key_value_heads=4,
        intermediate_size=40,
        num_experts=8,
        num_experts_per_tok=3,
        norm_topk_prob=False,
        clip_qkv=None,
        tie_word_embeddings=False,
    ),
}
TEXT_FIELDS: dict[str, Config] = {
    "gemma3": GEMMA3,
    "mistral3": {**MINISTRAL3, "model_type": "ministral3"},
    "qwen2_5_vl": WINDOW,
    "qwen2_audio": WINDOW,
}
SEEING = {name: _with_media(model, **TEXT_FIELDS.get(name, {})) for name, model in VISION_MODELS.items()}
HEARING = {name: _with_media(model, **TEXT_FIELDS.get(name, {})) for name, model in AUDIO_MODELS.items()}
CONFIGS: dict[str, Config] = DENSE | SEEING | HEARING | SPARSE
