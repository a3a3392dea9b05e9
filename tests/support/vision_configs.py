"""The files beside the weights of tiny vision-language models: config.json, preprocessor_config.json, marker tokens.

Each is spelled as the family's published files spell it: Qwen2-VL's fields of the language model stand at the top,
others' in `text_config`. Images are small, and each family takes several sizes or numbers of tiles, as large ones do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Config = dict[str, Any]

VOCAB_SIZE = 2104  # 2,048 of the demo's tokenizer and the marker tokens
MEAN, STD = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]  # CLIP's
HALF = [0.5, 0.5, 0.5]


@dataclass(frozen=True, kw_only=True)
class MediaModel:
    """A tiny model that takes media: its configs with names of marker tokens in place of their ids."""

    config: Config
    markers: dict[str, str]  # name in the tokenizer's config -> token
    preprocessor: Config = field(default_factory=dict)  # preprocessor_config.json; empty: the model has none
    processor: Config = field(default_factory=dict)  # processor_config.json
    other_markers: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class VisionModel(MediaModel):
    image: str  # the text of an image in a prompt, before the expansion


def with_ids(value: Any, ids: Mapping[str, int]) -> Any:
    """Return a copy of a config with ids in place of the marker tokens."""
    if isinstance(value, dict):
        return {name: with_ids(each, ids) for name, each in value.items()}
    return ids.get(value, value) if isinstance(value, str) else value


def text_config(model_type: str, **fields: Any) -> Config:
    """Return the config of a tiny language model."""
    return {
        "model_type": model_type,
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 88,
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        **fields,
    }


def _tower(model_type: str, **fields: Any) -> Config:
    """Return the config of a tiny encoder."""
    shape = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 56}
    return {"model_type": model_type, **shape, "image_size": 56, "patch_size": 7, **fields}


def _qwen_tower(model_type: str, depth: int, **fields: Any) -> Config:
    shape = {"model_type": model_type, "depth": depth, "hidden_size": 32, "intermediate_size": 56, "num_heads": 2}
    return {
        **shape,
        "patch_size": 8,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "out_hidden_size": 64,
        **fields,
    }


def _square(kind: str, size: int, **fields: Any) -> Config:
    return {"image_processor_type": kind, "size": {"height": size, "width": size}, **fields}


LLAVA = VisionModel(
    config={
        "architectures": ["LlavaForConditionalGeneration"],
        "model_type": "llava",
        "image_token_index": "<image>",
        "image_seq_length": 64,
        "projector_hidden_act": "gelu",
        "vision_feature_layer": -2,
        "vision_feature_select_strategy": "default",
        "text_config": text_config("llama"),
        "vision_config": _tower("clip_vision_model", projection_dim=32, hidden_act="quick_gelu"),
    },
    preprocessor={
        "image_processor_type": "CLIPImageProcessor",
        "do_center_crop": True,
        "crop_size": {"height": 56, "width": 56},
        "size": {"shortest_edge": 56},
        "image_mean": MEAN,
        "image_std": STD,
    },
    processor={
        "processor_class": "LlavaProcessor",
        "patch_size": 7,
        "num_additional_image_tokens": 1,
        "vision_feature_select_strategy": "default",
    },
    markers={"image_token": "<image>"},
    image="<image>",
)
_PIXTRAL_MARKERS = {"image_token": "[IMG]", "image_break_token": "[IMG_BREAK]", "image_end_token": "[IMG_END]"}


def _pixtral(
    model_type: str, architecture: str, size: int, longest_edge: int, merge: Config, **fields: Any
) -> VisionModel:
    return VisionModel(
        config={
            "architectures": [architecture],
            "model_type": model_type,
            "image_token_index": "[IMG]",
            "projector_hidden_act": "gelu",
            "vision_feature_layer": -1,
            "text_config": text_config("mistral", head_dim=24, sliding_window=None),
            "vision_config": _tower("pixtral", image_size=size, rope_theta=100.0, hidden_act="silu"),
            **merge,
            **fields,
        },
        preprocessor={
            "image_processor_type": "PixtralImageProcessor",
            "image_mean": MEAN,
            "image_std": STD,
            "patch_size": {"height": 7, "width": 7},
            "size": {"longest_edge": longest_edge},
        },
        processor={"processor_class": "PixtralProcessor", "patch_size": 7, **merge, **_PIXTRAL_MARKERS},
        markers=_PIXTRAL_MARKERS,
        image="[IMG]",
    )


PIXTRAL = _pixtral(
    "llava",
    "LlavaForConditionalGeneration",
    84,
    63,
    {},
    image_seq_length=1,
    vision_feature_select_strategy="full",
)
MISTRAL3 = _pixtral(
    "mistral3",
    "Mistral3ForConditionalGeneration",
    112,
    112,
    {"spatial_merge_size": 2},
    multimodal_projector_bias=False,
    tie_word_embeddings=False,
)
_IDEFICS3_PREPROCESSOR = {
    "image_processor_type": "Idefics3ImageProcessor",
    "do_image_splitting": True,
    "max_image_size": {"longest_edge": 56},
    "size": {"longest_edge": 168},
    "image_mean": HALF,
    "image_std": HALF,
}
IDEFICS3 = VisionModel(
    config={
        "architectures": ["Idefics3ForConditionalGeneration"],
        "model_type": "idefics3",
        "image_token_id": "<image>",
        "scale_factor": 2,
        "tie_word_embeddings": False,
        "text_config": text_config("llama"),
        "vision_config": _tower("idefics3_vision"),
    },
    preprocessor=_IDEFICS3_PREPROCESSOR,
    processor={"processor_class": "Idefics3Processor", "image_seq_len": 16},
    markers={"image_token": "<image>"},
    image="<image>",
    other_markers=(
        "<fake_token_around_image>",
        "<end_of_utterance>",
        "<global-img>",
        *(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)),
    ),
)
SMOLVLM = VisionModel(
    config={
        **IDEFICS3.config,
        "architectures": ["SmolVLMForConditionalGeneration"],
        "model_type": "smolvlm",
        "text_config": text_config("llama", tie_word_embeddings=True),
        "tie_word_embeddings": True,
        "vision_config": _tower("smolvlm_vision"),
    },
    preprocessor={
        **_IDEFICS3_PREPROCESSOR,
        "image_processor_type": "SmolVLMImageProcessor",
        "size": {"longest_edge": 112},
    },
    processor={"processor_class": "SmolVLMProcessor", "image_seq_len": 16},
    markers=IDEFICS3.markers,
    image="<image>",
    other_markers=IDEFICS3.other_markers,
)
INTERNVL = VisionModel(
    config={
        "architectures": ["InternVLForConditionalGeneration"],
        "model_type": "internvl",
        "image_token_id": "<IMG_CONTEXT>",
        "image_seq_length": 16,
        "downsample_ratio": 0.5,
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "default",
        "tie_word_embeddings": True,
        "text_config": text_config("qwen2", tie_word_embeddings=True),
        "vision_config": {
            **_tower("internvl_vision", attention_bias=True, norm_type="layer_norm"),
            "image_size": [56, 56],
            "patch_size": [7, 7],
        },
    },
    preprocessor=_square(
        "GotOcr2ImageProcessor",
        56,
        crop_to_patches=True,
        min_patches=1,
        max_patches=4,
        image_mean=[0.485, 0.456, 0.406],
        image_std=[0.229, 0.224, 0.225],
    ),
    processor={"processor_class": "InternVLProcessor", "image_seq_length": 16},
    markers={
        "start_image_token": "<img>",
        "end_image_token": "</img>",
        "context_image_token": "<IMG_CONTEXT>",
        "video_token": "<video>",
    },
    image="<IMG_CONTEXT>",
)
_QWEN_MARKERS = {
    "vision_bos_token": "<|vision_start|>",
    "vision_eos_token": "<|vision_end|>",
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
}
_QWEN_IDS = {
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
}
_QWEN_IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
_MROPE = {"type": "mrope", "mrope_section": [2, 3, 3]}
_QWEN_PREPROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "min_pixels": 32 * 32,
    "max_pixels": 96 * 96,
    "patch_size": 8,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": MEAN,
    "image_std": STD,
}
QWEN2_VL = VisionModel(
    config={
        "architectures": ["Qwen2VLForConditionalGeneration"],
        **text_config("qwen2_vl", rope_scaling=_MROPE),
        **_QWEN_IDS,
        "vision_config": {
            "model_type": "qwen2_vl",
            "depth": 3,
            "embed_dim": 32,
            "hidden_size": 64,
            "num_heads": 2,
            "mlp_ratio": 2,
            "patch_size": 8,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
        },
    },
    preprocessor=_QWEN_PREPROCESSOR,
    processor={"processor_class": "Qwen2VLProcessor"},
    markers=_QWEN_MARKERS,
    image=_QWEN_IMAGE,
)
QWEN2_5_VL = VisionModel(
    config={
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        **text_config("qwen2_5_vl", rope_scaling=_MROPE, tie_word_embeddings=True),
        **_QWEN_IDS,
        "vision_config": _qwen_tower("qwen2_5_vl", 4, window_size=32, fullatt_block_indexes=[1, 3]),
    },
    preprocessor=_QWEN_PREPROCESSOR,
    processor={"processor_class": "Qwen2_5_VLProcessor"},
    markers=_QWEN_MARKERS,
    image=_QWEN_IMAGE,
)
QWEN3_VL = VisionModel(
    config={
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "model_type": "qwen3_vl",
        "tie_word_embeddings": False,
        **_QWEN_IDS,
        "text_config": text_config(
            "qwen3_vl_text",
            head_dim=32,
            rope_scaling={"rope_type": "default", "mrope_section": [6, 5, 5], "mrope_interleaved": True},
        ),
        # heads of 24 elements, as the published ones no multiple of 16
        "vision_config": _qwen_tower(
            "qwen3_vl", 4, hidden_size=48, num_position_embeddings=36, deepstack_visual_indexes=[0, 2]
        ),
    },
    preprocessor={
        "image_processor_type": "Qwen2VLImageProcessorFast",
        "size": {"shortest_edge": 32 * 32, "longest_edge": 96 * 96},
        "patch_size": 8,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": HALF,
        "image_std": HALF,
    },
    processor={"processor_class": "Qwen3VLProcessor"},
    markers=_QWEN_MARKERS,
    image=_QWEN_IMAGE,
)
GEMMA3 = VisionModel(
    config={
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "boi_token_index": "<start_of_image>",
        "eoi_token_index": "<end_of_image>",
        "image_token_index": "<image_soft_token>",
        "mm_tokens_per_image": 16,
        "text_config": {
            **text_config("gemma3_text", head_dim=24, query_pre_attn_scalar=20, tie_word_embeddings=True),
            "hidden_act": "gelu_pytorch_tanh",
            "hidden_activation": "gelu_pytorch_tanh",
            "sliding_window": 24,
            "sliding_window_pattern": 2,
            "rope_local_base_freq": 50.0,
        },
        "vision_config": _tower("siglip_vision_model", hidden_size=48, vision_use_head=False),
    },
    preprocessor=_square("Gemma3ImageProcessor", 56, resample=2, image_mean=HALF, image_std=HALF, image_seq_length=16),
    processor={"processor_class": "Gemma3Processor", "image_seq_length": 16},
    markers={"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"},
    image="<start_of_image>",
)
VISION_MODELS = {
    "llava": LLAVA,
    "pixtral": PIXTRAL,
    "mistral3": MISTRAL3,
    "idefics3": IDEFICS3,
    "smolvlm": SMOLVLM,
    "internvl": INTERNVL,
    "qwen2_vl": QWEN2_VL,
    "qwen2_5_vl": QWEN2_5_VL,
    "qwen3_vl": QWEN3_VL,
    "gemma3": GEMMA3,
}
