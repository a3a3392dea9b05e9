"""Images have the pixels of transformers' processors, bit for bit, or are refused where these raise."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from PIL import Image

from tokenloom.frontend.server.media.images.image_processor import process_image
from tokenloom.ipc.errors import RequestError
from tokenloom.ipc.spec.models.vision_config import VisionConfig
from tokenloom.ipc.spec.processors.image_processor_config import ImageProcessorConfig, load_image_processor
from tokenloom.tests.frontend.server.media.images.oracle import new_vision, oracle_image, save_processor

SIDE = 4000


class Case(NamedTuple):
    """A processor of transformers and ours for the same checkpoint."""

    vision: VisionConfig
    processor: Any
    config: ImageProcessorConfig


def new_case(vision: VisionConfig, name: str, **changes: Any) -> Case:
    with tempfile.TemporaryDirectory() as folder:
        processor = save_processor(Path(folder), name, **changes)
        return Case(vision, processor, load_image_processor(Path(folder), vision))


SQUARE = {"height": 56, "width": 56}
CASES = {
    "llava": new_case(
        new_vision("llava", image_size=56),
        "CLIPImageProcessorPil",
        size={"shortest_edge": 56},
        crop_size={"height": 56, "width": 56},
    ),
    "llava padded": new_case(
        new_vision("llava", image_size=98),
        "LlavaImageProcessorPil",
        do_pad=True,
        size={"shortest_edge": 90},
        crop_size={"height": 98, "width": 98},
    ),
    "llava bounded": new_case(
        new_vision("llava"),
        "LlavaImageProcessorPil",
        size={"shortest_edge": 60, "longest_edge": 70},
        crop_size={"height": 65, "width": 66},
    ),
    "llava siglip": new_case(new_vision("llava"), "SiglipImageProcessorPil", size={"height": 96, "width": 112}),
    "pixtral": new_case(new_vision("pixtral", patch_size=16), "PixtralImageProcessorPil", size={"longest_edge": 256}),
    "mistral3": new_case(
        new_vision("pixtral", merge_size=2), "PixtralImageProcessorPil", size={"longest_edge": 1540}, patch_size=14
    ),
    "idefics3": new_case(
        new_vision("idefics3", merge_size=2),
        "Idefics3ImageProcessorPil",
        size={"longest_edge": 280},
        max_image_size={"longest_edge": 70},
    ),
    "smolvlm": new_case(
        new_vision("idefics3", patch_size=16, merge_size=4),
        "SmolVLMImageProcessorPil",
        size={"longest_edge": 256},
        max_image_size={"longest_edge": 64},
    ),
    "idefics3 whole": new_case(
        new_vision("idefics3"),
        "Idefics3ImageProcessorPil",
        do_image_splitting=False,
        size={"longest_edge": 100},
        max_image_size={"longest_edge": 56},
    ),
    "internvl": new_case(new_vision("internvl", merge_size=2, image_size=56), "GotOcr2ImageProcessorPil", size=SQUARE),
    "internvl few": new_case(
        new_vision("internvl", merge_size=2), "GotOcr2ImageProcessorPil", size=SQUARE, min_patches=2, max_patches=6
    ),
    "qwen2_vl": new_case(new_vision("qwen2_vl", merge_size=2), "Qwen2VLImageProcessorPil", max_pixels=200_000),
    "qwen3_vl": new_case(
        new_vision("qwen3_vl", patch_size=16, merge_size=2),
        "Qwen2VLImageProcessorPil",
        patch_size=16,
        size={"shortest_edge": 65536, "longest_edge": 262144},
    ),
    "qwen2_5_vl tiny": new_case(
        new_vision("qwen2_5_vl", merge_size=2), "Qwen2VLImageProcessorPil", min_pixels=1, max_pixels=3136
    ),
    "gemma3": new_case(
        new_vision("gemma3", merge_size=2, image_size=112),
        "Gemma3ImageProcessorPil",
        size={"height": 112, "width": 112},
        do_convert_rgb=None,
    ),
}
NOISE = np.random.default_rng(7).integers(0, 256, 1 << 20, np.uint8)


def new_image(width: int, height: int) -> Image.Image:
    """Make an image of noise with colored areas."""
    pixels = np.resize(NOISE, (height, width, 3))
    pixels[: height // 2, : width // 3] = (255, 3, 90)
    return Image.fromarray(pixels)


def check_image(case: Case, width: int, height: int) -> None:
    image = new_image(width, height)
    try:
        expected = oracle_image(case.processor, image, case.vision)
    except ValueError as error:
        with pytest.raises(RequestError, match=f"{width} × {height} pixels.*: crop or pad it"):
            process_image(image, case.config)
        assert any(each in str(error) for each in ("aspect ratio", "Size must contain", "must be > 0"))
        return
    found = process_image(image, case.config)
    if case.vision.family != "internvl":
        assert found.grid == expected.grid
    assert len(found.tiles) == len(expected.tiles) == found.grid[0]
    assert all(
        np.array_equal(np.asarray(ours), theirs) for ours, theirs in zip(found.tiles, expected.tiles, strict=True)
    )
    assert case.config.num_embeds(found.grid) <= case.config.max_embeds


sides = st.one_of(st.integers(1, 40), st.integers(1, 500), st.sampled_from([56, 70, 112, 224, 336, 364]))


@pytest.mark.parametrize("name", CASES)
@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(width=sides, height=sides)
@example(width=1, height=1)
@example(width=1, height=300)
@example(width=1000, height=6)
@example(width=600, height=600)
def test_pixels_are_those_of_transformers(name: str, width: int, height: int) -> None:
    check_image(CASES[name], width, height)


def test_image_that_would_be_resized_beyond_the_memory_is_refused() -> None:
    case = CASES["llava"]
    assert case.config.tile == (56, 56)
    image = Image.new("RGB", (90_000, 1))
    with pytest.raises(RequestError, match=r"90000 × 1 pixels.* resize to 5040000 × 56; at most 268435456 pixels"):
        process_image(image, case.config)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", CASES)
@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
@given(width=st.integers(1, SIDE), height=st.integers(1, SIDE))
@example(width=1, height=SIDE)
@example(width=SIDE, height=1)
@example(width=SIDE, height=SIDE)
def test_pixels_of_large_images_are_those_of_transformers(name: str, width: int, height: int) -> None:
    check_image(CASES[name], width, height)
