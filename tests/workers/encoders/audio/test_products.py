"""Multiplications of encoders' stages, by which the core cuts them, are those that torch counts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

from tokenloom.ipc.spec.models.audio_config import AudioConfig
from tokenloom.ipc.spec.models.audio_families import AUDIO_FAMILIES
from tokenloom.ipc.spec.models.config_file import ConfigFile
from tokenloom.tests.support.today import some

NUM_WINDOWS = 8


def audio_of(architecture: str, tower: dict[str, Any]) -> AudioConfig:
    file: Any = ConfigFile(None, {"audio_token_id": 5, "audio_config": tower})  # type: ignore[arg-type]
    config = AUDIO_FAMILIES[f"{architecture}ForConditionalGeneration"].encoder(file)
    assert isinstance(config, AudioConfig)
    return config


def flops_of(model: Any, **inputs: Any) -> dict[str, int]:
    """Multiplications of a forward pass by module."""
    counter = FlopCounterMode(display=False, depth=None)
    with counter, torch.inference_mode():
        model(**inputs)
    name = type(model).__name__
    return {key.removeprefix(f"{name}."): sum(ops.values()) // 2 for key, ops in counter.flop_counts.items()}


@pytest.mark.parametrize("fields", some([{}, {"num_mel_bins": 80, "downsample_hidden_size": 96, "d_model": 256}], 1))
def test_the_convolutions_of_qwen3_asr_are_its_largest_stage(fields: dict[str, int]) -> None:
    tower = {"encoder_layers": 1, **fields}
    config, model = (
        audio_of("Qwen3ASR", tower),
        transformers.Qwen3ASREncoder(transformers.Qwen3ASREncoderConfig(**tower)),
    )
    frames = 100 * NUM_WINDOWS
    inputs = {"input_features": torch.zeros(1, config.num_mel_bins, frames)}
    counts = flops_of(model.eval(), **inputs, input_features_mask=torch.ones(1, frames, dtype=torch.int64))
    convolved = sum(counts[name] for name in ("conv2d1", "conv2d2", "conv2d3", "conv_out"))
    num_rows = NUM_WINDOWS * config.window_rows
    assert config.num_products(num_rows) == pytest.approx(convolved, rel=0.05)
    assert counts["layers.0"] < convolved


def test_layers_are_the_largest_stage_of_whispers_encoders() -> None:
    tower = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 256}
    config, theirs = audio_of("Voxtral", tower), transformers.VoxtralEncoderConfig(**tower)
    model: Any = transformers.VoxtralEncoder._from_config(theirs, attn_implementation="eager")
    counts = flops_of(model.eval(), input_features=torch.zeros(1, config.num_mel_bins, config.window_frames))
    assert config.num_products(config.window_rows) == pytest.approx(counts["layers.0"], rel=0.01)
    assert counts["conv1"] + counts["conv2"] < counts["layers.0"]
