"""AudioFiles: reads media files of audio for a model's encoder, checks them, and holds the LogMel for their frames."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from ....ipc.blobs.media_file import MediaFile
from ....ipc.errors import RequestError
from ....ipc.spec.models.audio_config import AudioConfig
from ....ipc.spec.models.vision_config import Grid
from .log_mel import LogMel

SAMPLE_BYTES = 4  # float32


class AudioFiles:
    """Reader of audio media files. Knows the model's windows, and has the LogMel that computes frames."""

    def __init__(self, audio: AudioConfig, mel: LogMel, device: torch.device) -> None:
        self.audio, self.mel, self._device = audio, mel, device

    @classmethod
    def load(cls, folder: Path, audio: AudioConfig, device: torch.device) -> AudioFiles:
        """Read the checkpoint's processor config. ConfigError as in LogMel.load."""
        return cls(audio, LogMel.load(folder, audio, device), device)

    def read(self, media: MediaFile, grid: Grid) -> Tensor:
        """Return the samples: float32 [n]. RequestError if the model does not accept their number, or it does not match
        `grid`."""
        if media.grid != grid:
            raise RequestError(f"a media file has grid {media.grid}, its prompt says {grid}: send it again")
        num_windows, _, count = grid
        fits = count > 0 and media.shape == (1, 1, count, SAMPLE_BYTES)
        if not (fits and grid == (self.audio.num_windows(count), 1, count)) or not self.audio.num_embeds(count):
            raise RequestError(
                f"a media file of shape {media.shape} and grid {grid} is no audio that fits the model: send the audio "
                "again"
            )
        if 0 < self.audio.max_windows < num_windows:
            raise RequestError(
                f"an audio clip has {num_windows} windows, the model takes {self.audio.max_windows}: send a shorter one"
            )
        return torch.frombuffer(bytearray(media.data), dtype=torch.float32).to(self._device)
