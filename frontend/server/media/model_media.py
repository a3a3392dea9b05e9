"""ModelMedia: the processor of a model's media, and the tokens that stand for media in its prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ....ipc.errors import ConfigError, RequestError
from ....ipc.messages.media import MediaSpan
from ....ipc.spec.config.engine_spec import EngineSpec
from ....ipc.spec.processors.processor import Processor, load_processor
from ..text.chat_template import NO_MEDIA
from ..text.media_marker import MediaMarker
from ..text.tokenizer import Tokenizer
from .placeholders import Item, Placeholders


class ModelMedia(NamedTuple):
    """Processor and placeholders of one model."""

    processor: Processor
    placeholders: Placeholders | ClipHead

    @classmethod
    def load(cls, spec: EngineSpec, tokenizer: Tokenizer | None) -> ModelMedia | None:
        """Load processor and placeholders; None if the model takes only text. ConfigError if the model's files do not
        fit each other."""
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


@dataclass(frozen=True)
class ClipHead:
    """The tokens of an audio clip before a prompt, for a model with cross attention to the clip. The prompt has no
    marker for it. `num_tokens`: tokens of a clip, which fill whole KV blocks; each is `filler_id`."""

    processor: Processor
    filler_id: int
    num_tokens: int
    marker: MediaMarker = NO_MEDIA

    def before_tokenization(self, text: str) -> str:
        return text

    def expand(self, token_ids: Sequence[int], items: Sequence[Item]) -> tuple[list[int], list[MediaSpan]]:
        """Return the prompt after the tokens of its clip, and the span of these tokens. RequestError unless there is
        one clip."""
        if len(items) != 1:
            raise RequestError(f"the prompt has {len(items)} audio clips, this model answers to one: give one")
        (item,) = items
        span = MediaSpan(
            kind="audio",
            digest=item.digest,
            start=0,
            length=self.num_tokens,
            num_embeds=self.processor.num_embeds(item.grid),
            grid=item.grid,
        )
        return [self.filler_id] * self.num_tokens + list(token_ids), [span]
