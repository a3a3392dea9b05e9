"""Encoder: from media files to embeddings, some pieces at a time.

Knows a model's tower and its pixels; knows no requests and no cache. Only models that see images import this folder,
because it imports transformers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from ...ipc.blobs.media_file import MediaFile
from ...ipc.errors import ConfigError, RequestError
from ...ipc.models.vision_config import VisionConfig
from ...kernels.select import Ops
from ..borrowed.load import read_config
from ..weights.checkpoint import Checkpoint
from ..weights.dummy import DummyCheckpoint
from .blocks import EncoderState, Tower
from .load import load_tower
from .pixels import PixelScale

QWEN = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")


class Encoder:
    """Owns the weights of tower and projector. An item's embeddings depend on its media file alone."""

    def __init__(
        self,
        tower: Tower,
        scale: PixelScale,
        vision: VisionConfig,
        dtype: torch.dtype,
        device: torch.device,
        weight_bytes: int,
    ) -> None:
        self._tower, self._scale, self._vision, self._device = tower, scale, vision, device
        self._num_stages = len(vision.stages)
        self.dtype = dtype
        self.weight_bytes = weight_bytes

    @classmethod
    def load(
        cls,
        folder: Path,
        vision: VisionConfig,
        dtype: torch.dtype,
        device: torch.device,
        overrides: dict[str, Any] | None = None,
        ops: Ops | None = None,
        *,
        is_dummy: bool = False,
    ) -> Encoder:
        """Read tower and projector of the checkpoint in `folder` as `dtype`. ConfigError as `load_tower`, or if this
        transformers has another form of the encoder. `ops` multiply and attend where torch is slow: in bfloat16 on
        a CPU. `is_dummy`: random weights."""
        config = read_config(folder, overrides)
        arguments = (folder, dtype, device)
        with DummyCheckpoint(*arguments, None, {}) if is_dummy else Checkpoint(*arguments) as checkpoint:
            is_slow = device.type == "cpu" and dtype == torch.bfloat16  # 7 times, without instructions for bfloat16
            try:
                tower, num_bytes = load_tower(config, checkpoint, ops if is_slow else None)
            except (AttributeError, ImportError, TypeError) as error:
                raise ConfigError(
                    f"transformers {transformers.__version__} has another encoder of {config.model_type} than is known "
                    f"here ({error}): install transformers 5.23"
                ) from error
        return cls(tower, PixelScale.load(folder, vision.family, dtype, device), vision, dtype, device, num_bytes)

    @torch.inference_mode()
    def begin(self, media: MediaFile, grid: tuple[int, int, int], pieces_per_stage: int = 1) -> EncoderState:
        """Begin with a medium, each stage of which takes so many pieces. RequestError if its size is none of the
        model's, or not that of `grid`."""
        self._check(media, grid)
        image = torch.frombuffer(bytearray(media.data), dtype=torch.uint8).view(media.shape)
        state = self._tower.begin(image.to(self._device), grid)
        state.num_pieces = pieces_per_stage
        return state

    @torch.inference_mode()
    def advance(self, state: EncoderState, num_pieces: int) -> None:
        """Run the next pieces; those of layers that the embeddings do not need cost nothing."""
        end = state.next_piece + num_pieces
        while state.next_piece < end:
            stage, first = divmod(state.next_piece, state.num_pieces)
            last = min(first + end - state.next_piece, state.num_pieces)
            for group in self._tower.groups(first, last):
                if stage <= self._tower.num_layers:
                    self._tower.run_layers(state, stage, *group, self._scale.scale)
                elif stage == self._num_stages - 1:
                    self._tower.run_projector(state, *group)
            state.next_piece += last - first

    @torch.inference_mode()
    def finish(self, state: EncoderState) -> Tensor:
        """Run the pieces that are left; return the embeddings [num_embeds, (1 + num_deepstack) × hidden]."""
        self.advance(state, self._num_stages * state.num_pieces - state.next_piece)
        return self._tower.finish(state)

    def zeros(self, num_embeds: int, width: int) -> Tensor:
        """Return embeddings of a medium that cannot be encoded."""
        return torch.zeros((num_embeds, width), dtype=self.dtype, device=self._device)

    def _check(self, media: MediaFile, grid: tuple[int, int, int]) -> None:
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
