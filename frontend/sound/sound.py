"""Sound: an audio file that is open for decoding, and limits on the values in its header."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ...ipc.errors import RequestError
from ...ipc.spec.models.audio_config import SAMPLE_RATE

Samples: TypeAlias = NDArray[np.float32]

MIN_RATE, MAX_RATE = 1000, 192_000  # Hz
MAX_CHANNELS = 64
NOT_INSTALLED = "audio is read with the extra tokenloom[audio], which is not installed: pip install 'tokenloom[audio]'"
BLOCK_SAMPLES = 1 << 18  # samples, of all channels together, that are decoded at once


class Sound(NamedTuple):
    """An audio file after its header has been read. Samples are decoded only when `blocks` is iterated."""

    format: str  # for errors, such as "WAV"
    coding: str  # libsndfile's name of the samples' coding, such as "PCM_16"
    rate: int  # Hz
    num_channels: int
    num_frames: int  # samples per channel, according to the header
    blocks: Iterator[Samples]  # each [frames, channels], full scale is ±1

    def check(self, max_seconds: float) -> None:
        """Raise RequestError if values in the header are not served, or the clip is too long."""
        if not 1 <= self.num_channels <= MAX_CHANNELS:
            raise RequestError(
                f"the {self.format} audio has {self.num_channels} channels: send one with 1 to {MAX_CHANNELS}"
            )
        if not MIN_RATE <= self.rate <= MAX_RATE:
            raise RequestError(
                f"the {self.format} audio has a rate of {self.rate} Hz: send one of {MIN_RATE} to {MAX_RATE} Hz"
            )
        self.check_length(self.num_frames, max_seconds)

    def check_length(self, num_frames: int, max_seconds: float) -> None:
        """Raise RequestError if `num_frames` frames last longer than `max_seconds`."""
        if num_frames > max_seconds * self.rate:
            raise RequestError(
                f"the {self.format} audio lasts {num_frames / self.rate:.1f} s, at most {max_seconds:g} s are read: "
                "send a shorter one, or raise --max-audio-s"
            )

    def num_samples(self, num_frames: int) -> int:
        """Return the number of samples that `num_frames` frames become at SAMPLE_RATE, rounded up."""
        return -(-num_frames * SAMPLE_RATE // self.rate)
