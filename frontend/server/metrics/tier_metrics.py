"""TierMetrics: metrics of the KV tiers, from the core's Progress. Only engines with tiers have them.

The label `source` is disk, remote or peer, or `host` for the slots in this machine's memory.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

from ....ipc.codec import JsonObject
from ....ipc.messages.tier import PLACES, SourceState, TiersProgress
from .registry import Counter, Gauge, Metric, Readings


class TierMetrics:
    """Owner of the counters and gauges of tiers. `increase(key, total)` returns how much a total of the core has grown
    since its last report under that key."""

    def __init__(self, increase: Callable[[Hashable, float], float]) -> None:
        self._increase = increase
        self._state: TiersProgress | None = None
        self.bytes = Counter("tier_bytes_total", "Bytes read from a tier, and written to it.", ["op", "source"])
        self.seconds = Counter("tier_seconds_total", "Seconds of reads and writes of a tier.", ["op", "source"])
        self.blocks = Counter("tier_blocks_total", "KV blocks read from a tier, and written to it.", ["op", "source"])
        self.rejected = Counter("tier_rejected_total", "Objects of a tier that failed a check.", ["reason", "source"])
        self.dropped = Counter("tier_dropped_total", "KV blocks that a tier had no room or time for.", ["source"])
        self.failures = Counter("tier_failures_total", "Reads and lookups that failed.", ["source"])
        self._gauges = [
            self._gauge("tier_up", "1 while the tier is open.", lambda source: source.is_open),
            self._gauge("tier_breaker_open", "1 while a tier that failed is left alone.", lambda it: it.is_broken),
            self._gauge("tier_held_bytes", "Bytes of the KV blocks in a tier.", lambda source: source.held_bytes),
            self._gauge("tier_max_bytes", "Most bytes that a tier may hold; 0: unknown.", lambda it: it.max_bytes),
            self._gauge("tier_queued_bytes", "Bytes to be written to a tier.", lambda source: source.queued_bytes),
            Gauge("tier_waiting_requests", "Requests that wait for KV blocks from a tier.", self._num_waiting),
        ]

    @property
    def metrics(self) -> list[Metric]:
        return [*self._gauges, *(each for each in vars(self).values() if isinstance(each, Counter))]

    def _num_waiting(self) -> float:
        return 0 if self._state is None else self._state.num_waiting

    def _gauge(self, name: str, help: str, read: Callable[[SourceState], float]) -> Gauge:
        def readings() -> Readings:
            return [({"source": source.name}, read(source)) for source in self._sources()]

        return Gauge(name, help, readings)

    def _sources(self) -> list[SourceState]:
        return [] if self._state is None else self._state.sources

    def on_progress(self, state: TiersProgress) -> None:
        self._state = state
        for source in self._sources():
            name = source.name
            totals: tuple[tuple[Counter, tuple[str, ...], float], ...] = (
                (self.blocks, ("read", name), source.num_read),
                (self.blocks, ("write", name), source.num_written),
                (self.bytes, ("read", name), source.read_bytes),
                (self.bytes, ("write", name), source.written_bytes),
                (self.seconds, ("read", name), source.read_s),
                (self.seconds, ("write", name), source.write_s),
                (self.dropped, (name,), source.num_dropped),
                (self.failures, (name,), source.num_failed),
                *((self.rejected, (reason, name), count) for reason, count in source.rejected.items()),
            )
            for counter, labels, total in totals:
                counter.add(self._increase((counter.name, labels), total), *labels)

    def summary(self) -> JsonObject | None:
        """Return the state for `GET /kv` and the dashboard; None before the core's first report."""
        if (state := self._state) is None:
            return None
        return {
            "namespace_known": state.is_open,
            "tokens": dict(zip(PLACES, state.num_tokens_by_place, strict=True)),
            "slots": {
                "all": state.num_slots,
                "filled": state.num_filled_slots,
                "used": state.num_used_slots,
                "used_bytes": state.used_slot_bytes,
            },
            "waiting": state.num_waiting,
            "sources": [
                {
                    "name": source.name,
                    "open": source.is_open,
                    "breaker_open": source.is_broken,
                    "error": source.error,
                    "held_bytes": source.held_bytes,
                    "max_bytes": source.max_bytes,
                    "queued_bytes": source.queued_bytes,
                }
                for source in self._sources()
            ],
        }
