"""Functions on the media of a prompt: spans of its tokens that do not overlap, sorted by their starts.

The content of a block depends on the media whose spans overlap it, and on its position in these spans. Knows no entries
of the encoder cache and no blocks.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from operator import attrgetter

from ..ipc.messages.media import MediaSpan

_start = attrgetter("start")


def end_of(span: MediaSpan) -> int:
    """Return the index after the last token of a span."""
    return span.start + span.length


def first_after(media: Sequence[MediaSpan], num_tokens: int) -> int:
    """Return the index of the first span with a token that is not among the first `num_tokens`."""
    return bisect_right(media, num_tokens, key=end_of)


def touching(media: Sequence[MediaSpan], start: int, end: int) -> Sequence[MediaSpan]:
    """Return the spans with tokens in [start, end)."""
    return media[first_after(media, start) : bisect_left(media, end, key=_start)]


def key_extra(media: Sequence[MediaSpan], start: int, end: int) -> bytes:
    """Return the part of the key of the block with tokens [start, end) that names its media: for each, its digest and
    the offset of the block's start in its span (0 if the span starts later), u32 little-endian."""
    spans = touching(media, start, end)
    return b"".join(span.digest + max(start - span.start, 0).to_bytes(4, "little") for span in spans)


def event_extra(media: Sequence[MediaSpan], start: int, end: int) -> tuple[tuple[str, int], ...]:
    """Return the names of the media in the block with tokens [start, end) for a KV event, in the form of vLLM: each
    with the start of its span relative to that of the block."""
    return tuple((span.digest.hex(), span.start - start) for span in touching(media, start, end))
