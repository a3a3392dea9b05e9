"""Media files of random pixels in the shapes that each family's encoder takes, and transformers' own features."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from tokenloom.ipc.blobs.media_file import MediaFile, media_header, parse_media_file
from tokenloom.ipc.spec.models.vision_config import VisionConfig
from tokenloom.workers.encoders.images.pixels import patchify


def random_item(vision: VisionConfig, seed: int = 0, tiles: int = 3, rows: int = 6, columns: int = 4) -> MediaFile:
    """An item of `tiles` images, if the family has tiles, or of rows × columns merged patches, if it has any size."""
    generator = np.random.default_rng(seed)
    step = vision.patch_size * vision.merge_size
    if vision.family in ("llava", "gemma3", "idefics3", "internvl"):
        count = tiles if vision.family in ("idefics3", "internvl") else 1
        shape, grid = (count, vision.image_size, vision.image_size, 3), (1, 1, count)
    else:
        shape = (1, rows * step, columns * step, 3)
        grid = (1, rows * vision.merge_size, columns * vision.merge_size)
    pixels = generator.integers(0, 256, shape, np.uint8)
    return parse_media_file(memoryview(media_header(grid, shape) + pixels.tobytes()))


def qwen_patches(pixels: Tensor, patch_size: int, merge_size: int) -> Tensor:
    """One image [1, 3, height, width] as transformers' models take it: [n, 3 × 2 × patch_size²], two equal frames."""
    patches = patchify(pixels.permute(0, 2, 3, 1), patch_size, merge_size).permute(0, 3, 1, 2)
    return patches.unsqueeze(2).expand(-1, -1, 2, -1, -1).flatten(1)


@torch.inference_mode()
def their_features(model: Any, vision: VisionConfig, pixels: Tensor, grid: tuple[int, int, int]) -> Tensor:
    """The features [num_embeds, …] of `model.get_image_features`. pixels: [tiles, 3, height, width] of one item."""
    if vision.family == "idefics3":
        found = model.get_image_features(pixels[None])
    elif vision.family == "pixtral":
        found = model.get_image_features(pixels, image_sizes=torch.tensor([pixels.shape[2:]]))
    elif vision.family in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl"):
        patches = qwen_patches(pixels, vision.patch_size, vision.merge_size)
        found = model.get_image_features(patches, image_grid_thw=torch.tensor([grid]))
    else:
        found = model.get_image_features(pixels)
    parts = [found.pooler_output, *(getattr(found, "deepstack_features", None) or [])]
    flat = [torch.cat(list(part)).flatten(0, -2) for part in parts]
    return torch.cat(flat, dim=-1)
