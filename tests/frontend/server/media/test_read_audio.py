"""A clip becomes one media file, or one for each of its pieces, with samples as they were decoded."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from tokenloom.frontend.server.media.media_content import MediaContent
from tokenloom.frontend.server.media.read_audio import read_audio
from tokenloom.ipc.errors import RequestError
from tokenloom.ipc.messages.media_process import ReadAudio
from tokenloom.ipc.spec.models.audio_config import AudioFamily
from tokenloom.ipc.spec.processors.audio_processor_config import AudioProcessorConfig
from tokenloom.tests.frontend.server.media.audio.encoders import ENCODERS
from tokenloom.tests.frontend.server.media.audio.sound_files import stored

RNG = np.random.default_rng(2)


def read(family: AudioFamily, samples: Any, piece_s: float = 0.0) -> list[MediaContent]:
    config = AudioProcessorConfig(encoder=ENCODERS[family], max_audio_s=600.0)
    order = ReadAudio(source=b"", settings=msgspec.json.encode(config), max_seconds=600.0, piece_s=piece_s)
    return list(read_audio(memoryview(stored(samples, 16_000, "WAV", "FLOAT")), order))


def samples_of(content: MediaContent) -> Any:
    assert content.shape == (1, 1, content.grid[2], 4)
    return np.frombuffer(b"".join(content.chunks), "<f4")


@pytest.mark.parametrize(
    ("family", "num_samples", "num_windows"),
    [
        ("qwen2_audio", 321, 1),
        ("qwen2_audio", 480_000, 1),
        ("voxtral", 1, 1),
        ("voxtral", 480_001, 2),
        ("qwen3_asr", 1, 1),
        ("qwen3_asr", 40_000, 3),
    ],
)
def test_a_clip_is_one_file_without_padding(family: AudioFamily, num_samples: int, num_windows: int) -> None:
    samples = RNG.uniform(-1, 1, num_samples).astype(np.float32)
    (content,) = read(family, samples)
    assert content.grid == (num_windows, 1, num_samples)
    np.testing.assert_array_equal(samples_of(content), samples)


def test_clips_that_a_model_cannot_take_are_refused() -> None:
    with pytest.raises(RequestError, match="has 320 samples at 16000 Hz, the model needs at least 321: send a longer"):
        read("qwen2_audio", np.zeros(320, np.float32))
    with pytest.raises(RequestError, match=r"lasts 30.00 s or longer, the model takes at most 30 s: send a shorter"):
        read("qwen2_audio", np.zeros(480_001, np.float32))
    with pytest.raises(RequestError, match=r"a piece of the audio clip lasts 39.95 s, the model takes at most 30 s"):
        read("qwen2_audio", np.zeros(50 * 16_000, np.float32), piece_s=40)


def test_pieces_have_their_places_in_the_clip() -> None:
    samples = RNG.uniform(-1, 1, 70 * 16_000).astype(np.float32)
    samples[27 * 16_000 :][:3200] = 0
    pieces = read("qwen2_audio", samples, piece_s=30)
    assert len(pieces) == 3 and abs(pieces[0].end_s - 27.1) <= 0.06
    assert pieces[0].start_s == 0 and pieces[-1].end_s == 70
    for piece, following in zip(pieces, [*pieces[1:], None], strict=True):
        assert following is None or following.start_s == piece.end_s
        assert piece.grid == (1, 1, round((piece.end_s - piece.start_s) * 16_000))
    np.testing.assert_array_equal(np.concatenate([samples_of(piece) for piece in pieces]), samples)
