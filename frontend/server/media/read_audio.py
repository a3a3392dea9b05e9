"""Read an audio file for media files: one of the whole clip, or one for each of its pieces."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import numpy as np

from ....ipc.errors import RequestError
from ....ipc.messages.media_process import ReadAudio
from ....ipc.spec.models.audio_config import SAMPLE_RATE
from ....ipc.spec.processors.audio_processor_config import AudioProcessorConfig
from ...sound.decode import decode_audio
from ...sound.quiet_cuts import cut_at_quiet_places
from ...sound.sound import Samples
from .media_content import MediaContent


def read_audio(data: memoryview, order: ReadAudio) -> Iterator[MediaContent]:
    """Yield the samples of a clip, or of its pieces one by one: float32 little-endian, mono, at SAMPLE_RATE.
    RequestError, possibly between pieces, if the clip cannot be read."""
    config = msgspec.json.decode(order.settings, type=AudioProcessorConfig)
    if not order.piece_s:
        yield _content(list(decode_audio(data, order.max_seconds, config.max_samples)), 0, config)
        return
    start = 0
    for piece in cut_at_quiet_places(decode_audio(data, order.max_seconds), int(order.piece_s * SAMPLE_RATE)):
        yield _content([piece], start, config)
        start += len(piece)


def _content(blocks: list[Samples], start: int, config: AudioProcessorConfig) -> MediaContent:
    num_samples = sum(map(len, blocks))
    if num_samples < config.min_samples:
        raise RequestError(
            f"the audio clip has {num_samples} samples at {SAMPLE_RATE} Hz, the model needs at least "
            f"{config.min_samples}: send a longer one"
        )
    if config.max_samples and num_samples > config.max_samples:
        raise RequestError(
            f"a piece of the audio clip lasts {num_samples / SAMPLE_RATE:.2f} s, the model takes at most "
            f"{config.max_samples / SAMPLE_RATE:g} s: cut it into shorter ones"
        )
    chunks = [np.ascontiguousarray(block, "<f4").data.cast("B") for block in blocks if len(block)]
    start_s, end_s = start / SAMPLE_RATE, (start + num_samples) / SAMPLE_RATE
    return MediaContent(config.grid(num_samples), (1, 1, num_samples, 4), [*chunks], start_s, end_s)
