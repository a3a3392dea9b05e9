"""Cut a clip that is to be transcribed into pieces, as the engine does for its HTTP API: decode it, and cut it at quiet
places. Needs numpy, and libsndfile for other files than WAV."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from ....ipc.errors import RequestError
from ....ipc.messages.client import Medium
from ....ipc.spec.models.audio_config import SAMPLE_RATE
from ...forms.media.held_medium import bytes_of, to_medium
from ...sound.decode import decode_audio
from ...sound.quiet_cuts import cut_at_quiet_places


class Piece(NamedTuple):
    """A piece of a clip, and its place in it in seconds."""

    medium: Medium
    start_s: float
    end_s: float


def pieces_of(audio: object, piece_s: float) -> Iterator[Piece]:
    """Yield the pieces of a clip, of at most `piece_s` seconds each: samples with their rate, the bytes of a file, or
    a path. RequestError, also between pieces, if it cannot be read."""
    if audio is None or (isinstance(audio, str) and audio[:5].lower() in ("http:", "https", "file:")):
        raise RequestError(
            f"the audio {audio!r:.200} is not read here: give (samples, rate), bytes of a file or a path"
        )
    start, blocks = 0, decode_audio(memoryview(bytes_of(audio, "audio")), math.inf)
    for samples in cut_at_quiet_places(blocks, int(piece_s * SAMPLE_RATE)):
        end = start + len(samples)
        yield Piece(to_medium((samples, SAMPLE_RATE), "audio"), start / SAMPLE_RATE, end / SAMPLE_RATE)
        start = end
