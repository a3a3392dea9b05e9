"""CoreStats: counters of the core for progress reports, the log line, and admission's estimates."""

from __future__ import annotations

import time

from msgspec.structs import replace

from ..ipc.messages.supervisor import KVGroupState, Progress
from ..ipc.spec.kv.kv_groups import names_of
from .kv.manager import KVCacheManager
from .scheduling.scheduler import Scheduler

LOG_INTERVAL_S = 10.0
PROGRESS_INTERVAL_S = 0.5  # while there is work
NUM_ROW_COUNTS = 14
NUM_TOKEN_COUNTS = 16
KV_MAP_BLOCKS = 256  # sampled for the map in Progress


class CoreStats:
    """Totals since the core's start; `log_line` also computes rates since the last line. `now`: monotonic seconds."""

    def __init__(self) -> None:
        self.num_generated_tokens = 0
        self.num_scheduled_tokens = 0
        self.num_results = 0
        self.execute_s = 0.0  # on the device, as rank 0 measures it
        self.schedule_s = 0.0
        self.send_s = 0.0
        self.host_s = 0.0
        self.num_rows = 0
        self.num_steps_by_rows = [0] * NUM_ROW_COUNTS  # [i]: steps of more than 2^(i-1) and at most 2^i rows
        self.num_step_tokens = 0
        self.num_steps_by_tokens = [0] * NUM_TOKEN_COUNTS  # likewise, up to 2^14
        self.num_refused_for_requests = 0
        self.num_refused_for_tokens = 0
        self.last_result_at = time.monotonic()
        self._logged = self.last_result_at, 0, 0  # time of the last line; tokens until then
        self._told_at = 0.0
        self._told_state = (False, False)

    def on_step(
        self, num_rows: int, num_tokens: int, num_prefilled: int, num_new_tokens: int, execute_s: float, now: float
    ) -> None:
        """Count a step: `num_tokens` computed tokens, `num_prefilled` tokens of completed prompts, `num_new_tokens`
        sampled ones."""
        num_processed = num_prefilled + num_new_tokens  # as vLLM counts: each token once, cached ones of prompts too
        self.num_step_tokens += num_processed
        self.num_steps_by_tokens[min(max(num_processed - 1, 0).bit_length(), NUM_TOKEN_COUNTS - 1)] += 1
        self.num_steps_by_rows[min((num_rows - 1).bit_length(), NUM_ROW_COUNTS - 1)] += 1
        self.num_rows += num_rows
        self.num_results += 1
        self.num_scheduled_tokens += num_tokens
        self.num_generated_tokens += num_new_tokens
        self.execute_s += execute_s
        self.last_result_at = now

    def on_sent(self, schedule_s: float, send_s: float) -> None:
        """Add the seconds that it took to schedule and to send a step."""
        self.schedule_s += schedule_s
        self.send_s += send_s

    def seconds_to_drain(self, num_tokens: int) -> float:
        """Estimate the seconds to compute `num_tokens` at the mean rate of all steps so far (1,000 tokens per second
        before the first), within [0.1, 60]."""
        rate = self.num_scheduled_tokens / self.execute_s if self.execute_s > 0 else 1000.0
        return min(max(num_tokens / max(rate, 1.0), 0.1), 60.0)

    def progress(
        self, scheduler: Scheduler, now: float, *, is_idle: bool, is_paused: bool, is_asleep: bool
    ) -> Progress | None:
        """Return a report, or None if the last one is recent and there is work. A change of pause or sleep is reported
        at once, since the loop may have no further turn for a long time."""
        is_recent = now - self._told_at < PROGRESS_INTERVAL_S and (is_paused, is_asleep) == self._told_state
        if is_recent and not is_idle:
            return None
        self._told_at, self._told_state = now, (is_paused, is_asleep)
        progress = Progress(
            step=self.num_results,
            step_age_s=now - self.last_result_at,
            num_running=scheduler.rows.num_active,
            num_waiting=len(scheduler.waiting),
            num_deferred=scheduler.waiting.num_blocked,
            num_flex=scheduler.waiting.num_ready_flex,
            num_blocks=scheduler.kv_cache.num_usable_blocks,
            num_free_blocks=scheduler.kv_cache.num_free_blocks,
            kv_map=scheduler.kv_cache.sample(KV_MAP_BLOCKS),
            kv_groups=_group_states(scheduler.kv_cache),
            num_recomputed_tokens=scheduler.num_recomputed_tokens,
            is_paused=is_paused,
            is_asleep=is_asleep,
            num_preemptions=scheduler.num_preemptions,
            num_queried_tokens=scheduler.kv_cache.num_queried_tokens,
            num_hit_tokens=scheduler.kv_cache.num_hit_tokens,
            num_scheduled_tokens=self.num_scheduled_tokens,
            schedule_s=self.schedule_s,
            send_s=self.send_s,
            execute_s=self.execute_s,
            host_s=self.host_s,
            num_rows_in_steps=self.num_rows,
            num_steps_by_rows=self.num_steps_by_rows,
            num_step_tokens=self.num_step_tokens,
            num_steps_by_tokens=self.num_steps_by_tokens,
            num_refused_for_requests=self.num_refused_for_requests,
            num_refused_for_tokens=self.num_refused_for_tokens,
            num_steps_in_flight=len(scheduler.ledger),
        )
        for feature in scheduler.features.in_order:
            progress = replace(progress, **feature.report())
        return progress

    def log_line(self, scheduler: Scheduler, now: float) -> str | None:
        """Return the log line, or None if the last one is recent or no token was computed since."""
        logged_at, num_generated, num_scheduled = self._logged
        elapsed = now - logged_at
        generated, scheduled = self.num_generated_tokens - num_generated, self.num_scheduled_tokens - num_scheduled
        if elapsed < LOG_INTERVAL_S or not scheduled:
            return None
        self._logged = now, self.num_generated_tokens, self.num_scheduled_tokens
        kv_cache = scheduler.kv_cache
        shares = "" if kv_cache.outer is None else kv_cache.outer.hit_shares(kv_cache.num_queried_tokens)
        return (
            f"{generated / elapsed:.1f} tokens/s generated, {scheduled / elapsed:.1f} computed; "
            f"{scheduler.rows.num_active} running, {len(scheduler.waiting)} waiting; "
            f"KV {1 - kv_cache.num_free_blocks / kv_cache.num_usable_blocks:.0%} used, "
            f"{kv_cache.num_hit_tokens / max(kv_cache.num_queried_tokens, 1):.0%} of prompts cached{shares}"
        )


def _group_states(kv_cache: KVCacheManager) -> list[KVGroupState]:
    """Return the states of the KV groups; none if all layers are in one."""
    if len(kv_cache.groups) == 1:
        return []
    counts = zip(
        names_of(kv_cache.groups),
        kv_cache.groups,
        kv_cache.pools,
        kv_cache.num_unusable_tokens,
        kv_cache.memory.num_moved_slabs,
        strict=True,
    )
    return [
        KVGroupState(
            name=name,
            num_used_blocks=pool.num_used,
            num_free_blocks=pool.num_free,
            num_cached_blocks=pool.num_cached,
            num_unusable_tokens=num_unusable,
            num_moved_slabs=num_moved,
            num_snapshots=dict(kv_cache.num_snapshots) if group.is_state else {},
        )
        for name, group, pool, num_unusable, num_moved in counts
    ]
