"""Whisper's configuration is read as transformers reads it, with its defaults and the rules for its answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from tokenloom.ipc.errors import ConfigError
from tokenloom.ipc.spec.models.model_config import CrossConfig, ModelConfig, OutputRules
from tokenloom.ipc.spec.models.model_file import load_model_config

LARGE = """{
  "d_model": 1280, "encoder_layers": 32, "decoder_layers": 4, "num_hidden_layers": 32,
  "encoder_attention_heads": 16, "decoder_attention_heads": 20, "encoder_ffn_dim": 640,
  "decoder_ffn_dim": 5120, "num_mel_bins": 128, "vocab_size": 51866, "max_target_positions": 300,
  "max_source_positions": 750, "decoder_start_token_id": 50258
}"""  # files repeat the number of the encoder's layers as num_hidden_layers
FILES: dict[str, dict[str, Any]] = {"nothing but defaults": {}, "a large one": json.loads(LARGE)}


def read(folder: Path, generation: dict[str, Any] | None = None, **fields: Any) -> ModelConfig:
    raw = {"architectures": ["WhisperForConditionalGeneration"], "model_type": "whisper", **fields}
    (folder / "config.json").write_text(json.dumps(raw))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return load_model_config(folder)


@pytest.mark.parametrize("file", FILES)
def test_the_shape_is_that_of_transformers(file: str, tmp_path: Path) -> None:
    ours, theirs = read(tmp_path, **FILES[file]), transformers.WhisperConfig(**FILES[file])
    assert (ours.vocab_size, ours.hidden_size) == (theirs.vocab_size, theirs.d_model)
    assert (ours.num_layers, ours.intermediate_size) == (theirs.decoder_layers, theirs.decoder_ffn_dim)
    assert ours.num_heads == ours.num_kv_heads == theirs.decoder_attention_heads
    assert ours.head_dim == theirs.d_model // theirs.decoder_attention_heads
    assert ours.max_position_embeddings == ours.num_learned_positions == theirs.max_target_positions
    assert ours.cross == CrossConfig(num_rows=theirs.max_source_positions, num_tokens=theirs.max_source_positions)
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    assert ours.eos_token_ids == [theirs.eos_token_id]
    audio = ours.audio
    assert audio is not None and audio.family == "whisper" and audio.max_windows == 1
    assert (audio.hidden_size, audio.num_layers) == (theirs.d_model, theirs.encoder_layers)
    assert (audio.num_mel_bins, audio.window_rows) == (theirs.num_mel_bins, theirs.max_source_positions)
    assert audio.window_frames == 2 * theirs.max_source_positions
    assert audio.audio_token_id == theirs.decoder_start_token_id


def test_fewer_rows_than_tokens_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="max_source_positions 20 is below max_target_positions 30"):
        read(tmp_path, max_source_positions=20, max_target_positions=30)


@pytest.mark.parametrize(("block_size", "expected"), [(1, 1500), (16, 1504), (7, 1505), (1024, 2048)])
def test_a_clip_takes_whole_blocks(block_size: int, expected: int) -> None:
    assert CrossConfig(num_rows=1500, num_tokens=1500).in_blocks(block_size).num_tokens == expected


def test_rules_come_from_the_generation_config(tmp_path: Path) -> None:
    generation = {
        "eos_token_id": 50257,
        "suppress_tokens": [7, 3, 7, 60000],
        "begin_suppress_tokens": [220, 50257],
        "no_timestamps_token_id": 50363,
        "max_initial_timestamp_index": 50,
    }
    assert read(tmp_path, generation).output_rules == OutputRules(
        suppressed_ids=[3, 7],
        first_suppressed_ids=[220, 50257],
        no_timestamps_id=50363,
        max_first_timestamp=50,
        end_id=50257,
    )
    assert read(tmp_path, {"eos_token_id": 5, "suppress_tokens": None}).output_rules is None


@pytest.mark.parametrize(
    ("generation", "expected"),
    [
        ({"lang_to_id": {"<|en|>": 50259, "<|haw|>": 50352}, "is_multilingual": True}, {"en": 50259, "haw": 50352}),
        ({"is_multilingual": False, "lang_to_id": {"<|en|>": 50259}}, {}),
        ({"is_multilingual": True}, None),
        ({}, None),
    ],
)
def test_languages_come_from_the_generation_config(
    generation: dict[str, Any], expected: dict[str, int] | None, tmp_path: Path
) -> None:
    assert read(tmp_path, generation).language_ids == expected
