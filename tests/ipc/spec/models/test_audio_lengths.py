"""An audio has as many windows and embeddings as transformers' processors give it."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenloom.ipc.spec.models.audio_config import SAMPLE_RATE, AudioConfig, AudioFamily
from tokenloom.ipc.spec.models.model_file import load_model_config

CONFIGS: dict[AudioFamily, tuple[str, Any]] = {
    "qwen2_audio": ("Qwen2Audio", transformers.Qwen2AudioConfig),
    "voxtral": ("Voxtral", transformers.VoxtralConfig),
    "qwen3_asr": ("Qwen3ASR", transformers.Qwen3ASRConfig),
}
TOKEN = "<audio>"


@cache
def config_of(family: AudioFamily) -> AudioConfig:
    """Return the config of the family's published sizes."""
    name, kind = CONFIGS[family]
    fields = kind(audio_token_id=24).to_dict() | {"architectures": [f"{name}ForConditionalGeneration"]}
    with TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(fields | {"dtype": "float32"}))
        found = load_model_config(Path(folder)).audio
    assert found is not None
    return found


@cache
def extractor_of(family: AudioFamily) -> Any:
    """Return transformers' feature extractor; of few filters, since they change no number."""
    kind = transformers.Qwen3ASRFeatureExtractor if family == "qwen3_asr" else transformers.WhisperFeatureExtractor
    return kind(feature_size=8)


def expected_embeds(family: AudioFamily, samples: int) -> int:
    """Return the placeholders of transformers' processor for silence of so many samples."""
    audio, extractor = np.zeros(samples, np.float32), extractor_of(family)
    if family == "voxtral":  # its processor repeats no placeholder; its model makes the embeddings
        kwargs = {key: each for key, each in transformers.VoxtralProcessor.audio_kwargs.items() if key[0] != "m"}
        frames = extractor(audio, **kwargs)["input_features"].shape[-1]
        tower, stride = transformers.VoxtralConfig().audio_config, 2  # of the second convolution
        return int(frames // stride * tower.hidden_size // tower.intermediate_size)
    state: Any = SimpleNamespace(feature_extractor=extractor, audio_token=TOKEN)
    if family == "qwen2_audio":
        extractor.fetch_audio = lambda audio: audio
        kind: Any = transformers.Qwen2AudioProcessor
    else:
        kind = transformers.Qwen3ASRProcessor
        state._get_audio_token_length = lambda *each: kind._get_audio_token_length(state, *each)
    state.replace_audio_token = lambda *each, **more: kind.replace_audio_token(state, *each, **more)
    kwargs = {**getattr(kind, "audio_kwargs", {}), "sampling_rate": SAMPLE_RATE, "return_tensors": "pt"}
    _, (replacement,) = kind._process_audio(state, [audio], **kwargs)
    return int(replacement.count(TOKEN))


LENGTHS = st.one_of(
    st.integers(1, 3 * SAMPLE_RATE),
    st.builds(lambda count, off: max(1, 160 * count + off), st.integers(0, 400), st.integers(-2, 2)),
    st.builds(lambda count, off: SAMPLE_RATE * count + off, st.integers(1, 30), st.integers(-1, 0)),
)


@pytest.mark.parametrize("family", CONFIGS)
@settings(max_examples=25, deadline=None)
@given(samples=LENGTHS)
def test_embeddings_are_as_many_as_transformers_placeholders(family: AudioFamily, samples: int) -> None:
    assert max(config_of(family).num_embeds(samples), 0) == expected_embeds(family, samples)


@pytest.mark.parametrize("family", ["voxtral", "qwen3_asr"])
@pytest.mark.parametrize("samples", [480_001, 960_000, 960_001])
def test_long_audio_has_as_many_embeddings_as_transformers_placeholders(family: AudioFamily, samples: int) -> None:
    assert config_of(family).num_embeds(samples) == expected_embeds(family, samples)


@pytest.mark.parametrize("family", CONFIGS)
def test_the_shortest_audio_has_an_embedding_and_a_shorter_one_none(family: AudioFamily) -> None:
    config = config_of(family)
    assert config.num_embeds(321 if family == "qwen2_audio" else 1) >= 1
    assert family != "qwen2_audio" or config.num_embeds(320) < 1


@pytest.mark.parametrize("family", CONFIGS)
def test_embeddings_cover_the_rows_but_for_an_odd_last_one(family: AudioFamily) -> None:
    config = config_of(family)
    for samples in (1, 160, 161, 320, 321, 480, 481, 640, 641, 16_000, 123_457, 479_999):
        missing = config.rows_of(samples) - config.num_rows(config.num_embeds(samples))
        assert missing in ((0, 1) if family == "qwen2_audio" else (0,))
    assert config.num_keys(10**6) == (104 if family == "qwen3_asr" else 1500)
    assert config.max_windows == (family == "qwen2_audio")


def test_windows_are_those_of_the_padded_audio() -> None:
    voxtral, qwen3 = config_of("voxtral"), config_of("qwen3_asr")
    assert [voxtral.num_windows(each) for each in (1, 480_000, 480_001, 960_001)] == [1, 1, 2, 3]
    assert [qwen3.num_windows(each) for each in (1, 8000, 16_000, 16_001, 32_001)] == [1, 1, 1, 2, 3]
