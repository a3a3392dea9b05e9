"""Scheduler: decides which row computes how many tokens in the next step.

There is no prefill phase and no decode phase: the scheduled tokens of each request catch up with its known tokens
under one token budget a step. Step n+1 is scheduled while step n runs; if a row has been given to another request
since, its epoch has changed, and the result is dropped.

A step: `schedule` chooses token counts in `_counts`, gets a Batch of them (or the last Batch again), lets the features
add their orders and enters it in the ledger; StepDelta adds the changes of rows and blocks to the message;
`update_from_output` lets the ResultProcessor write the step's tokens into the rows and takes the entry off the ledger.
Knows no sockets, no text, no tensors and none of the features (step_feature.py).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ...ipc.messages.workers import ModelRunnerOutput, SchedulerOutput
from ..kv.manager import KVCacheManager
from ..request import Ids, Request, State, WaitReason
from .batches import Batches
from .chunk_sizes import ChunkSizes
from .preemption import Preemption
from .prefill_throttle import PrefillThrottle
from .prompt_group import PromptGroups
from .result_processor import FinishedRequest, NewTokens, ResultProcessor
from .step.batch import Batch
from .step.ledger import LedgerEntry, StepLedger
from .step.rows import Rows
from .step.step_delta import StepDelta
from .step.table_growth import TableGrowth
from .step_feature import StepFeatures, StepPlan
from .tenants import Tenants
from .waiting_queue import WaitingQueue

MAX_SKIPS = 64  # admissions of later requests while one does not fit; then they wait for it
MAX_SKIPS_PER_STEP = 8  # requests that do not fit, tried in one step


class Scheduler:
    """Owner of the waiting queue, the rows, the step ledger and, through the manager, all blocks."""

    def __init__(
        self,
        kv_cache: KVCacheManager,
        *,
        max_num_seqs: int,
        max_model_len: int,
        max_num_batched_tokens: int,
        long_prefill_token_threshold: int,
        core_epoch: int,
        generation: int,
        preempts_for_waiting: bool = False,
    ) -> None:
        """preempts_for_waiting: a new request may take the place of running ones that come after it in order."""
        self.kv_cache = kv_cache
        self.features = StepFeatures()
        self.prompt_groups = PromptGroups()
        has_states = kv_cache.sizes.state_group is not None
        self.rows = Rows(max_num_seqs, max_model_len, kv_cache.block_size, have_states=has_states)
        self.prefill_throttle = PrefillThrottle()
        self.tenants = Tenants(self.rows, self.prefill_throttle, kv_cache.num_usable_blocks)
        self.waiting = WaitingQueue(self.tenants)
        self.ledger = StepLedger()
        self._preemption = Preemption(self.rows, kv_cache, self.tenants, is_by_priority=preempts_for_waiting)
        self.num_steps = 0
        self.num_preemptions = 0
        self.num_recomputed_tokens = 0  # of preempted requests, including those still in the prefix cache
        self._budget = max_num_batched_tokens
        self.core_epoch, self.generation = core_epoch, generation
        self._delta = StepDelta()
        self._counts: Ids = np.zeros(max_num_seqs, np.int32)  # tokens per row in the last step
        self._plan = StepPlan(self._counts, self._delta)
        self._growth = TableGrowth(self.rows, kv_cache, self._delta)
        self.batches = Batches(self.rows, self._growth, self._counts, max_num_batched_tokens)
        self.processor = ResultProcessor(self.rows, self._delta, self._release, self.batches.drafting.on_verified)
        self._chunks = ChunkSizes(
            self.rows,
            self.waiting,
            self.features,
            self._counts,
            max_num_batched_tokens,
            long_prefill_token_threshold,
            are_whole=kv_cache.is_of_step,
        )

    # ── requests come and go ─────────────────────────────────────────────────────────────────────────────────────

    def add_requests(self, requests: list[Request]) -> None:
        """Queue the answers of one request; each must fit into an empty pool. If the prompt is longer than a block, and
        blocks are shared, the first computes it and the others wait until they find its blocks."""
        has_blocks = requests[0].num_prompt_tokens > self.kv_cache.block_size
        if len(requests) > 1 and has_blocks and self.kv_cache.shares_blocks(requests[0]):
            self.prompt_groups.add(list(requests))
        for request in requests:
            self._wait(request)

    def _wait(self, request: Request) -> None:
        for wait in self.features.wait:
            wait(request)
        self.waiting.add(request)

    def _release_prompt_groups(self) -> None:
        """Dissolve each prompt group with a leader that has scheduled its whole prompt; the followers may then run."""
        size = self.kv_cache.block_size
        for leader in self.prompt_groups.leaders:
            if leader.row >= 0 and self.rows.num_scheduled[leader.row] >= leader.num_prompt_tokens:
                for follower in self.prompt_groups.dissolve(leader):
                    follower.block_keys = leader.block_keys[: leader.num_prompt_tokens // size]
                    self.waiting.release(follower, WaitReason.PROMPT)

    def abort(self, request: Request) -> None:
        """Abort a waiting or running request; its row and blocks are free at once."""
        successor = self.prompt_groups.remove(request)
        is_running = request.state is State.RUNNING
        request.move(State.FINISHED)
        if is_running:
            self._release(request)
        else:
            self.waiting.forget(request)
        if successor is not None:
            self.waiting.release(successor, WaitReason.PROMPT)

    def begin_masks(self, request: Request) -> None:
        """Let each further token of a request wait for its mask. What a step in flight samples for the request has
        none, so it is void: the next step computes the request's last known token again, in the same block."""
        row = request.row
        request.is_masked = True
        if row < 0:
            return
        self.rows.is_masked[row] = True
        self.rows.version += 1
        if self.rows.num_scheduled[row] >= self.rows.num_tokens[row]:
            self.rows.void_samples(row)
            self._delta.free(row)
            self._delta.admit(request, request.num_tokens - 1)

    def end_masks(self, request: Request) -> None:
        """Let each further token of a request be sampled without a mask."""
        request.is_masked = False
        if request.row >= 0:
            self.rows.is_masked[request.row] = False
            self.rows.version += 1

    def in_work(self) -> dict[Request, int]:
        """Return the requests on which the workers work now, with their numbers of known tokens: the requests of the
        oldest step in flight, and those that a feature names."""
        oldest = self.ledger.oldest
        named = [request for feature in self.features.in_order for request in feature.in_work(oldest)]
        found = {request: self.rows.num_known(request) for request in named}
        if oldest is not None:
            found |= self.rows.known_tokens_of(oldest.batch.rows, oldest.batch.epochs)
        return found

    def take_step(self) -> int:
        """Return the number of the next step, for a message that takes its place. No step may be in flight."""
        self.num_steps += 1
        return self.num_steps

    def reset(self, *, shares_prompts: bool = True) -> None:
        """Drop all computed blocks and steps in flight: running requests wait again, and the pool caches nothing.

        shares_prompts: prompt groups re-form, so that one request computes the prompt for all."""
        running = list(self.rows.requests())
        if shares_prompts:
            self.prompt_groups.reunite(running)
        for request in running:
            self.preempt(request)
        for feature in self.features.in_order:
            feature.reset(self.ledger.entries)
        self.ledger.entries.clear()
        self.kv_cache.reset()
        self._delta.clear()

    def begin_generation(self, generation: int) -> None:
        """Count the steps of a new worker group from 1, after `reset`."""
        self.generation, self.num_steps = generation, 0
        self.kv_cache.begin_generation(generation)

    def has_work(self) -> bool:
        has_requests = self.rows.num_active > 0 or len(self.waiting) > 0
        return has_requests or any(is_due() for is_due in self.features.is_due)

    # ── a step is made ───────────────────────────────────────────────────────────────────────────────────────────

    def schedule(self) -> SchedulerOutput | None:
        """Choose the tokens of the next step, admit and preempt requests for it, enter it in the ledger and return its
        message. None if no row has anything to compute and no feature has an order."""
        batch = self.batches.repeated()
        if batch is not None:
            budget = self._budget - batch.num_tokens
            if (rows := batch.rows_at_block_end()) is not None:
                self._grow_decodes(rows)
        else:
            self._counts[:] = 0
            ahead = self.rows.schedulable()
            for limit in self.features.limit:
                limit(ahead)
            budget = self._schedule_decodes(ahead)
            if self.rows.have_states:
                budget = self._schedule_prefills(self.rows.take_late(ahead), budget)
            budget = self._schedule_prefills(ahead, self._pace(budget))
        if self.waiting:
            self._admit_waiting(budget if batch is None else self._pace(budget))
        if batch is None or batch.version != self.rows.version:
            batch = self.batches.new()
        self._plan.number = self.num_steps + 1
        for plan in self.features.plan:
            plan(self._plan)
        if batch is None and self._delta.has_orders:
            batch = self.batches.empty()
        return None if batch is None else self._commit(batch)

    def _pace(self, budget: int) -> int:
        """Return the part of the budget left that prompts may use without delaying the decoding rows too much."""
        num_decodes = int(np.count_nonzero(self._counts))
        num_later = sum(num_later() for num_later in self.features.num_later)
        num_prompts = self.rows.num_active - num_decodes + len(self.waiting) - num_later
        return self.prefill_throttle.limit(num_decodes, num_prompts, budget)

    def _schedule_decodes(self, ahead: Ids) -> int:
        """Schedule one token for each row that can compute exactly one; return the rest of the budget."""
        rows, counts = self.rows, self._counts
        counts[ahead == 1] = 1
        self._grow_decodes(np.flatnonzero((counts > 0) & (rows.num_scheduled % rows.block_size == 0)))
        return self._budget - int(np.count_nonzero(counts))

    def _grow_decodes(self, rows: npt.NDArray[np.integer]) -> None:
        """Cache the blocks of these rows, which are full of tokens already sent, and give each row another block. If
        the pool is short, rows get theirs in the policy's order, and requests after them are preempted."""
        state, size = self.rows, self.rows.block_size
        assert len(self.ledger) < 2, "what one step in flight samples lies behind those blocks: their tokens are known"
        if not self.kv_cache.has_room(len(rows)):
            rows = np.array(state.in_order(rows))
        state.num_cached_blocks[rows] = counts = state.num_scheduled[rows] // size
        for row, num_blocks in zip(rows.tolist(), counts.tolist(), strict=True):
            request = state.request_by_row[row]
            if request is None:  # preempted by a row before it in this loop
                continue
            self.kv_cache.cache_blocks(request, num_blocks)
            num_tokens = num_blocks * size + 1
            if not self._growth.grow(request, num_tokens):
                self._grow(request, num_tokens)

    def _schedule_prefills(self, ahead: Ids, budget: int) -> int:
        """Schedule a chunk for each running row with more than one known token to compute, in the policy's order while
        the budget lasts; return the rest of it."""
        rows = self.rows
        for row in self.tenants.in_order(np.flatnonzero(ahead > 1)):
            request = rows.request_by_row[row]
            if budget <= 0:
                break
            if request is None:  # preempted by a row before it in this loop
                continue
            count = self._chunks.of(request, int(ahead[row]), budget)
            if self._grow(request, int(rows.num_scheduled[row]) + count):
                self._counts[row] = count
                budget -= count
        return budget

    def _grow(self, request: Request, num_tokens: int) -> bool:
        """Extend a request's blocks to `num_tokens` tokens; if needed, preempt requests after it in order. Return False
        if the pool has too few blocks even then: the request itself was preempted."""
        while not self._growth.grow(request, num_tokens):
            victim = self._preemption.cheapest_behind(request) or request
            self.preempt(victim)
            if victim is request:
                return False
        return True

    def preempt(self, request: Request) -> None:
        """Return a running request to the queue. Its tokens are computed again, or found in the prefix cache."""
        self._counts[request.row] = 0
        self.num_recomputed_tokens += int(self.rows.num_scheduled[request.row] - self.rows.num_drafts[request.row])
        self._release(request)
        request.move(State.WAITING)
        request.num_preemptions += 1
        self.num_preemptions += 1
        self._wait(request)

    def _release(self, request: Request) -> None:
        """Free the row and the blocks of a running request; full blocks stay findable until they are reused."""
        row = request.row
        num_sent = int(self.rows.num_written(np.array([row]))[0])
        self.kv_cache.cache_blocks(request, num_sent // self.rows.block_size)
        self.rows.vacate(row)
        self.kv_cache.free(request)
        self._delta.free(row)
        for leave in self.features.leave:
            leave(request, self.num_steps)

    def _admit_waiting(self, budget: int) -> None:
        """Admit waiting requests in order while budget, rows and blocks last; they may preempt running ones. A request
        that does not fit is overtaken, at most MAX_SKIPS times."""
        skipped: list[Request] = []
        held: list[Request] = []
        num_victims = 0
        for make_room in self.features.make_room:
            make_room()
        while budget > 0 and len(skipped) < MAX_SKIPS_PER_STEP:
            if not self.rows.has_free and not self._preemption.may_help(num_victims):
                break
            request = self.waiting.pop()
            if request is None:
                break
            if any(holds(request) for holds in self.features.holds):
                held.append(request)
                continue
            if any(closes(request) for closes in self.features.closes):
                held.append(request)
                break
            victims = self._preemption.victims(request, num_victims)
            num_victims += len(victims)
            for victim in victims:
                budget += int(self._counts[victim.row])
                self.preempt(victim)
            count = self._admit(request, budget) if self.rows.has_free else None
            if count is not None:
                budget -= count
                for passed in skipped:
                    passed.num_skips += 1
                continue
            skipped.append(request)
            if request.num_skips >= MAX_SKIPS:
                break
        for request in skipped + held:
            self.waiting.add(request)

    def _admit(self, request: Request, budget: int) -> int | None:
        """Move a waiting request to a row; return the number of its tokens in this step, or None if it does not fit or
        its blocks are to be loaded first."""
        if self._chunks.defers(request, budget):
            return None
        computed = self.kv_cache.get_computed_blocks(request)
        if self.kv_cache.num_missing(request, computed, self.rows.num_active) > 0:  # each running row may need a block
            return None
        if not self.kv_cache.take_computed(request, computed, has_rows=self.rows.num_active > 0):
            return None
        num_computed = request.num_blocks * self.kv_cache.block_size
        if request.num_cached_tokens < 0:
            request.num_cached_tokens = 0 if request.num_output_tokens else num_computed
        request.num_skips = 0
        request.move(State.RUNNING)
        row = self.rows.occupy(request, num_computed)
        for admit in self.features.admit:
            admit(request, num_computed)
        self._delta.admit(request, num_computed)
        count = self._chunks.of(request, request.num_tokens - num_computed, budget)
        has_room = self._grow(request, num_computed + count)
        assert has_room, "num_missing has counted the blocks"
        self._counts[row] = count
        return count

    def _cache_full_blocks(self, rows: npt.NDArray[np.intp]) -> None:
        """Cache those blocks of `rows` that the scheduled steps fill with known tokens; later steps may read them."""
        state = self.rows
        num_full = state.num_written(rows) // state.block_size
        is_more = num_full > state.num_cached_blocks[rows]
        if is_more.any():
            rows, num_full = rows[is_more], num_full[is_more]
            state.num_cached_blocks[rows] = num_full
            for row, num_blocks in zip(rows.tolist(), num_full.tolist(), strict=True):
                if (request := state.request_by_row[row]) is not None:
                    self.kv_cache.cache_blocks(request, num_blocks)

    def _commit(self, batch: Batch) -> SchedulerOutput:
        """Advance the rows by the next step of the batch, enter it in the ledger and return its message."""
        self.num_steps += 1
        states = self._growth.states
        if states is not None:
            self._delta.move_states(states.group, states.enter())
        self.rows.num_scheduled += self._counts
        if not batch.num_sent:
            self._cache_full_blocks(batch.rows)
            if self.prompt_groups:
                self._release_prompt_groups()
        self.ledger.add(self.num_steps, batch, self.kv_cache.take_pending(), self._delta)
        output = self._delta.take(self.num_steps, self.core_epoch, self.generation, batch)
        if states is not None:
            states.release()
        return output

    # ── results of steps ─────────────────────────────────────────────────────────────────────────────────────────

    def update_from_output(self, output: ModelRunnerOutput) -> tuple[LedgerEntry, NewTokens, list[FinishedRequest]]:
        """Apply the result of the oldest step in flight; return its ledger entry, the new tokens and the finished
        requests. ProtocolError if it is the result of another step, or does not fit this one."""
        entry = self.ledger.oldest_of(output.step)
        if entry.pending_blocks:
            self.kv_cache.mark_written(entry.pending_blocks)
        new_tokens, finished = self.processor.process(output, entry)
        self.ledger.entries.popleft()  # last: if the result is invalid, the step must be lost with its workers
        if finished and not self.ledger.entries:  # perhaps no step follows that would bring the answers' last blocks
            self.kv_cache.mark_written(self.kv_cache.take_pending())
        return entry, new_tokens, finished

    # ── for tests ────────────────────────────────────────────────────────────────────────────────────────────────

    def check_invariants(self) -> None:
        """Raise AssertionError unless pool, tables and columns agree."""
        running = self.rows.requests()
        self.kv_cache.check_invariants({request: self.rows.first_token(request.row) for request in running})
        self.rows.check_invariants()
        if self._growth.states is not None:
            self._growth.states.check_invariants()
        for feature in self.features.in_order:
            feature.check_invariants([*self.waiting, *running])
        assert all(request.state is State.WAITING and not request.tables for request in self.waiting)
        if not self.has_work():
            assert self.kv_cache.is_idle, "blocks leaked"
