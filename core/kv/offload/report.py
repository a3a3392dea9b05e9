"""The report of the tiers for operators, from which the metrics, `GET /kv` and the dashboard are made."""

from __future__ import annotations

from ....ipc.messages.tier import SourceState, TiersProgress
from .offload import Offload


def tiers_progress(offload: Offload) -> TiersProgress:
    """Return the state of all tiers and their totals."""
    num_slots, num_filled, slot_bytes = offload.slots.num_slots, offload.slots.num_cached, offload.slot_bytes
    host = SourceState(
        name="host",
        is_open=True,
        num_objects=num_filled,
        held_bytes=num_filled * slot_bytes,
        max_bytes=num_slots * slot_bytes,
        num_read=offload.num_loaded,
        read_bytes=offload.num_loaded * slot_bytes,
        num_written=offload.num_stored,
        written_bytes=offload.num_stored * slot_bytes,
        num_dropped=offload.writes.num_dropped,
    )
    return TiersProgress(
        num_tokens_by_place=list(offload.hits.num_tokens_by_place),
        num_slots=num_slots,
        num_filled_slots=num_filled,
        num_used_slots=offload.num_used_slots,
        num_waiting=offload.fetches.num_waiting,
        is_open=offload.is_open,
        sources=[host, *offload.sources],
    )
