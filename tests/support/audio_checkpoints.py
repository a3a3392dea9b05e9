"""Writes tiny random-weight checkpoints of models that hear audio, with tokenizer, chat template and preprocessor.

    from tokenloom.tests.support.audio_checkpoints import audio_checkpoint
    folder = audio_checkpoint(tmp_path, "qwen2_audio")

`audio_oracle.py` generates with them by transformers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from .audio_configs import AUDIO_MODELS
from .media_checkpoints import write_media_checkpoint


def audio_checkpoint(
    folder: Path, name: str, dtype: torch.dtype = torch.float32, seed: int = 0, **text_fields: Any
) -> Path:
    """Write a checkpoint of a model of AUDIO_MODELS and return its folder. `text_fields` replace fields of the
    language model."""
    model = AUDIO_MODELS[name]
    return write_media_checkpoint(folder, model, model.audio, dtype, seed, **text_fields)
