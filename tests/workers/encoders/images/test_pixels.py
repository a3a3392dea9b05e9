"""The table of pixel values gives the numbers of transformers' processors that use PIL, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor

from tokenloom.ipc.errors import ConfigError
from tokenloom.ipc.spec.models.vision_config import VisionFamily
from tokenloom.tests.workers.encoders.images.image_items import qwen_patches
from tokenloom.workers.encoders.images.pixels import PixelScale

CPU = torch.device("cpu")
KINDS: dict[str, VisionFamily] = {
    "CLIPImageProcessor": "llava",
    "SiglipImageProcessor": "llava",
    "LlavaImageProcessor": "llava",
    "PixtralImageProcessor": "pixtral",
    "Idefics3ImageProcessor": "idefics3",
    "SmolVLMImageProcessor": "idefics3",
    "GotOcr2ImageProcessor": "internvl",
    "Qwen2VLImageProcessor": "qwen2_vl",
    "Gemma3ImageProcessor": "gemma3",
}
PLAIN = {"do_resize": False, "do_center_crop": False, "do_image_splitting": False, "crop_to_patches": False}
OPTIONS: list[dict[str, Any]] = [
    {},
    {"image_mean": [0.1, 0.25, 0.7], "image_std": [0.3, 0.2, 0.9], "rescale_factor": 1 / 256},
    {"do_rescale": False},
    {"do_normalize": False},
]


def scaled(folder: Path, family: VisionFamily, pixels: np.ndarray) -> Tensor:
    return PixelScale.load(folder, family, torch.float32, CPU).scale(torch.from_numpy(pixels)[None])


@pytest.mark.parametrize("kind", KINDS)
def test_pixels_become_the_numbers_of_transformers_processors(kind: str, tmp_path: Path) -> None:
    family = KINDS[kind]
    pixels = np.random.default_rng(len(kind)).integers(0, 256, (84, 84, 3), np.uint8)
    plain = PLAIN | ({"max_image_size": {"longest_edge": 84}} if family == "idefics3" else {})
    for options in OPTIONS:
        (tmp_path / "preprocessor_config.json").write_text(json.dumps({"image_processor_type": kind, **options}))
        processor = getattr(transformers, f"{kind}Pil")(**options, **plain)
        theirs = processor(pixels, return_tensors="np")["pixel_values"]
        ours = scaled(tmp_path, family, pixels)
        if family == "qwen2_vl":
            ours = qwen_patches(ours, 14, 2)
        expected = np.asarray(theirs, np.float32).reshape(ours.shape)
        assert np.array_equal(ours.numpy(), expected), options


def test_options_inside_processor_config_come_before_preprocessor_config(tmp_path: Path) -> None:
    pixels = np.full((4, 4, 3), 255, np.uint8)
    options = {"image_mean": [0.0] * 3, "image_std": [1.0] * 3}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(options))
    assert scaled(tmp_path, "llava", pixels).unique().tolist() == [1.0]
    inner = {"processor_class": "LlavaProcessor", "image_processor": {**options, "image_std": [0.5] * 3}}
    (tmp_path / "processor_config.json").write_text(json.dumps(inner))
    assert scaled(tmp_path, "llava", pixels).unique().tolist() == [2.0]
    (tmp_path / "processor_config.json").write_text(json.dumps({"processor_class": "LlavaProcessor"}))
    assert scaled(tmp_path, "llava", pixels).unique().tolist() == [1.0]


def test_missing_or_invalid_options_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no preprocessor_config\.json"):
        PixelScale.load(tmp_path, "llava", torch.float32, CPU)
    (tmp_path / "preprocessor_config.json").write_text('{"image_mean": [0.1, 0.2]}')
    with pytest.raises(ConfigError, match="image_mean must be 3 numbers, one for each channel, it is"):
        PixelScale.load(tmp_path, "llava", torch.float32, CPU)
