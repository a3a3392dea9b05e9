"""Transformers' image processors without torchvision, as the oracle of ours: their pixels before rescaling."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

from tokenloom.ipc.spec.models.vision_config import Grid, VisionConfig, VisionFamily

CLASSES = {
    each.__name__: each
    for each in (
        CLIPImageProcessorPil,
        Gemma3ImageProcessorPil,
        GotOcr2ImageProcessorPil,
        Idefics3ImageProcessorPil,
        LlavaImageProcessorPil,
        PixtralImageProcessorPil,
        Qwen2VLImageProcessorPil,
        SiglipImageProcessorPil,
        SmolVLMImageProcessorPil,
    )
}
RAW = {"do_rescale": False, "do_normalize": False, "return_tensors": "np"}


class OracleImage(NamedTuple):
    """Grid and tiles, uint8 [height, width, 3], as ProcessedImage has them."""

    grid: Grid
    tiles: list[Any]


def new_vision(family: VisionFamily, **changes: Any) -> VisionConfig:
    fields: dict[str, Any] = {"image_token_id": 7, "hidden_size": 32, "num_layers": 2, "patch_size": 14}
    return VisionConfig(family=family, **(fields | changes))


def save_processor(folder: Path, name: str, **settings: Any) -> Any:
    """Write an image processor as transformers does, and return it."""
    processor = CLASSES[name](**settings)
    processor.save_pretrained(folder)
    return processor


def oracle_image(processor: Any, image: Image.Image, vision: VisionConfig) -> OracleImage:
    """Prepare an RGB image with transformers; ValueError as it raises them."""
    family, patch = vision.family, vision.patch_size
    if family == "internvl":
        found = processor(image, crop_to_patches=True, **RAW)
        tiles = found["pixel_values"]
        rows, columns = 0, 0  # not told
        return OracleImage((len(tiles), rows, columns), [_last(each) for each in tiles])
    if family == "idefics3":
        found = processor(image, return_row_col_info=True, **RAW)
        tiles = found["pixel_values"][0]
        return OracleImage((len(tiles), found["rows"][0][0], found["cols"][0][0]), [_last(each) for each in tiles])
    if family == "pixtral":
        found = processor(image, patch_size=patch * vision.merge_size, **RAW)
        pixels = _last(found["pixel_values"][0])
        return OracleImage((1, pixels.shape[0] // patch, pixels.shape[1] // patch), [pixels])
    if family in ("llava", "gemma3"):
        pixels = _last(processor(image, **RAW)["pixel_values"][0])
        return OracleImage((1, pixels.shape[0] // patch, pixels.shape[1] // patch), [pixels])
    found = processor(image, **RAW)
    _, rows, columns = (int(each) for each in found["image_grid_thw"][0])
    merge = vision.merge_size
    patches = found["pixel_values"].reshape(rows // merge, columns // merge, merge, merge, 3, -1, patch, patch)
    assert (patches[..., 0, :, :] == patches[..., -1, :, :]).all()  # of equal moments
    pixels = patches[..., 0, :, :].transpose(0, 2, 5, 1, 3, 6, 4)
    return OracleImage((1, rows, columns), [pixels.reshape(rows * patch, columns * patch, 3)])


def _last(pixels: Any) -> Any:
    return np.moveaxis(np.asarray(pixels), 0, -1)
