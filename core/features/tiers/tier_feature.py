"""TierFeature: connects an Offload, which keeps KV blocks outside the pool, with requests and steps.

A request waits (WaitReason.TIER) while its blocks are being loaded into slots; copies between slots and the pool are
orders of a step. Offload decides which blocks are where.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from ....ipc.messages.base import FinishReason
from ....ipc.messages.tier import SourceState, TiersProgress
from ....ipc.messages.workers import ModelRunnerOutput
from ...request import Request, WaitReason
from ...scheduling.result_processor import NewTokens
from ...scheduling.scheduler import Scheduler
from ...scheduling.step.ledger import LedgerEntry
from ...scheduling.step_feature import StepFeature, StepPlan
from .offload import Offload
from .write_behind import STORES_PER_STEP


class TierFeature(StepFeature):
    """Feature that calls an Offload at requests and steps; owns nothing."""

    def __init__(self, offload: Offload, scheduler: Scheduler) -> None:
        self._offload, self._kv_cache = offload, scheduler.kv_cache
        self._rows, self._ledger = scheduler.rows, scheduler.ledger

    # ── requests ─────────────────────────────────────────────────────────────────────────────────────────────────

    def wait(self, request: Request) -> None:
        """Look for the blocks of a new request at once, unless it waits for something else. For all others, `holds`
        looks for them when the request is the first in order: the blocks of a preempted one may still be in the
        pool."""
        request.is_looked_up = False
        if request.num_preemptions == 0 and not request.waits_for:
            self.holds(request)

    def holds(self, request: Request) -> bool:
        """Look for blocks of a request, once after it came or was preempted. Return True if it must wait for them
        (WaitReason.TIER)."""
        if request.is_looked_up or request.cache_root is not None or not self._offload.is_open:
            return False
        request.is_looked_up = True
        end = self._kv_cache.num_readable_blocks(request)
        tokens = request.tokens[: end * self._kv_cache.block_size].tobytes()
        key, salt = partial(self._kv_cache.key, request), request.params.cache_salt
        look = partial(self._offload.find_missing, key, end, tokens, request.media, salt)
        missing = look()
        if missing is None or not self._offload.fetches.begin(request, missing, self._offload.clock(), look):
            return False
        request.waits_for.add(WaitReason.TIER)
        return True

    def admit(self, request: Request, num_computed: int) -> None:
        self._offload.fetches.forget(request)

    def end(self, request: Request, reason: FinishReason | None) -> None:
        self._offload.fetches.forget(request)

    # ── steps ────────────────────────────────────────────────────────────────────────────────────────────────────

    def is_due(self) -> bool:
        """Return whether copies wait for a step to be sent with."""
        return bool(self._offload.plan) or self._offload.writes.can_store

    def make_room(self) -> None:
        self._offload.loads.land(self._rows.num_active)

    def plan(self, step: StepPlan) -> None:
        offload, num_tokens = self._offload, int(step.counts.sum())
        offload.sent_pending()
        if offload.writes.can_store:
            num_filled = num_tokens // self._kv_cache.block_size
            offload.writes.plan_stores(STORES_PER_STEP + 2 * num_filled if num_tokens else offload.slots.num_slots)
        step.delta.copies = offload.plan.take()

    def on_result(self, entry: LedgerEntry, output: ModelRunnerOutput, new_tokens: NewTokens) -> None:
        """Apply the copies of a finished step, queue the slots that are to be written, and learn the cost of its prompt
        tokens."""
        offload, now = self._offload, self._offload.clock()
        if entry.copies is not None:
            offload.plan.done(entry.copies)
            offload.writes.add(entry.copies.writes, now)
            if entry.copies.slots:
                offload.fetches.on_slots_free(now)
        if entry.batch.num_prompt_tokens:
            is_prompt = entry.batch.counts > 1
            ends, counts = entry.batch.ends[is_prompt], entry.batch.counts[is_prompt]
            positions = float((counts * (ends - counts / 2)).sum())
            num_decodes = len(is_prompt) - len(counts)
            offload.compute.on_step(int(counts.sum()), positions, num_decodes, output.execute_s)

    def reset(self, lost: Sequence[LedgerEntry]) -> None:
        """Forget the copies of lost steps and those that wait for a step: they may not happen."""
        plan, writes = self._offload.plan, self._offload.writes
        writes.on_steps_lost(plan.drop())
        for entry in lost:
            if entry.copies is not None:
                writes.on_steps_lost(plan.lost(entry.copies))

    def report(self) -> dict[str, TiersProgress]:
        """Return the state of all tiers and their totals, for metrics, `GET /kv` and the dashboard."""
        offload = self._offload
        slots = offload.slots
        host = SourceState(
            name="host",
            is_open=True,
            num_objects=slots.num_filled,
            held_bytes=slots.filled_bytes,
            max_bytes=slots.num_bytes,
            num_read=offload.loads.num_loaded,
            read_bytes=offload.loads.loaded_bytes,
            num_written=offload.num_stored,
            written_bytes=offload.stored_bytes,
            num_dropped=offload.writes.num_dropped,
        )
        tiers = TiersProgress(
            num_tokens_by_place=list(offload.hits.num_tokens_by_place),
            num_slots=slots.num_slots,
            num_filled_slots=slots.num_filled,
            num_used_slots=slots.num_used,
            used_slot_bytes=slots.used_bytes,
            num_waiting=offload.fetches.num_waiting,
            is_open=offload.is_open,
            sources=[host, *offload.sources],
        )
        return {"tiers": tiers}

    # ── for tests ────────────────────────────────────────────────────────────────────────────────────────────────

    def check_invariants(self, requests: Sequence[Request]) -> None:
        self._offload.check_invariants(entry.copies for entry in self._ledger.entries)
        waiting = {request for request in requests if request.row < 0}
        assert self._offload.fetches.by_request.keys() <= waiting, "a request fetches blocks that runs or has ended"
