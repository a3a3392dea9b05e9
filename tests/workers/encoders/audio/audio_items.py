"""Media files of random audio."""

from __future__ import annotations

from tokenloom.ipc.blobs.media_file import MediaFile, media_header, parse_media_file
from tokenloom.ipc.spec.models.audio_config import AudioConfig
from tokenloom.tests.support.audio_oracle import Samples, random_clip


def item_of(audio: AudioConfig, samples: Samples) -> MediaFile:
    count = len(samples)
    header = media_header((audio.num_windows(count), 1, count), (1, 1, count, 4))
    return parse_media_file(memoryview(header + samples.astype("<f4").tobytes()))


def random_item(audio: AudioConfig, seed: int, count: int) -> MediaFile:
    """An audio of `count` samples."""
    return item_of(audio, random_clip(seed, count))
