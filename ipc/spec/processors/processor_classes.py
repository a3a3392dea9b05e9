"""Classes of transformers' image processors: their defaults, and the settings that users may override.

Settings that change pixels after they are rescaled belong to the workers and are not read here.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import msgspec

from ..models.vision_config import VisionFamily

BILINEAR, BICUBIC, LANCZOS = 2, 3, 1  # Pillow's numbers
CLIP_MEAN = [0.48145466, 0.4578275, 0.40821073]
SHARED = ("do_resize", "size", "resample")
CROPPED = (*SHARED, "do_center_crop", "crop_size")

AnySize: TypeAlias = int | list[int] | dict[str, int | None]


class Settings(msgspec.Struct, kw_only=True):
    """The settings of transformers' classes that change pixels before they are rescaled; others are ignored."""

    do_resize: bool | None = None
    size: AnySize | None = None
    resample: int | None = None
    do_center_crop: bool | None = None
    crop_size: AnySize | None = None
    do_pad: bool | None = None
    pad_size: AnySize | None = None
    image_mean: list[float] | float | None = None
    min_pixels: int | None = None
    max_pixels: int | None = None
    do_image_splitting: bool | None = None
    max_image_size: dict[str, int | None] | None = None
    crop_to_patches: bool | None = None
    min_patches: int | None = None
    max_patches: int | None = None


class ProcessorClass(NamedTuple):
    """A class of transformers: its defaults, and the settings that users may override."""

    defaults: dict[str, Any]
    overridable: tuple[str, ...]
    is_square: bool  # a size of one number is the side of a square; False: the shorter edge


_CLIP = {
    "size": {"shortest_edge": 224},
    "resample": BICUBIC,
    "do_center_crop": True,
    "crop_size": {"height": 224, "width": 224},
}
_IDEFICS3 = ProcessorClass(
    {"size": {"longest_edge": 4 * 364}, "resample": LANCZOS, "do_image_splitting": True}
    | {"max_image_size": {"longest_edge": 364}},
    (*SHARED, "do_image_splitting", "max_image_size"),
    True,
)
CLASSES = {
    "CLIPImageProcessor": ProcessorClass(_CLIP, CROPPED, False),
    "SiglipImageProcessor": ProcessorClass(
        {"size": {"height": 224, "width": 224}, "resample": BICUBIC}, CROPPED, False
    ),
    "LlavaImageProcessor": ProcessorClass(
        _CLIP | {"do_pad": False, "image_mean": CLIP_MEAN}, (*CROPPED, "do_pad"), False
    ),
    "PixtralImageProcessor": ProcessorClass({"size": {"longest_edge": 1024}, "resample": BICUBIC}, SHARED, True),
    "Idefics3ImageProcessor": _IDEFICS3,
    "SmolVLMImageProcessor": _IDEFICS3,
    "GotOcr2ImageProcessor": ProcessorClass(
        {"size": {"height": 384, "width": 384}, "resample": BICUBIC, "min_patches": 1, "max_patches": 12},
        (*SHARED, "crop_to_patches", "min_patches", "max_patches"),
        True,
    ),
    "Qwen2VLImageProcessor": ProcessorClass(
        {"size": {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280}, "resample": BICUBIC},
        (*SHARED, "min_pixels", "max_pixels"),
        False,
    ),
    "Gemma3ImageProcessor": ProcessorClass({"size": {"height": 224, "width": 224}, "resample": BILINEAR}, SHARED, True),
}
CLASSES_BY_FAMILY: dict[VisionFamily, tuple[str, ...]] = {  # the first one is the family's own
    "llava": ("LlavaImageProcessor", "CLIPImageProcessor", "SiglipImageProcessor"),
    "pixtral": ("PixtralImageProcessor",),
    "idefics3": ("Idefics3ImageProcessor", "SmolVLMImageProcessor"),
    "internvl": ("GotOcr2ImageProcessor",),
    "qwen2_vl": ("Qwen2VLImageProcessor",),
    "qwen2_5_vl": ("Qwen2VLImageProcessor",),
    "qwen3_vl": ("Qwen2VLImageProcessor",),
    "gemma3": ("Gemma3ImageProcessor",),
}
OLD_NAMES = {  # class that transformers no longer has → the class in its place
    "Qwen2_5_VLImageProcessor": "Qwen2VLImageProcessor",
    "Qwen3VLImageProcessor": "Qwen2VLImageProcessor",
    "Mistral3ImageProcessor": "PixtralImageProcessor",
    "InternVLImageProcessor": "GotOcr2ImageProcessor",
}
