"""EncoderMetrics: metrics of the workers' encoder caches, from the core's Progress.

Only engines of models that take media have it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

from ....ipc.messages.media import EncoderProgress
from .registry import Counter, Gauge, Metric, Readings


class EncoderMetrics:
    """Owner of the counters and gauges of encoded media."""

    def __init__(self, increase: Callable[[Hashable, float], float]) -> None:
        """`increase(key, total)` returns how much a total of the core has grown since its last report under that
        key."""
        self._increase = increase
        self._state = EncoderProgress(capacity=0)
        self.encodes = Counter("encoder_encodes_total", "Media that steps began to encode.")
        self.failed = Counter("encoder_failed_total", "Media whose files were missing or damaged.")
        self.hits = Counter("encoder_cache_hits_total", "Spans of prompts whose medium another had encoded.")
        self.cached = Counter("encoder_cached_spans_total", "Spans of prompts that the prefix cache held whole.")
        self._gauges = [
            Gauge("encoder_cache_entries", "Media in the encoder cache.", lambda: self._state.num_entries),
            Gauge("encoder_cache_embeds", "Embeddings of the encoder cache, by state.", self._embeds),
        ]

    @property
    def metrics(self) -> list[Metric]:
        return [*self._gauges, *(each for each in vars(self).values() if isinstance(each, Counter))]

    def _embeds(self) -> Readings:
        used = self._state.num_used_embeds
        return [({"state": "used"}, used), ({"state": "free"}, self._state.capacity - used)]

    def on_progress(self, state: EncoderProgress) -> None:
        self._state = state
        totals = (
            (self.encodes, state.num_encodes),
            (self.failed, state.num_failed),
            (self.hits, state.num_hits),
            (self.cached, state.num_cached),
        )
        for counter, total in totals:
            counter.add(self._increase((counter.name,), total))
