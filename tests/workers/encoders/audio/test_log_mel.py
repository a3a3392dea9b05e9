"""Log-mel frames are those of transformers' feature extractors, for any length and any cuts."""

from __future__ import annotations

import json
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor

from tokenloom.ipc.errors import ConfigError
from tokenloom.ipc.spec.models.audio_config import AudioConfig
from tokenloom.tests.support.audio_oracle import random_clip
from tokenloom.workers.encoders.audio.log_mel import LogMel, normalized

CPU = torch.device("cpu")
TOLERANCE = 1e-5
NUM_BINS = 128
LENGTHS = [1, 2, 159, 160, 161, 320, 399, 400, 7999, 8000, 15_839, 15_840, 15_999, 16_000]
LONGER = [16_001, 16_160, 31_999, 32_000, 32_001, 40_123]


def voice(seed: int, count: int) -> Tensor:
    return torch.from_numpy(random_clip(seed, count))


def whisper_frames(samples: Tensor, **options: Any) -> Tensor:
    """Return the frames of whole windows of a second."""
    extractor = transformers.WhisperFeatureExtractor(feature_size=NUM_BINS, chunk_length=1)
    found = extractor(samples.numpy(), sampling_rate=16000, return_tensors="pt", **options)
    return found["input_features"][0]


def our_frames(mel: LogMel, samples: Tensor, length: int, cuts: list[int]) -> Tensor:
    pieces = [mel.logarithms(samples, length, first, last) for first, last in pairwise(cuts)]
    logarithms = torch.cat(pieces, dim=1)
    return normalized(logarithms, logarithms.max())


def random_cuts(seed: int, count: int) -> list[int]:
    rng = random.Random(seed)
    return sorted({0, count, *(rng.randrange(count) for _ in range(rng.randrange(6)))})


@pytest.mark.parametrize("count", LENGTHS)
def test_a_window_has_the_frames_of_whispers_extractor(count: int) -> None:
    samples = voice(count, count)
    expected = whisper_frames(samples)
    mel = LogMel(NUM_BINS)
    assert torch.equal(our_frames(mel, samples, 16000, [0, 100]), expected)
    for seed in range(3):
        found = our_frames(mel, samples, 16000, random_cuts(seed, 100))
        torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("count", LENGTHS[-1:] + LONGER)
def test_several_windows_have_the_frames_of_voxtrals_processor(count: int) -> None:
    samples = voice(count, count)
    padding = {"padding": True, "truncation": False, "pad_to_multiple_of": 16000}  # of seconds in place of half minutes
    expected = whisper_frames(samples, **padding)
    num_frames = expected.shape[1]
    assert num_frames == 100 * -(-count // 16000)
    for seed in range(3):
        found = our_frames(LogMel(NUM_BINS), samples, 160 * num_frames, random_cuts(seed, num_frames))
        torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("count", LENGTHS + LONGER)
def test_frames_are_those_of_qwen3s_extractor(count: int) -> None:
    samples = voice(count, count)
    extractor = transformers.Qwen3ASRFeatureExtractor()
    theirs = extractor(samples.numpy(), sampling_rate=16000, padding=True, return_attention_mask=True)
    num_frames = int(theirs["attention_mask"].sum())
    expected, length = theirs["input_features"][0], max(count, 8000)
    assert num_frames == length // 160
    assert not expected[:, num_frames:].any()
    for seed in range(3):
        found = our_frames(LogMel(NUM_BINS), samples, length, random_cuts(seed, num_frames))
        torch.testing.assert_close(found, expected[:, :num_frames], rtol=0, atol=TOLERANCE)


def test_silence_has_the_frames_of_whispers_extractor() -> None:
    samples = torch.zeros(16000)
    assert torch.equal(our_frames(LogMel(NUM_BINS), samples, 16000, [0, 37, 100]), whisper_frames(samples))


def audio(**fields: Any) -> AudioConfig:
    base = {"family": "voxtral", "audio_token_id": 1, "hidden_size": 8, "num_layers": 1, "num_mel_bins": 80}
    return AudioConfig(**{**base, "window_frames": 3000, "window_rows": 1500, **fields})


def write(folder: Path, name: str, content: dict[str, Any]) -> Path:
    (folder / name).write_text(json.dumps(content))
    return folder


def test_settings_are_read_from_either_file(tmp_path: Path) -> None:
    whisper = transformers.WhisperFeatureExtractor().to_dict()
    LogMel.load(write(tmp_path, "preprocessor_config.json", whisper), audio(), CPU)
    wide = transformers.WhisperFeatureExtractor(n_fft=512).to_dict()
    write(tmp_path, "processor_config.json", {"processor_class": "VoxtralProcessor", "feature_extractor": wide})
    mel, samples = LogMel.load(tmp_path, audio(), CPU), voice(1, 480_000)
    expected = transformers.WhisperFeatureExtractor(n_fft=512)(samples.numpy(), sampling_rate=16000)
    found = our_frames(mel, samples, 480_000, [0, 3000])
    np.testing.assert_allclose(found.numpy(), expected["input_features"][0], rtol=0, atol=TOLERANCE)


QWEN3 = {"family": "qwen3_asr", "num_mel_bins": 128, "window_frames": 100, "window_rows": 13, "min_samples": 8000}


@pytest.mark.parametrize(
    ("options", "fields", "message"),
    [
        ({"dither": 0.1}, {}, r"dither is 0\.1, only 0\.0"),
        ({"hop_length": 128}, {}, "hop_length is 128, only 160"),
        ({"sampling_rate": 8000}, {}, "sampling_rate is 8000, only 16000"),
        ({"feature_size": 128}, {}, "feature_size is 128, only 80"),
        ({}, {"num_mel_bins": 128}, "feature_size is 80, only 128"),
        ({"chunk_length": 20}, {}, "chunk_length is 20, only 30"),
        ({"padding_value": 1.0}, {}, r"padding_value is 1\.0, only 0\.0"),
        ({"n_fft": 401}, {}, "n_fft is 401, only even numbers"),
        ({"n_fft": "wide"}, {}, "n_fft is wide, only even numbers"),
        ({"feature_extractor_type": "ClapFeatureExtractor"}, {}, "ClapFeatureExtractor is none of Whisper"),
        ({"feature_extractor_type": "Qwen3ASRFeatureExtractor", "n_window": 40}, QWEN3, "n_window is 40, only 50"),
        ({"feature_extractor_type": "Qwen3ASRFeatureExtractor", "min_length": 0}, QWEN3, "min_length is 0, only 8000"),
    ],
)
def test_frames_that_cannot_be_computed_are_refused_by_name(
    options: dict[str, Any], fields: dict[str, Any], message: str, tmp_path: Path
) -> None:
    write(tmp_path, "preprocessor_config.json", options)
    with pytest.raises(ConfigError, match=message):
        LogMel.load(tmp_path, audio(**fields), CPU)


def test_a_checkpoint_without_settings_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="which says how samples become log-mel frames"):
        LogMel.load(tmp_path, audio(), CPU)
