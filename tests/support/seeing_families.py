"""The config.json of tiny models that see images, for `families.CONFIGS`, as published files spell them.

They test the language models: what images become is given to them as embeddings.
"""

from __future__ import annotations

from typing import Any

Config = dict[str, Any]  # config.json

IMAGE_ID = 260  # the placeholder
TEXT: Config = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 88,
    "vocab_size": 271,
    "max_position_embeddings": 512,
    "rope_theta": 300.0,
    "hidden_act": "silu",
    "rms_norm_eps": 0.02,
}
TOWER: Config = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
QWEN_TOWER: Config = {"depth": 1, "num_heads": 2, "patch_size": 4, "spatial_merge_size": 2, "hidden_act": "silu"}
QWEN_IDS: Config = {
    "image_token_id": IMAGE_ID,
    "video_token_id": 261,
    "vision_start_token_id": 262,
    "vision_end_token_id": 263,
}
MROPE: Config = {"type": "mrope", "mrope_section": [2, 3, 3]}
QWEN3_ROPE: Config = {"mrope_interleaved": True, "mrope_section": [4, 4, 4], "rope_type": "default"}


def _seeing(model_type: str, architecture: str, text: Config, tower: Config, **fields: Any) -> Config:
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "text_config": {**TEXT, **text},
        "vision_config": {**TOWER, **tower},
        **fields,
    }


SEEING: dict[str, Config] = {
    "llava": _seeing(
        "llava",
        "LlavaForConditionalGeneration",
        {"model_type": "llama"},
        {"model_type": "clip_vision_model", "projection_dim": 32, "vocab_size": 271},
        image_token_index=IMAGE_ID,
        vision_feature_layer=-2,
    ),
    "pixtral": _seeing(
        "llava",
        "LlavaForConditionalGeneration",
        {"model_type": "mistral", "head_dim": 24, "sliding_window": None},
        {"model_type": "pixtral", "head_dim": 16},
        image_token_index=IMAGE_ID,
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
    ),
    "idefics3": _seeing(
        "idefics3",
        "Idefics3ForConditionalGeneration",
        {"model_type": "llama"},
        {"model_type": "idefics3"},
        image_token_id=IMAGE_ID,
        scale_factor=2,
        tie_word_embeddings=False,
    ),
    "smolvlm": _seeing(
        "smolvlm",
        "SmolVLMForConditionalGeneration",
        {"model_type": "llama", "head_dim": 24},
        {"model_type": "smolvlm_vision"},
        image_token_id=IMAGE_ID,
        scale_factor=2,
        tie_word_embeddings=True,
    ),
    "internvl": _seeing(
        "internvl",
        "InternVLForConditionalGeneration",
        {"model_type": "qwen2"},
        {"model_type": "internvl_vision", "image_size": [28, 28], "patch_size": [14, 14]},
        image_token_id=IMAGE_ID,
        tie_word_embeddings=False,
    ),
    "qwen2_vl": {
        "architectures": ["Qwen2VLForConditionalGeneration"],
        "model_type": "qwen2_vl",
        **TEXT,
        "rope_scaling": MROPE,
        "vision_config": {**QWEN_TOWER, "embed_dim": 32, "hidden_size": 64, "in_chans": 3},
        **QWEN_IDS,
        "tie_word_embeddings": True,
    },
    "qwen2_5_vl": {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "model_type": "qwen2_5_vl",
        **TEXT,
        "rope_scaling": MROPE,
        "use_sliding_window": True,
        "sliding_window": 8,
        "max_window_layers": 2,
        "vision_config": {**QWEN_TOWER, "hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 64},
        **QWEN_IDS,
        "tie_word_embeddings": False,
    },
    "qwen3_vl": {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "model_type": "qwen3_vl",
        "text_config": {**TEXT, "model_type": "qwen3_vl_text", "head_dim": 24, "rope_scaling": QWEN3_ROPE},
        "vision_config": {
            **QWEN_TOWER,
            "model_type": "qwen3_vl",
            "hidden_size": 32,
            "intermediate_size": 48,
            "out_hidden_size": 64,
            "depth": 2,
            "deepstack_visual_indexes": [0, 1],
            "num_position_embeddings": 16,
        },
        **QWEN_IDS,
        "tie_word_embeddings": True,
    },
}
