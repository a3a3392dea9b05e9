"""ClipHead: puts the tokens of an audio clip in front of a prompt, for a model that attends to its clip across.

The clip is no part of the text, so that a prompt has no marker for it. Its tokens fill whole KV blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ....ipc.errors import RequestError
from ....ipc.messages.media import MediaSpan
from ....ipc.spec.processors.processor import Processor
from ..text.chat_template import NO_MEDIA
from ..text.media_marker import MediaMarker
from .placeholders import Item


@dataclass(frozen=True)
class ClipHead:
    """`num_tokens`: of a clip; each is `filler_id`."""

    processor: Processor
    filler_id: int
    num_tokens: int
    marker: MediaMarker = NO_MEDIA

    def before_tokenization(self, text: str) -> str:
        return text

    def expand(self, token_ids: Sequence[int], items: Sequence[Item]) -> tuple[list[int], list[MediaSpan]]:
        """Return the prompt behind the tokens of its clip, and their span. RequestError unless there is one clip."""
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
