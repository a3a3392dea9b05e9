"""Encoder: a model's encoder of media, which turns a media file into embeddings, some pieces at a time.

Knows the model's tower and its stages; knows no pixels, no samples, no requests and no cache. This folder is imported
only for models that take media, because it imports transformers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from ...ipc.blobs.media_file import MediaFile
from ...ipc.errors import ConfigError
from ...ipc.spec.models.model_config import Encoder as EncoderConfig
from ...ipc.spec.models.vision_config import Grid
from ...kernels.select import Ops
from ..borrowed.load import read_config
from ..weights.opening import open_checkpoint
from .blocks import EncoderState, Tower
from .load import load_tower


class Encoder:
    """Encoder of images or audio. Owns the weights of tower and projector. A medium's embeddings depend only on its
    media file and on `pieces_per_stage`."""

    def __init__(
        self, tower: Tower[Any], config: EncoderConfig, dtype: torch.dtype, device: torch.device, weight_bytes: int
    ) -> None:
        self._tower, self._device = tower, device
        self._num_stages = len(config.stages)
        self._num_prepared = int(config.stages[0] == "frames")  # stages before the one that makes the rows
        self.dtype = dtype
        self.weight_bytes = weight_bytes

    @classmethod
    def load(
        cls,
        folder: Path,
        config: EncoderConfig,
        dtype: torch.dtype,
        device: torch.device,
        overrides: dict[str, Any] | None = None,
        ops: Ops | None = None,
        *,
        is_dummy: bool = False,
    ) -> Encoder:
        """Load tower and projector of the checkpoint in `folder` as `dtype`. ConfigError as in `load_tower`, or if the
        encoder in the installed transformers differs from the known one. `ops`: operations that are used where torch is
        slow, for bfloat16 on a CPU. `is_dummy`: random weights."""
        theirs = read_config(folder, overrides)
        with open_checkpoint(folder, dtype, device, None, is_dummy=is_dummy) as checkpoint:
            is_slow = device.type == "cpu" and dtype == torch.bfloat16  # 7 times on CPUs without bfloat16 instructions
            try:
                tower, num_bytes = load_tower(theirs, config, checkpoint, ops if is_slow else None)
            except (AttributeError, ImportError, TypeError) as error:
                raise ConfigError(
                    f"transformers {transformers.__version__} has another encoder of {theirs.model_type} than is known "
                    f"here ({error}): install transformers 5.23"
                ) from error
        return cls(tower, config, dtype, device, num_bytes)

    @torch.inference_mode()
    def begin(self, media: MediaFile, grid: Grid, pieces_per_stage: int = 1) -> EncoderState:
        """Return the initial state of a medium; each stage will be computed in `pieces_per_stage` pieces. RequestError
        if the model does not accept the medium's size, or it does not match `grid`."""
        state: EncoderState = self._tower.open(media, grid)
        state.num_pieces = pieces_per_stage
        return state

    @torch.inference_mode()
    def advance(self, state: EncoderState, num_pieces: int) -> None:
        """Run the next `num_pieces` pieces. Those of layers that the embeddings do not need compute nothing."""
        end = state.next_piece + num_pieces
        while state.next_piece < end:
            stage, first = divmod(state.next_piece, state.num_pieces)
            last = min(first + end - state.next_piece, state.num_pieces)
            self._run(state, stage, first, last)
            state.next_piece += last - first

    def _run(self, state: EncoderState, stage: int, first: int, last: int) -> None:
        """Run the pieces [first, last) of a stage."""
        number = stage - self._num_prepared  # the number of layers that are complete after the stage
        if number < 0:
            self._tower.prepare(state, first, last)
            return
        for group in self._tower.groups(first, last):
            if number <= self._tower.num_layers:
                self._tower.run_layers(state, number, *group)
            elif stage == self._num_stages - 1:
                self._tower.run_projector(state, *group)

    @torch.inference_mode()
    def finish(self, state: EncoderState) -> Tensor:
        """Run the remaining pieces and return the embeddings [num_embeds, (1 + num_deepstack) × hidden]."""
        self.advance(state, self._num_stages * state.num_pieces - state.next_piece)
        return self._tower.finish(state)

    def zeros(self, num_embeds: int, width: int) -> Tensor:
        """Return zeros [num_embeds, width], the embeddings of a medium that cannot be encoded."""
        return torch.zeros((num_embeds, width), dtype=self.dtype, device=self._device)
