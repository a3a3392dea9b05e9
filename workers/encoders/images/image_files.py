"""ImageFiles: reads media files of images for a model's encoder, checks them, and turns pixels into numbers."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from ....ipc.blobs.media_file import MediaFile
from ....ipc.errors import RequestError
from ....ipc.spec.models.vision_config import Grid, VisionConfig
from .pixels import PixelScale

QWEN = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")


class ImageFiles:
    """Reader of image media files. An image's numbers depend only on its media file."""

    def __init__(self, vision: VisionConfig, scale: PixelScale, device: torch.device) -> None:
        self._vision, self._scale, self._device = vision, scale, device

    @classmethod
    def load(cls, folder: Path, vision: VisionConfig, dtype: torch.dtype, device: torch.device) -> ImageFiles:
        """Read the checkpoint's processor config. ConfigError as in PixelScale.load."""
        return cls(vision, PixelScale.load(folder, vision.family, dtype, device), device)

    def read(self, media: MediaFile, grid: Grid) -> Tensor:
        """Return the pixels: uint8 [tiles, height, width, 3]. RequestError if the model does not accept their size, or
        it does not match `grid`."""
        self._check(media, grid)
        pixels = torch.frombuffer(bytearray(media.data), dtype=torch.uint8).view(media.shape)
        return pixels.to(self._device)

    def numbers(self, pixels: Tensor) -> Tensor:
        """Return the encoder's numbers for pixels: uint8 [units, height, width, 3] → [units, 3, height, width]."""
        return self._scale.scale(pixels)

    def _check(self, media: MediaFile, grid: Grid) -> None:
        vision, (_, height, width, _) = self._vision, media.shape
        if media.grid != grid:
            raise RequestError(f"a media file has grid {media.grid}, its prompt says {grid}: send it again")
        size, patch = vision.image_size, vision.patch_size * vision.merge_size
        is_fixed = size and vision.family not in ("pixtral", *QWEN)
        fits = height == width == size if is_fixed else not height % patch and not width % patch
        if vision.family in QWEN:
            fits = fits and grid == (1, height // vision.patch_size, width // vision.patch_size)
        if not (fits and media.shape[0] > 0 and height * width > 0):
            raise RequestError(
                f"a media file of {media.shape[0]} images of {height} × {width} pixels and grid {grid} does not fit "
                "the model: send the image again"
            )
