"""ModelMedia: how a model's media are prepared, and where they stand in its prompts."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from ....ipc.errors import ConfigError
from ....ipc.spec.config.engine_spec import EngineSpec
from ....ipc.spec.processors.processor import Processor, load_processor
from ..text.tokenizer import Tokenizer
from .clip_head import ClipHead
from .placeholders import Placeholders


class ModelMedia(NamedTuple):
    """Processor and placeholders of one model."""

    processor: Processor
    placeholders: Placeholders | ClipHead

    @classmethod
    def load(cls, spec: EngineSpec, tokenizer: Tokenizer | None) -> ModelMedia | None:
        """Load both; None if the model takes text alone. ConfigError if its files do not fit each other."""
        encoder = spec.model.encoder
        if encoder is None:
            return None
        if tokenizer is None:
            raise ConfigError("media stand in prompts as tokens: start with --tokenizer, or --language-model-only")
        processor = load_processor(Path(spec.model_folder), encoder, spec.config)
        if spec.model.cross is not None:
            return cls(processor, ClipHead(processor, encoder.placeholder_id, spec.model.num_clip_tokens))
        return cls(processor, Placeholders.load(processor, encoder, tokenizer))

    def prepare(self, text: str) -> str:
        """Return a prompt as it is to be tokenized."""
        return self.placeholders.before_tokenization(text)
