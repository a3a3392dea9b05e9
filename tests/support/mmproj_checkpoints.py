"""Tiny checkpoints that take media, beside the GGUF files that llama.cpp's converters would make of them.

    from tokenloom.tests.support.mmproj_checkpoints import MMPROJ_MODELS, write_files
    files = write_files(tmp_path, "gemma3")

Some settings have no key in a file. Here they are as the published checkpoints of their families have them.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from .audio_checkpoints import audio_checkpoint
from .mmproj_conversions import convert_media
from .vision_checkpoints import write_vision_checkpoint
from .vision_configs import VISION_MODELS, Config, VisionModel

HEARING = ("voxtral", "qwen2_audio")
MMPROJ_MODELS = (*VISION_MODELS, *HEARING)
QWEN2_PIXELS = {"min_pixels": 56 * 56, "max_pixels": 28 * 28 * 16384}
GEMMA3_TEXT: Config = {
    "sliding_window_pattern": 6,
    "num_hidden_layers": 7,
    "rope_local_base_freq": 10000.0,
    "query_pre_attn_scalar": 24,
}


class MediaFiles(NamedTuple):
    """A checkpoint, and the GGUF files of its language model and its encoder, alone in their folder."""

    checkpoint: Path
    model: Path
    mmproj: Path


def write_files(folder: Path, name: str, form: str = "F32", seed: int = 0, **text_fields: Any) -> MediaFiles:
    """Write the checkpoint of one of MMPROJ_MODELS and its GGUF files with the encoder in `form`. `text_fields` replace
    those of the language model."""
    checkpoint = folder / "checkpoint"
    if name in HEARING:
        audio_checkpoint(checkpoint, name, seed=seed, **text_fields)
    else:
        fields = (GEMMA3_TEXT if name == "gemma3" else {}) | text_fields
        write_vision_checkpoint(checkpoint, as_published(name), seed=seed, **fields)
    made = folder / "gguf"
    made.mkdir()
    files = MediaFiles(checkpoint, made / "model-F32.gguf", made / f"mmproj-{form}.gguf")
    convert_media(checkpoint, files.model, files.mmproj, form)
    return files


def as_published(name: str) -> VisionModel:
    """Return the model with those settings of the published checkpoints that have no key in a file."""
    model = VISION_MODELS[name]
    config, tower, preprocessor = model.config, model.config["vision_config"], model.preprocessor
    match name:
        case "pixtral" | "mistral3":
            tower = {**tower, "rope_theta": 10000.0}
            preprocessor = {**preprocessor, "size": {"longest_edge": tower["image_size"]}}
        case "qwen2_vl" | "qwen2_5_vl":
            preprocessor = {**preprocessor, **QWEN2_PIXELS}
        case "qwen3_vl":
            preprocessor = {**preprocessor, "size": {"shortest_edge": 256**2, "longest_edge": 4096**2}}
    return replace(model, config={**config, "vision_config": tower}, preprocessor=preprocessor)
