"""Decode an audio file to mono samples at SAMPLE_RATE: headers are checked first, then blocks are decoded one by one.

The channels are averaged, and libsoxr resamples the result. Silence is accepted, NaN and huge samples are not.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from ...ipc.errors import RequestError
from ...ipc.spec.models.audio_config import SAMPLE_RATE
from .audio_format import format_of
from .sound import NOT_INSTALLED, Samples, Sound
from .sound_file import open_sound
from .wav_file import open_wav

MAX_SAMPLE = 2.0**31  # accepts unscaled 32-bit integers; the power of larger samples may overflow float32


def decode_audio(data: memoryview, max_seconds: float, max_samples: int = 0) -> Iterator[Samples]:
    """Yield the samples of an audio file, block by block: float32, mono at SAMPLE_RATE, full scale is ±1.

    `max_samples`: limit of the model for one clip; 0: none. RequestError, possibly between blocks, if the file is
    damaged, too long, empty or of another format, or the extra tokenloom[audio] is not installed."""
    name = format_of(data)
    sound = open_wav(data) if name == "WAV" else open_sound(data, name)
    sound.check(max_seconds)
    _check_samples(sound.num_samples(sound.num_frames), max_samples)
    num_frames = num_samples = 0
    resampler = _resampler(sound.rate)
    for block in sound.blocks:
        num_frames += len(block)
        sound.check_length(num_frames, max_seconds)  # the header may be wrong
        samples = _mono(block, sound)
        if resampler is not None:
            samples = resampler.resample_chunk(samples)
        num_samples += len(samples)
        _check_samples(num_samples, max_samples)
        yield samples
    if not num_frames:
        raise RequestError(f"the {sound.format} audio of {len(data)} bytes has no samples: send one that has some")
    if resampler is not None:
        last = resampler.resample_chunk(np.zeros(0, np.float32), last=True)
        num_left = sound.num_samples(num_frames) - num_samples
        yield np.pad(last[:num_left], (0, max(num_left - len(last), 0)))  # libsoxr rounds the number, we round up


def _resampler(rate: int) -> Any:
    """Return a libsoxr stream that resamples from `rate` to SAMPLE_RATE; None if they are equal. RequestError if
    libsoxr is not installed."""
    if rate == SAMPLE_RATE:
        return None
    try:
        import soxr
    except (ImportError, OSError):
        raise RequestError(NOT_INSTALLED) from None
    return soxr.ResampleStream(rate, SAMPLE_RATE, 1, dtype="float32", quality="HQ")


def _mono(block: Samples, sound: Sound) -> Samples:
    with np.errstate(invalid="ignore", over="ignore"):
        mono: Samples = block[:, 0] if sound.num_channels == 1 else block.mean(axis=1, dtype=np.float32)
        largest = float(np.abs(mono).max())
    if not largest <= MAX_SAMPLE:  # true for NaN, too
        raise RequestError(
            f"the {sound.format} audio has a sample of {largest:g}: send finite samples, where full scale is 1"
        )
    return mono


def _check_samples(num_samples: int, max_samples: int) -> None:
    if max_samples and num_samples > max_samples:
        raise RequestError(
            f"the audio clip lasts {num_samples / SAMPLE_RATE:.2f} s or longer, the model takes at most "
            f"{max_samples / SAMPLE_RATE:g} s: send a shorter one, or cut it"
        )
