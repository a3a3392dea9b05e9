"""The gauges of EngineMetrics: values that are read from the engine's state at each scrape."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from ....ipc.messages.supervisor import Progress
from ....ipc.spec.config.engine_spec import EngineSpec
from ..metrics.registry import Gauge, Metric, Readings

# of this frontend alone; others: of the whole engine
OWN_GAUGES = ("num_open_answers", "socket_queue_depth", "batches_open", "batch_lines_running")


class MetricsState(Protocol):
    """The state that the gauges read; EngineMetrics implements it."""

    progress: Progress
    num_kv_blocks: int
    kernels: str
    queue_depths: Callable[[], Mapping[str, float]]

    @property
    def kv_use(self) -> float: ...

    @property
    def step_age_s(self) -> float: ...

    @property
    def num_open(self) -> int: ...


def new_gauges(metrics: MetricsState, spec: EngineSpec) -> list[Metric]:
    """Return the gauges, which read `metrics` at each scrape."""
    config = spec.config

    def memory() -> Readings:
        return [({"rank": str(rank)}, size) for rank, size in enumerate(metrics.progress.worker_memory_bytes)]

    def own_depths() -> Readings:
        return [({"socket": socket}, depth) for socket, depth in metrics.queue_depths().items()]

    def depths() -> Readings:
        return [*own_depths(), ({"socket": "workers"}, metrics.progress.num_steps_in_flight)]

    def kernels() -> Readings:
        return [({"kernels": metrics.kernels}, 1)] if metrics.kernels else []

    def by_reason() -> Readings:
        progress = metrics.progress
        num_by_reason = {
            "capacity": progress.num_waiting - progress.num_deferred - progress.num_flex,
            "deferred": progress.num_deferred,
            "flex": progress.num_flex,
        }
        return [({"reason": reason}, num) for reason, num in num_by_reason.items()]

    def cache_config() -> Readings:
        names = ("block_size", "enable_prefix_caching", "gpu_memory_utilization", "kv_cache_memory_bytes")
        size = metrics.num_kv_blocks * config.block_size
        labels = {
            **{name: getattr(config, name) for name in names},
            "cache_dtype": config.kv_cache_dtype,
            "num_gpu_blocks": metrics.num_kv_blocks,
            "num_cpu_blocks": None,
            "kv_cache_size_tokens": size,
            "kv_cache_max_concurrency": round(size / spec.max_model_len, 2),
        }
        return [({name: str(value) for name, value in labels.items()}, 1)]

    return [
        Gauge("num_requests_running", "Requests in the running batch.", lambda: metrics.progress.num_running),
        Gauge("num_requests_waiting", "Requests waiting to be scheduled.", lambda: metrics.progress.num_waiting),
        Gauge(
            "num_requests_waiting_by_reason",
            "Waiting requests by reason; flex: for what others leave.",
            by_reason,
        ),
        Gauge("kv_cache_usage_perc", "Share of the KV blocks in use, 1 = all.", lambda: metrics.kv_use),
        Gauge("kv_cache_blocks", "KV blocks in the pool.", lambda: metrics.num_kv_blocks),
        Gauge("cache_config_info", "1, with the KV cache's configuration as labels.", cache_config),
        Gauge("kernels_info", "1, with the kernels in use as label.", kernels),
        Gauge("step_age_seconds", "Seconds since the last step ended.", lambda: metrics.step_age_s),
        Gauge("engine_up", "1 while the core is up.", lambda: metrics.progress.is_core_up),
        Gauge("num_open_answers", "Open answers.", lambda: metrics.num_open),
        Gauge("worker_memory_bytes", "Resident memory of a worker.", memory),
        Gauge("socket_queue_depth", "Messages sent and not answered, by receiver.", depths, own_depths),
    ]
