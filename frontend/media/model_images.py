"""ModelImages: how a model's images are prepared, and where they stand in its prompts."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from ...ipc.config.engine_spec import EngineSpec
from ...ipc.errors import ConfigError
from ..text.tokenizer import Tokenizer
from .images.image_processor_config import ImageProcessorConfig, load_image_processor
from .placeholders import Placeholders


class ModelImages(NamedTuple):
    """Image processor and placeholders of one model."""

    config: ImageProcessorConfig
    placeholders: Placeholders

    @classmethod
    def load(cls, spec: EngineSpec, tokenizer: Tokenizer | None) -> ModelImages | None:
        """Load both; None if the model sees no images. ConfigError if its files do not fit each other."""
        vision = spec.model.vision
        if vision is None:
            return None
        if tokenizer is None:
            raise ConfigError("images stand in prompts as tokens: start with --tokenizer, or --language-model-only")
        config = load_image_processor(Path(spec.model_folder), vision, spec.config.mm_processor_kwargs)
        return cls(config, Placeholders.load(config, vision, tokenizer))

    def prepare(self, text: str) -> str:
        """Return a prompt as it is to be tokenized."""
        return self.placeholders.before_tokenization(text)
