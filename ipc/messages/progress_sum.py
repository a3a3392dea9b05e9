"""The sum of the Progress of several cores, for metrics and /health, which show an engine as a whole."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import msgspec

from .supervisor import DraftSource, KVGroupState, Progress
from .tier import SourceState

_NOW = (  # fields that are not totals but the current state of a running core
    *("step_age_s", "num_running", "num_waiting", "num_deferred", "num_flex", "num_blocks", "num_free_blocks"),
    *("kv_map", "num_steps_in_flight", "is_paused", "is_asleep", "num_slots", "num_ready", "num_filling"),
    *("running", "waiting", "capacity", "num_used_blocks", "num_cached_blocks"),
    *("num_entries", "num_used_embeds", "num_corpus_tokens"),
    *("num_filled_slots", "num_used_slots", "used_slot_bytes", "is_open", "is_broken", "error"),
    *("num_objects", "held_bytes", "max_bytes", "queued_bytes"),
)


def add_up(parts: Sequence[Progress]) -> Progress:
    """Return the sum of at least one Progress. step_age_s is the largest of the cores that have work, or the smallest
    of all if none has, and kv_map has evenly spread bytes of all maps."""
    if len(parts) == 1:
        return parts[0]
    total: Progress = parts[0]
    for part in parts[1:]:
        total = _add(total, part)
    busy = [part.step_age_s for part in parts if part.num_running + part.num_waiting]
    num_maps = sum(bool(part.kv_map) for part in parts)
    return msgspec.structs.replace(
        total,
        step_age_s=max(busy) if busy else min(part.step_age_s for part in parts),
        kv_map=total.kv_map[:: max(num_maps, 1)],
    )


def totals_of(progress: Progress) -> Progress:
    """Return `progress` with only its totals, which stay true after the core's end; other fields are empty or 0."""
    totals: Progress = _without_now(progress)
    return totals


def _without_now(struct: Any) -> Any:
    changes = {}
    for field in msgspec.structs.fields(type(struct)):
        value = getattr(struct, field.name)
        if field.name in _NOW:
            changes[field.name] = type(value)()
        elif isinstance(value, msgspec.Struct):
            changes[field.name] = _without_now(value)
        elif isinstance(value, list) and value and isinstance(value[0], (SourceState, KVGroupState)):
            changes[field.name] = [_without_now(each) for each in value]
    return msgspec.structs.replace(struct, **changes)


def _add(one: Any, other: Any) -> Any:
    """Return the sum of two values of a field: numbers, structs and dicts are added, lists see `_add_lists`; of flags
    and texts the first that is not empty is taken."""
    if one is None or other is None:
        return one if other is None else other
    if isinstance(one, DraftSource):
        accepted = _add(one.num_accepted_by_position, other.num_accepted_by_position)
        num_drafted = one.num_drafted + other.num_drafted
        return DraftSource(name=one.name, num_drafted=num_drafted, num_accepted_by_position=accepted)
    if isinstance(one, msgspec.Struct):
        names = [name for name in one.__struct_fields__ if name != "name"]
        return msgspec.structs.replace(one, **{name: _add(getattr(one, name), getattr(other, name)) for name in names})
    if isinstance(one, (bool, str)):
        return one or other
    if isinstance(one, dict):
        return {key: one.get(key, 0) + other.get(key, 0) for key in {**one, **other}}
    if isinstance(one, list):
        return _add_lists(one, other)
    return one + other


def _add_lists(one: list[Any], other: list[Any]) -> list[Any]:
    """Return the sum of two lists: histograms are added number by number, sources of drafts, tiers and KV groups by
    name; lists of digests are joined without repetitions."""
    values = [*one, *other]
    if values and isinstance(values[0], bytes):
        return list(dict.fromkeys(values))
    if values and isinstance(values[0], (DraftSource, SourceState, KVGroupState)):
        by_name: dict[str, DraftSource | SourceState | KVGroupState] = {}
        for source in values:
            known = by_name.get(source.name)
            by_name[source.name] = source if known is None else _add(known, source)
        return list(by_name.values())
    return [first + second for first, second in zip_longest(one, other, fillvalue=0)]
