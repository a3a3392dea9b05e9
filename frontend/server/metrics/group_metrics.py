"""GroupMetrics: metrics of the KV groups, from the core's Progress. A core with one group reports none.

The label `group` is the group's name: "attention" if its layers see all tokens, else "window N".
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

from ....ipc.codec import JsonObject
from ....ipc.messages.supervisor import KVGroupState
from .registry import Counter, Gauge, Metric, Readings


class GroupMetrics:
    """Owner of the metrics of groups. `increase(key, total)` returns how much a total of the core has grown since its
    last report under that key."""

    def __init__(self, increase: Callable[[Hashable, float], float]) -> None:
        self._increase = increase
        self._groups: list[KVGroupState] = []
        self.unusable = Counter(
            "prefix_cache_unusable_tokens_total",
            "Tokens whose keys were found by other layers, but not by those of the group.",
            ["group"],
        )
        self.moved_slabs = Counter("kv_slab_moves_total", "Slabs that a group took from others.", ["to"])
        self.snapshots = Counter("kv_snapshots_total", "States that rows left for others to find.", ["group", "why"])
        self._blocks = Gauge(
            "kv_group_blocks", "KV blocks of a group: used, free, and found by their keys.", self._read
        )

    @property
    def metrics(self) -> list[Metric]:
        return [self._blocks, self.unusable, self.moved_slabs, self.snapshots]

    def _read(self) -> Readings:
        return [
            ({"group": group.name, "state": state}, count)
            for group in self._groups
            for state, count in _blocks_by_state(group).items()
        ]

    def on_progress(self, groups: list[KVGroupState]) -> None:
        self._groups = groups
        for group in groups:
            increase = self._increase((self.unusable.name, group.name), group.num_unusable_tokens)
            self.unusable.add(increase, group.name)
            increase = self._increase((self.moved_slabs.name, group.name), group.num_moved_slabs)
            self.moved_slabs.add(increase, group.name)
            for why, total in group.num_snapshots.items():
                self.snapshots.add(self._increase((self.snapshots.name, group.name, why), total), group.name, why)

    def summary(self) -> list[JsonObject]:
        """Return the groups for `GET /kv` and the dashboard; none if all layers are in one."""
        return [
            {
                "name": group.name,
                "blocks": _blocks_by_state(group),
                "unusable_tokens": group.num_unusable_tokens,
            }
            for group in self._groups
        ]


def _blocks_by_state(group: KVGroupState) -> dict[str, int]:
    return {"used": group.num_used_blocks, "free": group.num_free_blocks, "cached": group.num_cached_blocks}
