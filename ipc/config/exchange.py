"""Checks whether a checkpoint's weights may take the place of those that are served."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from ..errors import ConfigError, RequestError
from ..models.model_config import ModelConfig, ModelImplementation
from ..models.model_file import load_model_config


def check_exchange(
    folder: Path, model: ModelConfig, hf_overrides: dict[str, Any] | None, model_impl: ModelImplementation
) -> None:
    """Raise RequestError if the checkpoint in `folder` cannot be read, or has another shape than the served `model`."""
    try:
        shape = _shape(load_model_config(folder, hf_overrides, implementation=model_impl))
    except ConfigError as error:  # the caller's mistake here, not the operator's
        raise RequestError(str(error)) from None
    if shape != _shape(model):
        raise RequestError(f"{folder} has another architecture or shape than the served model: start a new engine")


def _shape(model: ModelConfig) -> ModelConfig:
    """Return the model's config reduced to the fields that must be equal to exchange weights in place."""
    return msgspec.structs.replace(model, eos_token_ids=[], bos_token_id=None, dtype="")
