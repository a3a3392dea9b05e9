"""Replica: the supervisor's state of one replica: a core with its workers and, with KV tiers, its tier processes.

Replicas share nothing but the frontends: each has its own sizes, its own memory and its own units.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import msgspec

from ....ipc.kv.pool_shape import PoolShape
from ....ipc.messages.progress_sum import add_up, totals_of
from ....ipc.messages.supervisor import Initialize, Measured, Progress
from ....ipc.messages.tier import TiersProgress
from ....ipc.notes.touched import Touched, read_touched
from ....ipc.process.machine_memory import available_bytes
from ....ipc.spec.config.engine_spec import EngineSpec
from .launcher import Unit
from .replicas.holdings import Holdings
from .replicas.kv_arena import KVArena

logger = logging.getLogger("tokenloom.supervisor")

NO_PROGRESS = Progress(step=0, step_age_s=0.0, num_running=0, num_waiting=0)


class Replica:
    """State of one replica. `units`: those to keep alive; empty once the replica has been given up."""

    def __init__(self, spec: EngineSpec, number: int, free_bytes: Callable[[], int] = available_bytes) -> None:
        """free_bytes: returns the free memory of this machine that this replica may use."""
        self.workers, self.core, self.tier = Unit("worker", number), Unit("core", number), Unit("tier", number)
        self.units = [self.workers, self.core, *([self.tier] if spec.uses_tiers else [])]
        self.number = number
        self.num_hosts_lost = 0  # as last reported to its core: the number of its arena
        self._touched = spec.of_replica(number).own_file("touched")
        self._is_only_one = spec.config.data_parallel_size == spec.config.api_server_count == 1
        self.arena = KVArena(spec.of_replica(number), free_bytes)
        self.holdings = Holdings(spec.model_folder)
        self.sizes: Initialize | None = None  # None: not measured yet
        self.progress = self._before = NO_PROGRESS  # its core's last report; the totals of earlier cores
        self.progress_at = 0.0  # monotonic seconds

    def fit(self, group: Measured) -> Initialize:
        """Decide the sizes of the replica from the values that hold for all its workers, and return them. ConfigError
        if the memory of the KV tiers does not fit."""
        pool = PoolShape.of(group.pool_bytes, group.block_bytes)
        arena = self.arena.fit(group, pool)
        self.sizes = Initialize(pool=pool, arena=arena, kernels=group.kernels, has_exact_drafts=group.has_exact_drafts)
        return self.sizes

    def check(self, group: Measured) -> None:
        """Log a warning if new workers have less room than their predecessors had."""
        if self.sizes is not None and group.pool_bytes < self.sizes.pool.num_bytes:
            pool, num_blocks = self.sizes.pool, group.pool_bytes // self.sizes.pool.block_bytes[0]
            logger.warning("a new worker has room for %d KV blocks, %d are needed", num_blocks, pool.num_blocks())

    def note(self, progress: Progress) -> bool:
        """Record a report of the core; return whether steps have ended since the last report."""
        has_moved = progress.step > self.progress.step
        self.progress, self.progress_at = progress, time.monotonic()
        return has_moved

    def on_core_lost(self) -> None:
        """Add the totals of the lost core to those of earlier cores, since its successor counts from 0.

        If the engine has only one core and one frontend, that frontend does this itself. Several frontends would get
        different sums, since not all of them run from the engine's start."""
        if self._is_only_one:
            return
        self._before = totals_of(add_up([self._before, self.progress]))
        self.progress = NO_PROGRESS

    def on_tier_lost(self) -> None:
        """Add the totals of a lost tier process to those of earlier ones, since its successor counts from 0 while the
        core continues."""
        if not self._is_only_one and (tiers := self.progress.tiers) is not None:
            gone = [source for source in tiers.sources if source.name != "host"]
            others = msgspec.structs.replace(tiers, sources=[each for each in tiers.sources if each not in gone])
            only_gone = TiersProgress(
                num_tokens_by_place=[], num_slots=0, num_filled_slots=0, num_used_slots=0, sources=gone
            )
            before = add_up([self._before, msgspec.structs.replace(NO_PROGRESS, tiers=only_gone)])
            self._before, self.progress = totals_of(before), msgspec.structs.replace(self.progress, tiers=others)

    def read_touched(self) -> list[Touched]:
        """Return the answers that the core, running or lost, was adding or had just admitted to a step. One of them may
        have ended it."""
        return read_touched(self._touched)

    def whole_progress(self) -> Progress:
        """Return the core's last report, with totals since the engine's start, unless the only frontend adds them up
        itself (`on_core_lost`)."""
        return self.progress if self._is_only_one else add_up([self._before, self.progress])
