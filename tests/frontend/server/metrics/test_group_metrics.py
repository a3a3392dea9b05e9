"""The metrics of KV groups are those of the core's reports; an engine with one group has none."""

from __future__ import annotations

from tokenloom.frontend.server.requests.engine_metrics import EngineMetrics
from tokenloom.ipc.messages.metrics import Counter, Gauge
from tokenloom.ipc.messages.supervisor import KVGroupState, Progress
from tokenloom.tests.support.engine_specs import new_spec


def values(metrics: EngineMetrics) -> dict[tuple[str, ...], float]:
    """Return the values of the groups' metrics by the labels of their own."""
    found = {}
    for each in metrics.read():
        if isinstance(each, (Counter, Gauge)) and "group" in each.labels:
            found[each.labels["group"], each.labels.get("state") or each.labels.get("why", "unusable")] = each.value
        elif isinstance(each, Counter) and "to" in each.labels:
            found[each.labels["to"], "moved"] = each.value
    return found


def test_blocks_and_events_of_each_group_are_metrics() -> None:
    metrics = EngineMetrics(new_spec())
    metrics.on_progress(Progress(step=0, step_age_s=0.0, num_running=0, num_waiting=0))
    assert not values(metrics) and metrics.core.groups.summary() == []
    for num_unusable in (32, 48):
        groups = [
            KVGroupState(name="attention", num_used_blocks=3, num_free_blocks=4, num_cached_blocks=5),
            KVGroupState(
                name="window 8",
                num_used_blocks=1,
                num_unusable_tokens=num_unusable,
                num_moved_slabs=num_unusable // 16,
                num_snapshots={"kept": num_unusable // 8},
            ),
        ]
        metrics.on_progress(Progress(step=1, step_age_s=0.0, num_running=0, num_waiting=0, kv_groups=groups))
    assert values(metrics) == {
        ("attention", "used"): 3, ("attention", "free"): 4, ("attention", "cached"): 5, ("attention", "unusable"): 0,
        ("window 8", "used"): 1, ("window 8", "free"): 0, ("window 8", "cached"): 0, ("window 8", "unusable"): 48,
        ("attention", "moved"): 0, ("window 8", "moved"): 3, ("window 8", "kept"): 6,
    }  # fmt: skip
    blocks = {"used": 1, "free": 0, "cached": 0}
    assert metrics.core.groups.summary()[1] == {"name": "window 8", "blocks": blocks, "unusable_tokens": 48}
