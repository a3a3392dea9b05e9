"""AdapterMetrics: metrics of LoRA adapters, from ended answers and from the core's Progress.

Only engines with --enable-lora have it. The label `adapter` is the adapter's name for the first MAX_NAMES names that
requests use, and `other` for all further ones.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable

from ....ipc.codec import JsonObject
from ....ipc.messages.adapter import AdaptersProgress
from .registry import Counter, Gauge, Metric, Readings

MAX_NAMES = 100
MAX_SHOWN = 20  # rows on the dashboard
OTHER = "other"


class AdapterMetrics:
    """Owner of the counters and gauges of adapters."""

    def __init__(
        self,
        increase: Callable[[Hashable, float], float],
        names_of: Callable[[bytes], list[str]],
        max_loras: int,
        max_names: int = MAX_NAMES,
    ) -> None:
        """`increase(key, total)` returns how much a total of the core has grown since its last report under that key.
        `names_of` returns the names of the adapter with a digest."""
        self._increase, self._names_of = increase, names_of
        self._max_loras, self._max_names = max_loras, max_names
        self._state, self._reported_at = AdaptersProgress(num_slots=max_loras), 0.0
        self.requests = Counter("adapter_requests_total", "Ended answers by adapter.", ["adapter"])
        self.prompt_tokens = Counter("adapter_prompt_tokens_total", "Prompt tokens of ended answers.", ["adapter"])
        self.tokens = Counter("adapter_generation_tokens_total", "Tokens of ended answers.", ["adapter"])
        self.queued = Counter("adapter_queued_total", "Answers with an adapter that came to wait for a row.")
        self.hits = Counter("adapter_slot_hits_total", "Answers that found their adapter in a slot when they came.")
        self.fills = Counter("adapter_fills_total", "Fills of slots, by their result.", ["result"])
        self.fill_seconds = Counter("adapter_fill_seconds_total", "Seconds of fills, from order to last rank.")
        self.wait_seconds = Counter("adapter_wait_seconds_total", "Seconds that answers waited for a slot.")
        self.closed = Counter("adapter_closed_slots_total", "Slots closed for an adapter that had waited too long.")
        self._gauges = [
            Gauge("lora_requests_info", "Time of the report, with adapters by state as labels.", self._info),
            Gauge("adapter_slots", "Slots for adapters, by state.", self._slots),
            Gauge("adapter_waiting_requests", "Answers that wait for a slot.", lambda: self._state.num_waiting),
        ]

    @property
    def metrics(self) -> list[Metric]:
        return [*self._gauges, *(each for each in vars(self).values() if isinstance(each, Counter))]

    def _info(self) -> Readings:
        labels = {"max_lora": str(self._max_loras)}
        for state, digests in (("running", self._state.running), ("waiting", self._state.waiting)):
            labels[f"{state}_lora_adapters"] = ",".join(self._shown(digests))
        return [(labels, self._reported_at)]

    def _shown(self, digests: list[bytes]) -> list[str]:
        """Return the names of adapters, or the first characters of the digest of an adapter that no longer has a
        name."""
        names = [
            name for digest in digests[: self._max_names] for name in self._names_of(digest) or [digest.hex()[:12]]
        ]
        return names[: self._max_names]

    def _slots(self) -> Readings:
        state = self._state
        counts = {"ready": state.num_ready, "filling": state.num_filling}
        counts["empty"] = self._max_loras - sum(counts.values())
        return [({"state": name}, count) for name, count in counts.items()]

    def on_end(self, name: str, num_prompt_tokens: int, num_tokens: int) -> None:
        """Count an ended answer that used the adapter `name`."""
        is_known = (name,) in self.requests.totals or len(self.requests.totals) < self._max_names
        label = name if is_known else OTHER
        self.requests.add(1, label)
        self.prompt_tokens.add(num_prompt_tokens, label)
        self.tokens.add(num_tokens, label)

    def on_progress(self, state: AdaptersProgress) -> None:
        self._state, self._reported_at = state, time.time()
        totals: tuple[tuple[Counter, tuple[str, ...], float], ...] = (
            (self.queued, (), state.num_queued),
            (self.hits, (), state.num_hits),
            (self.fills, ("ok",), state.num_fills),
            (self.fills, ("failed",), state.num_failed_fills),
            (self.fill_seconds, (), state.fill_s),
            (self.wait_seconds, (), state.wait_s),
            (self.closed, (), state.num_closed),
        )
        for counter, labels, total in totals:
            counter.add(self._increase((counter.name, labels), total), *labels)

    def summary(self) -> JsonObject:
        """Return the state for the dashboard, with the adapters that have generated the most tokens."""
        state, fills = self._state, self.fills.get("ok")
        running, waiting = self._shown(state.running), self._shown(state.waiting)
        names = sorted(
            {*running, *waiting, *(name for (name,) in self.tokens.totals)}, key=lambda it: -self.tokens.get(it)
        )
        return {
            "slots": self._max_loras,
            "ready": state.num_ready,
            "filling": state.num_filling,
            "waiting": state.num_waiting,
            "hit_rate": self.hits.sum / self.queued.sum if self.queued.sum else None,
            "fill_s": self.fill_seconds.sum / fills if fills else None,
            "rows": [
                {
                    "name": name,
                    "state": "running" if name in running else "waiting" if name in waiting else "idle",
                    "requests": self.requests.get(name),
                    "prompt_tokens": self.prompt_tokens.get(name),
                    "tokens": self.tokens.get(name),
                }
                for name in names[:MAX_SHOWN]
            ],
        }
