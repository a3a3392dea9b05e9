"""LogMel: log-mel frames of samples, as the feature extractors of Whisper and Qwen3-ASR compute them in torch.

A frame is the power spectrum of `n_fft` samples around its time, under a Hann window, summed by mel filters. There are
100 frames a second. The signal is mirrored at both ends. Finally the frames of a clip are raised to at least 8 below
their maximum, and scaled (`normalized`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ....ipc.errors import ConfigError
from ....ipc.spec.models.audio_config import HOP_SAMPLES, SAMPLE_RATE, AudioConfig
from ..processor_options import processor_options

FLOOR = 1e-10  # smallest power
SILENCE = -10.0  # log10 of FLOOR
RANGE = 8.0  # difference, in log10, between a clip's maximum and the smallest normalized value
CLASSES = {  # transformers' feature extractors, with their defaults
    "WhisperFeatureExtractor": {"feature_size": 80, "chunk_length": 30},
    "Qwen3ASRFeatureExtractor": {"feature_size": 128, "chunk_length": 30, "n_window": 50, "min_length": 8000},
}
DEFAULTS = {"sampling_rate": 16000, "hop_length": 160, "n_fft": 400, "dither": 0.0, "padding_value": 0.0}
# Slaney's mel scale (Auditory Toolbox, 1998): 3 mels per 200 Hz up to 1 kHz, above it 27 mels per factor of 6.4
MELS_PER_HZ = 3 / 200
CORNER_HZ, CORNER_MELS = 1000.0, 15.0  # where the scale becomes logarithmic
MELS_PER_FOLD = 27 / np.log(6.4)


class LogMel:
    """Log-mel spectrogram. Owns its window and filters. Except for rounding, frames do not depend on how calls divide
    them."""

    def __init__(self, num_bins: int, num_samples: int = 400, device: torch.device | None = None) -> None:
        """num_bins: mel bins. num_samples: samples of a frame."""
        self._num_samples = num_samples
        self._window = torch.hann_window(num_samples, device=device)
        filters = torch.from_numpy(mel_filters(num_samples // 2 + 1, num_bins))
        self._filters = filters.to(device, torch.float32).T

    @classmethod
    def load(cls, folder: Path, audio: AudioConfig, device: torch.device) -> LogMel:
        """Read the checkpoint's processor config. ConfigError if there is none, or its frames are not supported."""
        options = processor_options(folder, "feature_extractor", "how samples become log-mel frames")
        kind = options.get("feature_extractor_type") or "WhisperFeatureExtractor"
        if not isinstance(kind, str) or kind not in CLASSES:
            raise ConfigError(f"{folder}: feature_extractor_type {kind!s:.100} is none of {', '.join(CLASSES)}")
        options = {**DEFAULTS, **CLASSES[kind], **options}
        for name, value in _needed(audio).items():
            if options.get(name, value) != value:
                raise ConfigError(
                    f"{folder}: the feature extractor's {name} is {options[name]}, only {value} can be used with this "
                    "model: correct preprocessor_config.json, or choose another checkpoint"
                )
        num_samples = options["n_fft"]
        if not isinstance(num_samples, int) or num_samples % 2 or not HOP_SAMPLES <= num_samples <= SAMPLE_RATE // 2:
            raise ConfigError(
                f"{folder}: the feature extractor's n_fft is {num_samples}, only even numbers from {HOP_SAMPLES} to "
                f"{SAMPLE_RATE // 2} can be used: correct preprocessor_config.json"
            )
        return cls(audio.num_mel_bins, num_samples, device)

    @property
    def reach(self) -> int:
        """The number of samples of a frame on each side of its time."""
        return self._num_samples // 2

    def logarithms(self, samples: Tensor, length: int, first: int, last: int) -> Tensor:
        """Return the frames [first, last), not normalized yet: float32 [mel bins, last − first].

        samples: float32 [n] of a signal of `length` ≥ n, with zeros at its end.
        """
        start, stop = HOP_SAMPLES * first - self.reach, HOP_SAMPLES * (last - 1) + self.reach
        stretch = _stretch(samples, length, start, stop)
        spectrum = torch.stft(
            stretch, self._num_samples, HOP_SAMPLES, window=self._window, center=False, return_complex=True
        )
        power = (spectrum.abs() ** 2).contiguous()
        return (self._filters @ power).clamp(min=FLOOR).log10()


def normalized(logarithms: Tensor, peak: Tensor) -> Tensor:
    """Return frames in the form that encoders take. peak: [], the maximum of all frames of the clip."""
    return (torch.maximum(logarithms, peak - RANGE) + 4.0) / 4.0


def _needed(audio: AudioConfig) -> dict[str, Any]:
    """Return the values that options must have, if the feature extractor has these options."""
    needed = {
        "sampling_rate": SAMPLE_RATE,
        "hop_length": HOP_SAMPLES,
        "feature_size": audio.num_mel_bins,
        "dither": 0.0,
        "padding_value": 0.0,
        "padding_side": "right",
    }
    if audio.family == "qwen3_asr":
        return {**needed, "n_window": audio.window_frames // 2, "min_length": audio.min_samples}
    return {**needed, "chunk_length": audio.window_samples / SAMPLE_RATE}


def _stretch(samples: Tensor, length: int, start: int, stop: int) -> Tensor:
    """Return samples [start, stop) of a signal that is mirrored at its first and last sample, without repeating
    them."""
    inner = _padded(samples, max(start, 0), min(stop, length))
    before, after = [], []
    if start < 0:
        before.append(_padded(samples, 1, 1 - start).flip(0))
    if stop > length:
        after.append(_padded(samples, 2 * length - stop - 1, length - 1).flip(0))
    return torch.cat([*before, inner, *after]) if before or after else inner


def _padded(samples: Tensor, start: int, stop: int) -> Tensor:
    """Return samples [start, stop), with zeros after the last one."""
    part = samples[start : min(stop, len(samples))]
    missing = stop - start - len(part)
    return torch.nn.functional.pad(part, (0, missing)) if missing else part


def mel_filters(num_bins: int, num_filters: int) -> Any:
    """Return the filters, triangles over the bins of a spectrum: float64 [num_bins, num_filters] for bins from 0 Hz to
    half the sample rate. They overlap by half, and have equal areas."""
    top_hz = SAMPLE_RATE / 2
    top = CORNER_MELS + np.log(top_hz / CORNER_HZ) * MELS_PER_FOLD
    corners = _hertz_of(np.linspace(0.0, top, num_filters + 2))  # filter i starts at i, peaks at i + 1, ends at i + 2
    bins = np.linspace(0.0, top_hz, num_bins)[:, None]
    widths = np.diff(corners)
    rising, falling = (bins - corners[:-2]) / widths[:-1], (corners[2:] - bins) / widths[1:]
    return np.maximum(0.0, np.minimum(rising, falling)) * (2.0 / (corners[2:] - corners[:-2]))


def _hertz_of(mels: Any) -> Any:
    return np.where(mels < CORNER_MELS, mels / MELS_PER_HZ, CORNER_HZ * np.exp((mels - CORNER_MELS) / MELS_PER_FOLD))
