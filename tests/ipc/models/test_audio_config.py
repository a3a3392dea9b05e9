"""An audio has as many embeddings as transformers' processors and models give it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import transformers

from tokenloom.ipc.models.audio_config import AudioConfig
from tokenloom.ipc.models.audio_families import AUDIO_FAMILIES
from tokenloom.ipc.models.config_file import ConfigFile

HALF_MINUTE = 480_000
SHORT = [1, 160, 161, 320, 321, 480, 481, 640, 641, 16_000, 123_457]


def audio_of(architecture: str, tmp_path: Any = None) -> AudioConfig:
    config = AUDIO_FAMILIES[f"{architecture}ForConditionalGeneration"].encoder(
        ConfigFile(tmp_path, {"audio_token_id": 5})
    )
    assert isinstance(config, AudioConfig)
    return config


def samples(count: int) -> Any:
    return np.random.default_rng(count).standard_normal(count).astype(np.float32)


def processor_of(kind: Any, extractor: Any, **attributes: Any) -> Any:
    """A processor without a tokenizer."""
    processor = object.__new__(kind)
    processor.__dict__.update(feature_extractor=extractor, audio_token="<audio>", **attributes)
    return processor


@pytest.mark.parametrize("count", [*SHORT, HALF_MINUTE - 1, HALF_MINUTE])
def test_qwen2_audio_has_the_embeddings_of_its_processor(count: int) -> None:
    extractor = transformers.WhisperFeatureExtractor(feature_size=128)
    processor = processor_of(transformers.Qwen2AudioProcessor, extractor)
    inputs, _ = processor._process_audio([samples(count)], sampling_rate=16000)
    config = audio_of("Qwen2Audio")
    (expected,) = inputs["num_audio_tokens"]
    assert config.num_embeds(count) == expected
    assert config.rows_of(count) == -(-int(inputs["feature_attention_mask"].sum()) // 2)
    assert config.num_windows(count) == config.max_windows == 1


@pytest.mark.parametrize("count", [1, HALF_MINUTE - 1, HALF_MINUTE, HALF_MINUTE + 1, 3 * HALF_MINUTE])
def test_voxtral_has_the_embeddings_of_its_windows(count: int) -> None:
    processor = processor_of(transformers.VoxtralProcessor, transformers.WhisperFeatureExtractor(feature_size=128))
    options = {name: value for name, value in processor.audio_kwargs.items() if name != "max_source_positions"}
    features = processor._retrieve_input_features([samples(count)], 3000, **options)
    tower = transformers.VoxtralConfig().audio_config
    config = audio_of("Voxtral")
    assert config.num_windows(count) == len(features)
    assert config.rows_of(count) == len(features) * tower.max_source_positions
    assert config.num_embeds(count) == config.rows_of(count) * tower.hidden_size // tower.intermediate_size
    assert config.max_windows == 0


@pytest.mark.parametrize("count", [*SHORT, 7999, 8000, 8001, 15_999, 16_159, 16_160, 31_999, 32_000, 32_001, 1_234_567])
def test_qwen3_asr_has_the_embeddings_of_its_processor(count: int) -> None:
    processor = processor_of(transformers.Qwen3ASRProcessor, transformers.Qwen3ASRFeatureExtractor())
    inputs, _ = processor._process_audio([samples(count)], **processor.audio_kwargs)
    config = audio_of("Qwen3ASR")
    (expected,) = inputs["num_audio_tokens"]
    assert config.num_embeds(count) == config.rows_of(count) == expected
    assert config.num_windows(count) == max(1, -(-count // 16_000))


@pytest.mark.parametrize("architecture", ["Qwen2Audio", "Voxtral", "Qwen3ASR"])
def test_embeddings_cover_the_rows_but_for_an_odd_last_one(architecture: str) -> None:
    config = audio_of(architecture)
    for count in (*SHORT, 479_999):
        missing = config.rows_of(count) - config.num_rows(config.num_embeds(count))
        assert missing in ((0, 1) if architecture == "Qwen2Audio" else (0,))
    assert config.num_keys(10**6) == {"Qwen2Audio": 1500, "Voxtral": 1500, "Qwen3ASR": 104}[architecture]
