"""CoreMetrics: metrics of steps, prefix cache, KV groups, queue and losses, from the core's Progress.

All of them are of the whole engine: each frontend counts them from the same reports.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import get_args

from ....ipc.messages.base import MissReason
from ....ipc.messages.supervisor import Progress
from .group_metrics import GroupMetrics
from .registry import Counter, Histogram, Metric

ROWS = tuple(float(2**power) for power in range(13))  # bounds of Progress.num_steps_by_rows
STEP_TOKENS = tuple(float(2**power) for power in range(15))  # bounds of Progress.num_steps_by_tokens


class CoreMetrics:
    """Owner of the counters and histograms of the core's work."""

    def __init__(self, increase: Callable[[Hashable, float], float], step_tokens_name: str) -> None:
        """`increase(key, total)` returns how much a total of the core has grown since its last report under that
        key."""
        self._increase = increase
        self.preemptions = Counter("num_preemptions_total", "Preemptions of running requests.")
        self.recomputed = Counter("recomputed_tokens_total", "Computed tokens lost by preemptions and crashes.")
        self.cache_queries = Counter("prefix_cache_queries_total", "Tokens looked up in the prefix cache.")
        self.cache_hits = Counter("prefix_cache_hits_total", "Tokens found in the prefix cache.")
        self.cache_misses = Counter(
            "prefix_cache_missed_tokens_total", "Tokens computed before and not found, by reason.", ["reason"]
        )
        for reason in get_args(MissReason):
            self.cache_misses.add(0, reason)
        self.steps = Counter("engine_steps_total", "Steps of the model.")
        self.scheduled_tokens = Counter("scheduled_tokens_total", "Tokens computed in steps, prompts included.")
        self.step_seconds = Counter("step_seconds_total", "Time of steps by phase.", ["phase"])
        self.restarts = Counter("process_restarts_total", "Restarts of processes of the engine.")
        self.answers_resumed = Counter(
            "http_answers_resumed_total", "HTTP answers that went on after the loss of their frontend."
        )
        self.answers_cut = Counter(
            "http_answers_cut_total", "HTTP answers cut off by the loss of their frontend.", ["reason"]
        )
        self.batch = Histogram("batch_size", "Requests in a step of the model.", ROWS)
        about = "Tokens per step: of completed prompts, and generated."
        self.step_tokens = Histogram(step_tokens_name, about, STEP_TOKENS)
        self.groups = GroupMetrics(increase)
        self.rejections = Counter("admission_rejections_total", "Requests refused by a full queue.", ["reason"])

    @property
    def metrics(self) -> list[Metric]:
        own = [each for each in vars(self).values() if isinstance(each, (Counter, Histogram))]
        return [*own, *self.groups.metrics]

    def on_progress(self, progress: Progress) -> None:
        """Add the increase of the core's totals."""
        self.groups.on_progress(progress.kv_groups)
        self.restarts.raise_to(progress.num_restarts)
        self.answers_resumed.raise_to(progress.num_http_answers_resumed)
        for reason, count in progress.num_http_answers_cut.items():
            self.answers_cut.raise_to(count, reason)
        totals: tuple[tuple[Counter, tuple[str, ...], float], ...] = (
            (self.steps, (), progress.step),
            (self.preemptions, (), progress.num_preemptions),
            (self.recomputed, (), progress.num_recomputed_tokens),
            (self.cache_queries, (), progress.num_queried_tokens),
            (self.cache_hits, (), progress.num_hit_tokens),
            *((self.cache_misses, (reason,), count) for reason, count in progress.num_missed_tokens.items()),
            (self.scheduled_tokens, (), progress.num_scheduled_tokens),
            (self.rejections, ("max_num_queued_reqs",), progress.num_refused_for_requests),
            (self.rejections, ("max_num_queued_tokens",), progress.num_refused_for_tokens),
            (self.step_seconds, ("schedule",), progress.schedule_s),
            (self.step_seconds, ("send",), progress.send_s),
            (self.step_seconds, ("device",), progress.execute_s),
            (self.step_seconds, ("host",), progress.host_s),
        )
        for counter, labels, total in totals:
            counter.add(self._increase((counter.name, labels), total), *labels)
        self._add_steps(self.batch, progress.num_rows_in_steps, progress.num_steps_by_rows)
        self._add_steps(self.step_tokens, progress.num_step_tokens, progress.num_steps_by_tokens)

    def _add_steps(self, histogram: Histogram, total: int, counts: list[int]) -> None:
        """Add the increase of a histogram that the core keeps as a sum, `total`, and `counts` of its buckets."""
        new = self._increase((histogram.name,), total)
        by_size = [self._increase((histogram.name, place), count) for place, count in enumerate(counts)]
        histogram.add_counts(list(map(int, by_size)), new)
