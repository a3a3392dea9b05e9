"""Processor: the settings by which media for a model are prepared, read from its checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import TypeAlias

from ..config.engine_config import EngineConfig
from ..models.model_config import Encoder
from ..models.vision_config import VisionConfig
from .audio_processor_config import AudioProcessorConfig, load_audio_processor
from .image_processor_config import ImageProcessorConfig, load_image_processor

Processor: TypeAlias = ImageProcessorConfig | AudioProcessorConfig


def load_processor(folder: Path, encoder: Encoder, config: EngineConfig) -> Processor:
    """Read the processor of a checkpoint; ConfigError if it is not served, or does not match its encoder."""
    if isinstance(encoder, VisionConfig):
        return load_image_processor(folder, encoder, config.mm_processor_kwargs)
    return load_audio_processor(folder, encoder, config.max_audio_s, config.mm_processor_kwargs)
