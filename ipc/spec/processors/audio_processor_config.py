"""AudioProcessorConfig: how clips for a model become media files and placeholders.

The settings of transformers' feature extractors come from the checkpoint: from processor_config.json, where newer ones
nest them, or from preprocessor_config.json. Workers compute frames in only one way (`ipc/spec/models/audio_config.py`),
so the settings are compared with it and not kept. A setting that a file leaves out, or sets to null, has its class's
default.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

import msgspec

from ...errors import ConfigError
from ..models.audio_config import HOP_SAMPLES, SAMPLE_RATE, AudioConfig, AudioFamily
from ..models.audio_families import QWEN3_MIN_SAMPLES
from ..models.vision_config import Grid
from .processor_file import read_processor

WHISPER = "WhisperFeatureExtractor"
QWEN3_ASR = "Qwen3ASRFeatureExtractor"
CLASSES: dict[AudioFamily, tuple[str, ...]] = {  # the first one is the family's own
    "whisper": (WHISPER,),
    "qwen2_audio": (WHISPER,),
    "voxtral": (WHISPER,),
    "qwen3_asr": (QWEN3_ASR, WHISPER),  # the latter in files from before transformers had the family
}
FOURIER_SAMPLES = 400  # of each frame
SHARED = {
    "sampling_rate": SAMPLE_RATE,
    "hop_length": HOP_SAMPLES,
    "n_fft": FOURIER_SAMPLES,
    "chunk_length": 30,
    "padding_value": 0.0,
    "dither": 0.0,
}
DEFAULTS: dict[str, dict[str, float]] = {
    WHISPER: {**SHARED, "feature_size": 80},
    QWEN3_ASR: {**SHARED, "feature_size": 128, "n_window": 50, "min_length": QWEN3_MIN_SAMPLES},
}


class AudioProcessorConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Settings by which clips for a model are cut into windows. Grids of media files: (windows, 1, samples)."""

    kind: ClassVar[Literal["audio"]] = "audio"

    encoder: AudioConfig
    max_audio_s: float  # longest clip in a prompt, in seconds

    @property
    def family(self) -> AudioFamily:
        return self.encoder.family

    def grid(self, num_samples: int) -> Grid:
        """Return the grid of a clip."""
        return (self.encoder.num_windows(num_samples), 1, num_samples)

    def num_embeds(self, grid: Grid) -> int:
        """Return the number of embeddings of a clip, which is also the number of its placeholders."""
        return self.encoder.num_embeds(grid[2])

    @property
    def max_embeds(self) -> int:
        """Upper bound of the number of embeddings of one clip."""
        longest = int(self.max_audio_s * SAMPLE_RATE) + 1  # samples are rounded up
        return self.num_embeds(self.grid(min(longest, self.max_samples or longest)))

    @property
    def min_samples(self) -> int:
        """Number of samples of the shortest clip that has an embedding."""
        return next(count for count in range(1, self.encoder.window_samples) if self.encoder.num_embeds(count))

    @property
    def max_samples(self) -> int:
        """Number of samples of the longest clip that the model takes; 0: any."""
        return self.encoder.max_windows * self.encoder.window_samples


def load_audio_processor(
    folder: Path, encoder: AudioConfig, max_audio_s: float, overrides: Mapping[str, Any] | None = None
) -> AudioProcessorConfig:
    """Read the feature extractor of a checkpoint. ConfigError if it does not match the encoder or the frames that
    workers compute, or if there are `overrides`."""
    given = read_processor(folder, "feature_extractor")
    known = CLASSES[encoder.family]
    name = given.get("feature_extractor_type") or known[0]
    if name not in known:
        served = ", ".join(known)
        raise ConfigError(
            f"{folder} has the feature_extractor_type {name!s:.100}; of {encoder.family} models are served {served}"
        )
    if overrides:
        names = ", ".join(sorted(overrides))
        raise ConfigError(f"--mm-processor-kwargs: {names} cannot be set for a {name}: leave the option out")
    found = DEFAULTS[name] | {key: value for key, value in given.items() if value is not None}
    for key, wanted in _wanted(encoder, name).items():
        if found[key] != wanted:
            raise ConfigError(
                f"the feature extractor of {folder} has {key} {found[key]!r:.40}, only {wanted} is served"
            )
    return AudioProcessorConfig(encoder=encoder, max_audio_s=max_audio_s)


def _wanted(encoder: AudioConfig, name: str) -> dict[str, float]:
    """Return the only settings that match the encoder and the frames that workers compute."""
    wanted = {key: value for key, value in DEFAULTS[name].items() if key != "chunk_length"}
    wanted["feature_size"] = encoder.num_mel_bins
    if encoder.family == "qwen2_audio":  # it cuts and pads to one window
        wanted["chunk_length"] = encoder.window_samples / SAMPLE_RATE
    if "n_window" in wanted:
        wanted |= {"n_window": encoder.window_frames // 2, "min_length": encoder.min_samples}
    return wanted
