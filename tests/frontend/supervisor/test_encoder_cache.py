"""resolve sizes the encoder cache, and a step, by the largest medium of the model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tokenloom.frontend.supervisor.resolve import resolve
from tokenloom.ipc.addresses import RunDirectory
from tokenloom.ipc.config.engine_config import EngineConfig
from tokenloom.ipc.config.engine_spec import EngineSpec
from tokenloom.ipc.errors import ConfigError
from tokenloom.tests.support.vision_checkpoints import vision_checkpoint


def spec_of(folder: Path, **options: object) -> EngineSpec:
    config = EngineConfig(model=str(folder), device="cpu", **options)  # type: ignore[arg-type]
    return resolve(config, RunDirectory(folder))


def test_the_cache_holds_two_of_the_largest_images_or_those_of_a_step(tmp_path: Path) -> None:
    folder = vision_checkpoint(tmp_path, "gemma3")
    spec = spec_of(folder, max_num_seqs=4, max_num_batched_tokens=4)
    largest = spec.max_item_embeds
    assert 4 < largest <= spec.max_model_len
    assert spec.max_num_batched_tokens == largest + 4, "an image of Gemma 3 is computed in one step"
    assert spec.encoder_cache_tokens == 2 * largest
    assert spec_of(folder, max_num_batched_tokens=4096).encoder_cache_tokens == 4096
    assert spec_of(folder, encoder_cache_tokens=largest).encoder_cache_tokens == largest
    with pytest.raises(ConfigError, match=f"{largest - 1} is below the {largest} embeddings of the largest image"):
        spec_of(folder, encoder_cache_tokens=largest - 1)
    text = spec_of(folder, language_model_only=True, max_num_seqs=4, max_num_batched_tokens=4)
    assert (text.encoder_cache_tokens, text.max_num_batched_tokens) == (0, 4)


def test_an_image_longer_than_any_prompt_takes_no_memory(tmp_path: Path) -> None:
    folder = vision_checkpoint(tmp_path, "qwen2_5_vl")
    whole, short = spec_of(folder, max_num_batched_tokens=256), spec_of(folder, max_model_len=16)
    assert short.max_item_embeds == 16 < whole.max_item_embeds
    assert whole.max_num_batched_tokens == 256, "its images span steps"


VOXTRAL = """{
  "architectures": ["VoxtralForConditionalGeneration"], "audio_token_id": 24, "dtype": "float32",
  "audio_config": {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 128, "num_mel_bins": 20},
  "text_config": {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
    "intermediate_size": 64, "vocab_size": 100, "max_position_embeddings": 4096
  }
}"""


def voxtral(folder: Path, **extractor: object) -> Path:
    """Write the files beside the weights of a model that hears audio."""
    (folder / "config.json").write_text(VOXTRAL)
    (folder / "preprocessor_config.json").write_text(json.dumps({"feature_size": 20, **extractor}))
    return folder


def test_the_cache_holds_two_of_the_longest_clips(tmp_path: Path) -> None:
    folder = voxtral(tmp_path)
    options = {"load_format": "dummy", "max_num_batched_tokens": 256}
    spec = spec_of(folder, max_audio_s=60.0, **options)
    assert (spec.max_item_embeds, spec.encoder_cache_tokens) == (3 * 375, 6 * 375), "60 s may round up to a sample more"
    assert spec_of(folder, max_audio_s=59.0, **options).max_item_embeds == 2 * 375
    assert spec_of(folder, **options).max_item_embeds == 4096, "no clip is longer than a prompt"
    with pytest.raises(
        ConfigError, match="749 is below the 750 embeddings of the longest audio clip: raise it, or lower"
    ):
        spec_of(folder, max_audio_s=59.0, encoder_cache_tokens=749, **options)


@pytest.mark.parametrize("off", [{"language_model_only": True}, {"limit_mm_per_prompt": {"audio": 0}}])
def test_a_model_without_its_ears_has_no_cache(tmp_path: Path, off: dict[str, object]) -> None:
    spec = spec_of(voxtral(tmp_path), load_format="dummy", **off)
    assert spec.model.audio is None and spec.encoder_cache_tokens == spec.max_item_embeds == 0
    both = spec_of(voxtral(tmp_path), load_format="dummy", limit_mm_per_prompt={"image": 0})
    assert both.model.audio is not None


def test_an_extractor_that_does_not_fit_ends_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has sampling_rate 8000, only 16000 is served"):
        spec_of(voxtral(tmp_path, sampling_rate=8000), load_format="dummy")
