"""Configurations of models that hear audio are read as transformers reads them, with its defaults."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from tokenloom.ipc.errors import ConfigError
from tokenloom.ipc.models.model_config import ModelConfig
from tokenloom.ipc.models.model_file import load_model_config

CONFIGS: dict[str, Any] = {
    "Qwen2Audio": transformers.Qwen2AudioConfig,
    "Voxtral": transformers.VoxtralConfig,
    "Qwen3ASR": transformers.Qwen3ASRConfig,
}
TEXT = {"num_hidden_layers": 3, "intermediate_size": 512}
TOWER = {
    "d_model": 64,
    "encoder_layers": 2,
    "encoder_ffn_dim": 256,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 256,
    "num_mel_bins": 80,
}
OF_TOWER = {  # names of the fields of each encoder
    "Qwen2Audio": ("d_model", "encoder_layers", "encoder_ffn_dim", "num_mel_bins"),
    "Voxtral": ("hidden_size", "num_hidden_layers", "intermediate_size", "num_mel_bins"),
    "Qwen3ASR": ("d_model", "encoder_layers", "encoder_ffn_dim", "num_mel_bins"),
}
FILES: dict[str, dict[str, Any]] = {
    "nothing but defaults": {},
    "empty objects": {"text_config": {}, "audio_config": {}},
    "some fields": {"text_config": TEXT, "audio_config": TOWER},
    "no ties": {"text_config": TEXT, "tie_word_embeddings": False},
    "rope": {"text_config": {**TEXT, "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}}},
}


def fields_of(name: str, file: str) -> dict[str, Any]:
    fields = {"audio_token_id": 7, **FILES[file]} if name == "Voxtral" else dict(FILES[file])
    tower = fields.get("audio_config")
    if tower:
        fields["audio_config"] = {field: tower[field] for field in OF_TOWER[name]}
    return fields


def read(folder: Path, name: str, fields: dict[str, Any], **options: Any) -> ModelConfig:
    raw = {"architectures": [f"{name}ForConditionalGeneration"], "model_type": CONFIGS[name].model_type, **fields}
    (folder / "config.json").write_text(json.dumps(raw))
    return load_model_config(folder, **options)


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("name", CONFIGS)
def test_the_model_has_the_shape_of_transformers(name: str, file: str, tmp_path: Path) -> None:
    fields = fields_of(name, file)
    ours, theirs = read(tmp_path, name, fields), CONFIGS[name](**fields)
    text = theirs.text_config
    sizes = (ours.vocab_size, ours.hidden_size, ours.intermediate_size, ours.num_layers)
    assert sizes == (text.vocab_size, text.hidden_size, text.intermediate_size, text.num_hidden_layers)
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    assert (ours.num_heads, ours.num_kv_heads, ours.head_dim) == (
        text.num_attention_heads,
        text.num_key_value_heads,
        head_dim,
    )
    assert ours.max_position_embeddings == text.max_position_embeddings
    assert ours.norm.eps == text.rms_norm_eps
    assert ours.ropes[0].theta == text.rope_parameters["rope_theta"]
    is_tied = name == "Qwen3ASR" and theirs.tie_word_embeddings  # the classes of the others tie nothing
    assert ours.tie_word_embeddings == is_tied
    assert all(layer.window is None for layer in ours.layers)
    assert ours.vision is None

    eos = transformers.GenerationConfig.from_model_config(theirs).eos_token_id  # without a generation_config.json
    assert ours.eos_token_ids == ([] if eos is None else sorted(eos if isinstance(eos, list) else [eos]))
    audio, tower = ours.audio, theirs.audio_config
    assert audio is not None and audio.audio_token_id == theirs.audio_token_id
    sizes = (audio.hidden_size, audio.num_layers, audio.num_mel_bins)
    assert sizes == (tower.hidden_size, tower.num_hidden_layers, tower.num_mel_bins)
    if name == "Qwen3ASR":
        assert (audio.window_frames, audio.window_rows) == (2 * tower.n_window, tower.max_position_embeddings)
        assert audio.windows_together * audio.window_frames == tower.n_window_infer
    else:
        assert audio.window_frames == 2 * audio.window_rows == 2 * tower.max_source_positions
        assert audio.rows_per_embed == (2 if name == "Qwen2Audio" else tower.intermediate_size // tower.hidden_size)
    assert len(audio.stages) == audio.num_layers + 3


def test_the_language_model_can_be_read_alone(tmp_path: Path) -> None:
    assert read(tmp_path, "Qwen2Audio", {}, with_encoder=False).encoder is None


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("Voxtral", {}, "audio_token_id must be a positive integer, it is None"),
        (
            "Voxtral",
            {"audio_token_id": 5, "audio_config": {"intermediate_size": 5000}},
            "must be a multiple of its hidden",
        ),
        ("Qwen3ASR", {"audio_config": {"n_window": 40}}, "n_window of audio_config must be 50, it is 40"),
        ("Qwen3ASR", {"audio_config": {"n_window_infer": 250}}, "n_window_infer 250 .* must be a multiple of"),
        ("Qwen2Audio", {"audio_config": 3}, "audio_config must be an object, it is 3"),
        ("Qwen2Audio", {"audio_config": {"num_mel_bins": 0}}, "num_mel_bins must be a positive integer"),
    ],
)
def test_invalid_fields_are_refused_in_one_line(
    name: str, fields: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, name, fields)
