"""Format the durations of one answer under vLLM's names."""

from __future__ import annotations

from ....ipc.codec import JsonObject
from ....ipc.messages.client import RequestMetrics


def timings(metrics: RequestMetrics, num_tokens: int) -> JsonObject:
    """Return {"metrics": …}, durations in milliseconds, of an answer with `num_tokens`; unknown ones are left out."""
    begin, first, end = metrics.first_scheduled_time, metrics.first_token_time, metrics.finished_time
    found: JsonObject = {}
    if begin:
        found["queue_time_ms"] = (begin - metrics.arrival_time) * 1000
    if begin and first:
        found["time_to_first_token_ms"] = (first - begin) * 1000
    if first and end:
        found["generation_time_ms"] = (end - first) * 1000
        if num_tokens > 1:
            found["mean_itl_ms"] = (end - first) * 1000 / (num_tokens - 1)
    if begin and end > begin:
        found["tokens_per_second"] = num_tokens / (end - begin)
    return {"metrics": found}
