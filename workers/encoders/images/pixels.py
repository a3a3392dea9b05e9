"""PixelScale: a table from the uint8 pixels of a media file to the numbers that an encoder takes.

Rescaling and normalizing map each of the 256 values of a channel to a number. The table is computed as transformers'
PIL processors compute each pixel: in float64 and float32. Images have already been resized by the media process.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ....ipc.spec.models.config_file import ConfigFile, is_number, shown
from ....ipc.spec.models.vision_config import VisionFamily
from ..processor_options import processor_options

_CLIP = ([0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711])  # mean and standard deviation
_HALF = ([0.5, 0.5, 0.5], [0.5, 0.5, 0.5])
DEFAULTS = {"idefics3": _HALF, "gemma3": _HALF}  # by family, for fields that the file lacks; other families have _CLIP
OF_KIND = {"SiglipImageProcessor": _HALF}  # by image_processor_type; overrides DEFAULTS
TEMPORAL_PATCH_SIZE = 2  # frames of a patch in Qwen's encoders, which take an image as two equal frames


class PixelScale:
    """The numbers for each of the 256 values of the three channels."""

    def __init__(self, table: Tensor) -> None:
        """table: [3, 256]."""
        self._table = table

    @classmethod
    def load(cls, folder: Path, family: VisionFamily, dtype: torch.dtype, device: torch.device) -> PixelScale:
        """Read the checkpoint's processor config. ConfigError if there is none, or it has invalid values."""
        options = ConfigFile(folder, processor_options(folder, "image_processor", "how pixels become numbers"))
        kind = str(options.get("image_processor_type")).removesuffix("Fast").removesuffix("Pil")
        mean, deviation = OF_KIND.get(kind, DEFAULTS.get(family, _CLIP))
        rescale = options.number("rescale_factor", 1 / 255) if options.flag("do_rescale", True) else None
        normalization = _channels(options, "image_mean", mean), _channels(options, "image_std", deviation)
        if 0 in normalization[1]:
            options.refuse("image_std has a 0, by which pixels would be divided: correct it")
        table = pixel_table(rescale, normalization if options.flag("do_normalize", True) else None)
        return cls(torch.from_numpy(table).to(device, dtype))

    def scale(self, image: Tensor) -> Tensor:
        """Return the encoder's numbers for an image: uint8 [tiles, height, width, 3] → [tiles, 3, height, width]."""
        values = image.permute(3, 0, 1, 2).int()
        channels = [channel[index] for channel, index in zip(self._table, values, strict=True)]
        return torch.stack(channels, dim=1)


def _channels(options: ConfigFile, name: str, default: list[float]) -> list[float]:
    """Return a list of 3 numbers, one for each channel, or of one number for all. ConfigError for anything else."""
    value = options.get(name) or default
    values = value if isinstance(value, list) else [value]
    if len(values) not in (1, 3) or not all(map(is_number, values)):
        options.refuse(f"{name} must be 3 numbers, one for each channel, it is {shown(value)}")
    return values


def pixel_table(rescale: float | None, normalization: tuple[Any, Any] | None) -> Any:
    """Return the table: float32 [3, 256], computed in numpy as in transformers' processors. `normalization`: mean and
    standard deviation."""
    values: Any = np.broadcast_to(np.arange(256, dtype=np.uint8)[:, None], (256, 3))
    if rescale is not None:
        values = (values.astype(np.float64) * rescale).astype(np.float32)
    values = values.astype(np.float32)
    if normalization is not None:
        mean, deviation = (np.broadcast_to(np.array(each, np.float32), (3,)) for each in normalization)
        values = (values - mean) / deviation
    return np.ascontiguousarray(values.T)


def patchify(image: Tensor, patch_size: int, merge_size: int) -> Tensor:
    """Cut one image [1, height, width, 3] into patches [n, patch_size, patch_size, 3] in the order of Qwen's encoders:
    square by square, where a square has merge_size × merge_size patches."""
    _, height, width, channels = image.shape
    rows, columns, square = height // patch_size, width // patch_size, merge_size
    split = image.view(rows // square, square, patch_size, columns // square, square, patch_size, channels)
    return split.permute(0, 3, 1, 4, 2, 5, 6).reshape(rows * columns, patch_size, patch_size, channels)
