"""The feature extractor of a checkpoint is compared with its encoder and with the frames that workers make."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from tokenloom.ipc.errors import ConfigError
from tokenloom.ipc.spec.models.audio_config import AudioFamily
from tokenloom.ipc.spec.processors.audio_processor_config import AudioProcessorConfig, load_audio_processor
from tokenloom.tests.frontend.server.media.audio.encoders import ENCODERS


def extractor(family: AudioFamily, **settings: Any) -> Any:
    kind = transformers.Qwen3ASRFeatureExtractor if family == "qwen3_asr" else transformers.WhisperFeatureExtractor
    return kind(**{"feature_size": 128, **settings})


def load(folder: Path, family: AudioFamily, max_audio_s: float = 600.0, **more: Any) -> AudioProcessorConfig:
    return load_audio_processor(folder, ENCODERS[family], max_audio_s, **more)


@pytest.mark.parametrize("family", ENCODERS)
def test_extractors_that_transformers_saves_are_read(tmp_path: Path, family: AudioFamily) -> None:
    extractor(family).save_pretrained(tmp_path)
    assert load(tmp_path, family).encoder == ENCODERS[family]


@pytest.mark.parametrize("family", ENCODERS)
def test_settings_that_are_nested_go_before_others(tmp_path: Path, family: AudioFamily) -> None:
    (tmp_path / "preprocessor_config.json").write_text("{}")
    nested = {"feature_extractor": extractor(family).to_dict(), "processor_class": "Any"}
    (tmp_path / "processor_config.json").write_text(json.dumps(nested, default=str))
    assert load(tmp_path, family).encoder == ENCODERS[family]


@pytest.mark.parametrize(
    ("family", "settings", "complaint"),
    [
        ("voxtral", {"feature_size": 80}, "has feature_size 80, only 128 is served"),
        ("voxtral", {"sampling_rate": 8000}, "has sampling_rate 8000, only 16000 is served"),
        ("voxtral", {"hop_length": 80}, "has hop_length 80, only 160"),
        ("voxtral", {"n_fft": 512}, "has n_fft 512, only 400"),
        ("voxtral", {"dither": 0.1}, "has dither 0.1, only 0.0"),
        ("qwen2_audio", {"chunk_length": 20}, "has chunk_length 20, only 30"),
        ("qwen3_asr", {"n_window": 30}, "has n_window 30, only 50"),
        ("qwen3_asr", {"min_length": 0}, "has min_length 0, only 8000"),
        ("voxtral", {"feature_extractor_type": "ClapFeatureExtractor"}, "has the feature_extractor_type ClapFeature"),
    ],
)
def test_settings_that_do_not_fit_are_refused(
    tmp_path: Path, family: AudioFamily, settings: dict[str, Any], complaint: str
) -> None:
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"feature_size": 128} | settings))
    with pytest.raises(ConfigError, match=complaint):
        load(tmp_path, family)


def test_defaults_are_those_of_the_class(tmp_path: Path) -> None:
    (tmp_path / "preprocessor_config.json").write_text('{"hop_length": null}')
    load(tmp_path, "qwen3_asr")
    with pytest.raises(ConfigError, match="has feature_size 80, only 128"):
        load(tmp_path, "voxtral")


def test_a_checkpoint_without_the_file_and_an_option_that_cannot_be_set_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no feature extractor of audio: add the model's preprocessor_config"):
        load(tmp_path, "voxtral")
    extractor("voxtral").save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="--mm-processor-kwargs: truncation cannot be set for a WhisperFeature"):
        load(tmp_path, "voxtral", overrides={"truncation": False})


@pytest.mark.parametrize(
    ("family", "max_audio_s", "most"),
    [("qwen2_audio", 600.0, 750), ("voxtral", 600.0, 375 * 21), ("voxtral", 29.9, 375), ("qwen3_asr", 10.0, 130)],
)
def test_no_clip_has_more_embeddings_than_the_bound(
    tmp_path: Path, family: AudioFamily, max_audio_s: float, most: int
) -> None:
    extractor(family).save_pretrained(tmp_path)
    config = load(tmp_path, family, max_audio_s)
    assert config.max_embeds == most
    longest = min(int(max_audio_s * 16_000), config.max_samples or 1 << 40)
    for samples in (longest, longest // 2, 1):
        assert config.num_embeds(config.grid(samples)) <= most
