"""The metrics of tiers are those of the core's reports, also over a restart, and prompts divide by their source."""

from __future__ import annotations

import msgspec

from tokenloom.frontend.server.requests.engine_metrics import EngineMetrics
from tokenloom.ipc.codec import encode_ids
from tokenloom.ipc.messages.core import Finished, Started
from tokenloom.ipc.messages.metrics import Counter, Gauge
from tokenloom.ipc.messages.supervisor import Progress
from tokenloom.ipc.messages.tier import SourceState, TiersProgress
from tokenloom.ipc.spec.config.engine_config import EngineConfig
from tokenloom.tests.frontend.bench import Bench
from tokenloom.tests.support.engine_specs import new_spec

DISK = SourceState(
    name="disk", is_open=True, is_broken=True, error="no space", held_bytes=500, max_bytes=1000, queued_bytes=64,
    num_read=5, read_bytes=50, read_s=0.5, num_written=7, written_bytes=70, write_s=0.25, num_dropped=3, num_failed=2,
    rejected={"checksum": 4},
)  # fmt: skip


def report(*sources: SourceState) -> Progress:
    tiers = TiersProgress(
        num_tokens_by_place=[64, 32, 16, 0, 0],
        num_slots=9,
        num_filled_slots=4,
        num_used_slots=2,
        used_slot_bytes=2048,
        num_waiting=6,
        is_open=True,
        sources=list(sources),
    )
    progress = Progress(step=0, step_age_s=0.0, num_running=0, num_waiting=0, tiers=tiers)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(progress), type=Progress) == progress
    return progress


def values(metrics: EngineMetrics) -> dict[tuple[str, ...], float]:
    """Return the values of the tiers' metrics by name and label values."""
    found = {}
    for each in metrics.read():
        if each.name.startswith("tokenloom_tier_") and isinstance(each, (Counter, Gauge)):
            labels = {name: value for name, value in each.labels.items() if name not in ("model_name", "engine")}
            found[each.name.removeprefix("tokenloom_tier_"), *labels.values()] = each.value
    return found


def test_each_total_and_state_of_a_source_is_a_metric() -> None:
    metrics = EngineMetrics(new_spec(config=EngineConfig(kv_disk="/disk")))
    metrics.on_progress(report(DISK))
    found = values(metrics)
    assert found == {
        ("up", "disk"): 1, ("breaker_open", "disk"): 1, ("held_bytes", "disk"): 500, ("max_bytes", "disk"): 1000,
        ("queued_bytes", "disk"): 64, ("waiting_requests",): 6, ("rejected_total", "checksum", "disk"): 4,
        ("blocks_total", "read", "disk"): 5, ("blocks_total", "write", "disk"): 7,
        ("bytes_total", "read", "disk"): 50, ("bytes_total", "write", "disk"): 70,
        ("seconds_total", "read", "disk"): 0.5, ("seconds_total", "write", "disk"): 0.25,
        ("dropped_total", "disk"): 3, ("failures_total", "disk"): 2,
    }  # fmt: skip
    metrics.on_progress(report(DISK))
    assert values(metrics) == found, "the same totals add nothing"
    metrics.on_progress(report(msgspec.structs.replace(DISK, num_read=2)))  # a new core and tier process count from 0
    assert values(metrics)["blocks_total", "read", "disk"] == 7
    metrics.on_progress(report())
    assert ("up", "disk") not in values(metrics), "a source that is gone has no state"


def test_the_slots_are_counted_and_those_in_use_measured() -> None:
    metrics = EngineMetrics(new_spec(config=EngineConfig(kv_disk="/disk")))
    metrics.on_progress(report(DISK))
    assert metrics.tiers is not None
    summary = metrics.tiers.summary()
    assert summary is not None
    assert summary["slots"] == {"all": 9, "filled": 4, "used": 2, "used_bytes": 2048}


def test_prompt_tokens_divide_by_the_place_of_their_blocks_and_the_caller_learns_it() -> None:
    bench = Bench(config=EngineConfig(kv_disk="/disk"))
    key = bench.submit(prompt_token_ids=encode_ids(range(5, 105)))
    bench.core(started=[Started(key=key, num_cached_tokens=80, num_loaded_tokens={"host": 16, "disk": 48})])
    bench.core(finished=[Finished(key=key, reason="length")])
    metrics = bench.frontend.metrics
    by_source = {source: total for (source,), total in metrics.prompt_tokens_by_source.totals.items()}
    assert by_source == {"local_compute": 20, "local_cache_hit": 16, "host": 16, "disk": 48}
    assert metrics.prompt_tokens.sum == metrics.prompt_tokens_by_source.sum == 100
    last = bench.deltas()[-1]
    assert last.num_cached_tokens == 80
    assert last.metrics is not None and last.metrics.num_loaded_tokens == {"host": 16, "disk": 48}
