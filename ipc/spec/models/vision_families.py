"""VISION_FAMILIES: the models that take images, by architecture, with their language models and their VisionConfig.

Fields that a file leaves out have transformers' defaults.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .config_file import MAX_SIZE, ConfigFile, shown
from .multimodal import Fields, MultimodalFamily, encoder_fields
from .text_families import MISTRAL_SMALL
from .vision_config import VisionConfig, VisionFamily

# Defaults of vision_config by its model_type; and the vision_config of files of llava and mistral3 without one.
CLIP = {"hidden_size": 768, "num_hidden_layers": 12, "patch_size": 32, "image_size": 224}
TOWER_DEFAULTS: dict[str, Fields] = {
    "clip_vision_model": CLIP,
    "siglip_vision_model": {**CLIP, "patch_size": 16},
    "pixtral": {"hidden_size": 1024, "num_hidden_layers": 24, "patch_size": 16, "image_size": 1024},
}
IDEFICS3 = {"hidden_size": 1152, "num_hidden_layers": 12, "patch_size": 32, "image_size": 224}
INTERNVL = {"hidden_size": 1024, "num_hidden_layers": 24, "patch_size": 14, "image_size": 448}
LLAVA_TOWER = {
    "model_type": "clip_vision_model",
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "patch_size": 14,
    "image_size": 336,
}
MISTRAL3_TOWER = {"model_type": "pixtral", "patch_size": 14, "image_size": 1540}


def _tower(file: ConfigFile, defaults: Fields, missing: Fields | None = None) -> ConfigFile:
    """Return the fields of vision_config, or `missing` if there is none."""
    return encoder_fields(file, "vision_config", defaults, missing)


def _side(tower: ConfigFile, name: str) -> int:
    """Return the side of a square, which may be stored as a pair of equal numbers."""
    if not isinstance(tower.get(name), list):
        return tower.positive(name)
    sides = tower.wholes(name, least=1)
    if len(set(sides)) != 1:
        tower.refuse(f"{tower.spelled(name)} must be a positive integer or two equal ones, it is {shown(sides)}")
    return sides[0]


def _vision(family: VisionFamily, file: ConfigFile, tower: ConfigFile, image_id: int, **more: Any) -> VisionConfig:
    sizes = {
        "hidden_size": tower.positive("hidden_size"),
        "num_layers": tower.positive("depth" if "depth" in tower else "num_hidden_layers"),
        "patch_size": _side(tower, "patch_size"),
    }
    name = "image_token_id" if "image_token_id" in file else "image_token_index"
    return VisionConfig(family=family, image_token_id=file.whole(name, image_id), **{**sizes, **more})


def _llava(file: ConfigFile) -> VisionConfig:
    kind = _tower(file, {}, LLAVA_TOWER).text("model_type", "clip_vision_model")
    if kind not in TOWER_DEFAULTS:
        file.refuse_native(f"the encoder {kind:.100} is none of {', '.join(TOWER_DEFAULTS)}")
    tower = _tower(file, TOWER_DEFAULTS[kind], LLAVA_TOWER)
    if kind == "pixtral":
        return _vision("pixtral", file, tower, 32000)
    return _vision("llava", file, tower, 32000, image_size=_side(tower, "image_size"))


def _mistral3(file: ConfigFile) -> VisionConfig:
    tower, merge = _tower(file, TOWER_DEFAULTS["pixtral"], MISTRAL3_TOWER), file.positive("spatial_merge_size", 2)
    return _vision("pixtral", file, tower, 10, merge_size=merge)


def _idefics3(file: ConfigFile) -> VisionConfig:
    tower, merge = _tower(file, IDEFICS3), file.positive("scale_factor", 2)
    return _vision("idefics3", file, tower, 128257, image_size=_side(tower, "image_size"), merge_size=merge)


def _internvl(file: ConfigFile) -> VisionConfig:
    tower, ratio = _tower(file, INTERNVL), file.above_zero("downsample_ratio", 0.5)
    merge = round(1 / ratio) if ratio > 1 / MAX_SIZE else 0
    if not merge:
        file.refuse(f"downsample_ratio {ratio} must be 1 divided by patches on a side")
    return _vision("internvl", file, tower, 151667, image_size=_side(tower, "image_size"), merge_size=merge)


def _qwen(family: VisionFamily, **defaults: Any) -> Callable[[ConfigFile], VisionConfig]:
    def rule(file: ConfigFile) -> VisionConfig:
        tower = _tower(file, {"spatial_merge_size": 2, **defaults})
        size = tower.positive("embed_dim" if family == "qwen2_vl" else "hidden_size")
        features = tower.wholes("deepstack_visual_indexes")
        depth = tower.positive("depth")
        whole = set(tower.wholes("fullatt_block_indexes", tuple(range(depth))))
        return _vision(
            family,
            file,
            tower,
            151655,
            hidden_size=size,
            merge_size=tower.positive("spatial_merge_size"),
            num_deepstack=len(features) if family == "qwen3_vl" else 0,
            windowed_layers=tuple(i for i in range(depth) if i not in whole),
        )

    return rule


def _gemma3(file: ConfigFile) -> VisionConfig:
    tower = _tower(file, TOWER_DEFAULTS["siglip_vision_model"])
    image_size, num_embeds = _side(tower, "image_size"), file.positive("mm_tokens_per_image", 256)
    merge = image_size // _side(tower, "patch_size") // round(num_embeds**0.5)
    return _vision(
        "gemma3", file, tower, 262144, image_size=image_size, merge_size=max(merge, 1), is_bidirectional=True
    )


QWEN2_VISION = {"embed_dim": 1280, "hidden_size": 3584, "depth": 32, "patch_size": 14}
QWEN3_VISION = {"hidden_size": 1152, "depth": 27, "patch_size": 16, "deepstack_visual_indexes": [8, 16, 24]}
VISION_FAMILIES: dict[str, MultimodalFamily] = {
    "LlavaForConditionalGeneration": MultimodalFamily(_llava, "llama", ties_by_text=True),
    "Mistral3ForConditionalGeneration": MultimodalFamily(
        _mistral3, "mistral", is_tied=True, missing_text=MISTRAL_SMALL
    ),
    "Idefics3ForConditionalGeneration": MultimodalFamily(_idefics3, "llama", missing_text={"rms_norm_eps": 1e-5}),
    "SmolVLMForConditionalGeneration": MultimodalFamily(_idefics3, "llama", missing_text={"rms_norm_eps": 1e-5}),
    "InternVLForConditionalGeneration": MultimodalFamily(_internvl, "qwen2", is_tied=True),
    "Qwen2VLForConditionalGeneration": MultimodalFamily(
        _qwen("qwen2_vl", **QWEN2_VISION), "qwen2_vl_text", has_own_text=True, ties_by_text=True
    ),
    "Qwen2_5_VLForConditionalGeneration": MultimodalFamily(
        _qwen("qwen2_5_vl", **QWEN2_VISION, fullatt_block_indexes=[7, 15, 23, 31]),
        "qwen2_5_vl_text",
        has_own_text=True,
        ties_by_text=True,
    ),
    "Qwen3VLForConditionalGeneration": MultimodalFamily(
        _qwen("qwen3_vl", **QWEN3_VISION), "qwen3_vl_text", has_own_text=True
    ),
    "Gemma3ForConditionalGeneration": MultimodalFamily(_gemma3, "gemma3_text", has_own_text=True, is_tied=True),
}
