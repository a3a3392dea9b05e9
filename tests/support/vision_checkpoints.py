"""Writes tiny random-weight checkpoints of vision-language models, with tokenizer, chat template and preprocessor.

    from tokenloom.tests.support.vision_checkpoints import vision_checkpoint
    folder = vision_checkpoint(tmp_path, "qwen2_5_vl")

`vision_oracle.py` generates with them by transformers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from .media_checkpoints import write_media_checkpoint, write_media_tokenizer
from .vision_configs import VISION_MODELS, VisionModel


def vision_checkpoint(
    folder: Path, name: str, dtype: torch.dtype = torch.float32, seed: int = 0, **text_fields: Any
) -> Path:
    """Write a checkpoint of a model of VISION_MODELS and return its folder. `text_fields` replace fields of the
    language model."""
    return write_vision_checkpoint(folder, VISION_MODELS[name], dtype, seed, **text_fields)


def write_vision_checkpoint(
    folder: Path, model: VisionModel, dtype: torch.dtype = torch.float32, seed: int = 0, **text_fields: Any
) -> Path:
    """Write the checkpoint that `model` describes and return its folder."""
    return write_media_checkpoint(folder, model, model.image, dtype, seed, **text_fields)


def write_tokenizer(folder: Path, model: VisionModel) -> Any:
    """Write the demo's tokenizer with the model's marker tokens and a chat template; return it."""
    return write_media_tokenizer(folder, model, model.image)
