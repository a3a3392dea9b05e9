"""EngineCore: schedules requests, sends steps, applies results and collects outputs. The core without its sockets.

Owns the scheduler and the table of requests. Frontends are numbers here (`frontend_id`); the workers are an Executor.
"""

from __future__ import annotations

import time
from typing import Protocol

from ..ipc.codec import decode_ids, encode_ids, num_ids
from ..ipc.config.engine_spec import EngineSpec
from ..ipc.errors import ErrorInfo, InternalError, TokenloomError, error_info
from ..ipc.messages.base import BulkArray, FinishReason, MemoryTag
from ..ipc.messages.client import PauseMode
from ..ipc.messages.core import EngineCoreOutputs, EngineCoreRequest, Finished, Started
from ..ipc.messages.supervisor import Progress
from ..ipc.messages.workers import ModelRunnerOutput, SchedulerOutput, TokenMask
from ..ipc.process.awake_clock import AwakeClock
from .admission import Admission, reason_to_stop
from .crash_isolation import CRASHES_TO_FAIL, CrashIsolation
from .deadlines import Deadlines
from .grammar.manager import GrammarHost, GrammarManager, RequestMask, may_jump
from .hang_detector import StepTimer
from .kv.block_hash import random_namespace
from .kv.block_record import BlockRecord
from .kv.manager import KVCacheManager
from .outbox import Outbox
from .request import Request, State, WaitReason
from .result_processor import NewTokens
from .scheduling.scheduler import Scheduler
from .stats import CoreStats

BEAT_S = 0.5  # period of the clock for step and grammar limits


class Executor(Protocol):
    """The workers: steps go in, results come back through EngineCore.on_result."""

    def send(self, message: SchedulerOutput | TokenMask) -> None: ...


class EngineCore:
    """Invariant: each unfinished request is in the table, and in the scheduler. `step` sends steps; `take_outputs`
    returns the messages for the frontends."""

    def __init__(
        self,
        spec: EngineSpec,
        num_blocks: int,
        executor: Executor,
        grammar_host: GrammarHost,
        *,
        core_epoch: int = 0,
        generation: int = 0,
        record: BlockRecord | None = None,
        clock: AwakeClock | None = None,
        asleep: list[MemoryTag] | None = None,
    ) -> None:
        """record: of the blocks of this generation. clock: the caller reads it, too. asleep: tags of memory that the
        workers do not hold."""
        config = spec.config
        self._config = config
        self._executor = executor
        self._outbox = Outbox()
        self._pause_mode: PauseMode | None = None
        self.asleep: list[MemoryTag] = asleep or []  # parts of the workers' memory; no step runs until all are awake
        self._deadlines = Deadlines()
        self._crash_isolation = CrashIsolation()
        self._clock = clock or AwakeClock(BEAT_S)
        self.step_timer = StepTimer(self._clock, config.step_timeout_s)
        self._request_by_id: dict[tuple[int, int], Request] = {}
        self.stats = CoreStats()
        self.scheduler = Scheduler(
            KVCacheManager(num_blocks, config.block_size, config.enable_prefix_caching, record),
            max_num_seqs=config.max_num_seqs,
            max_model_len=spec.max_model_len,
            max_num_batched_tokens=spec.max_num_batched_tokens,
            long_prefill_token_threshold=config.long_prefill_token_threshold,
            core_epoch=core_epoch,
            generation=generation,
            is_held=self._is_held,
            preempts_for_waiting=config.scheduling_policy == "priority",
        )
        self._admission = Admission(spec, self.scheduler.kv_cache, self.scheduler.waiting, self.stats)
        self._grammar_host = grammar_host
        self._grammars = GrammarManager(grammar_host, config.grammar_timeout_s, self.scheduler.output_tokens)
        self._has_grammars = False  # of requests, of steps in flight or with the host
        self._masked_step = 0  # the last step with requested masks

    # ── requests ─────────────────────────────────────────────────────────────────────────────────────────────────

    def add_request(self, frontend_id: int, message: EngineCoreRequest) -> None:
        """Accept a request, or finish it with an error. A resubmission (it has tokens) is never refused for load."""
        first = message.children[0].key
        known = self._request_by_id.get((frontend_id, first))
        if known is not None and known.attempt >= message.attempt:
            self._outbox.accept(frontend_id, first)
            return
        try:
            self._admission.check(message)
        except TokenloomError as error:
            for child in message.children:
                self._outbox.finish(frontend_id, Finished(key=child.key, reason="error", error=error_info(error)))
            return
        is_alone = message.params.skip_reading_prefix_cache or not self._config.enable_prefix_caching
        is_private = len(message.children) > 1 and is_alone
        root = random_namespace() if is_private else None
        requests = [self._admission.request_of(frontend_id, message, i, root) for i in range(len(message.children))]
        if added := [request for request in requests if self._note(request)]:
            self.scheduler.add_requests(added)
        self._outbox.accept(frontend_id, first)

    def _note(self, request: Request) -> bool:
        """Enter one answer in place of an earlier attempt. False if its tokens end it already."""
        place = request.frontend_id, request.key
        if (stale := self._request_by_id.pop(place, None)) is not None:
            self.scheduler.abort(stale)
            self._grammars.drop(stale)
        if (reason := reason_to_stop(request)) is not None:
            self._outbox.finish(request.frontend_id, Finished(key=request.key, reason=reason))
            return False
        self._request_by_id[place] = request
        self._deadlines.add(request)
        if request.params.structured_outputs is not None:
            self._grammars.add(request, self._clock.now)
            self._has_grammars = True
        return True

    def abort(self, frontend_id: int, keys: list[int]) -> None:
        """Abort requests. Unknown keys belong to requests that have finished."""
        for key in keys:
            request = self._request_by_id.get((frontend_id, key))
            if request is not None:
                self._end(request, "abort")

    def expire(self, now: float) -> None:
        """Finish the requests past their deadlines; `now` in unix seconds."""
        for request in self._deadlines.expired(now):
            self._end(request, "timeout")

    @property
    def next_deadline(self) -> float | None:
        """When to call `expire` next, in unix seconds."""
        return self._deadlines.next

    def _end(self, request: Request, reason: FinishReason, error: ErrorInfo | None = None) -> None:
        del self._request_by_id[request.frontend_id, request.key]
        self.scheduler.abort(request)
        self._finish(request, reason, error)

    def drop_frontend(self, frontend_id: int) -> int:
        """End all requests of a frontend that has gone; return how many."""
        requests = [request for (of, _), request in self._request_by_id.items() if of == frontend_id]
        for request in requests:
            del self._request_by_id[frontend_id, request.key]
            self.scheduler.abort(request)
            self._grammars.drop(request)
        self._outbox.drop(frontend_id)
        return len(requests)

    def _finish(
        self,
        request: Request,
        reason: FinishReason,
        error: ErrorInfo | None = None,
        vector: BulkArray | None = None,
    ) -> None:
        finished = Finished(key=request.key, reason=reason, num_preemptions=request.num_preemptions, error=error)
        self._outbox.finish(request.frontend_id, finished, vector)
        self._grammars.drop(request)

    # ── pause and resume ─────────────────────────────────────────────────────────────────────────────────────────

    @property
    def is_paused(self) -> bool:
        return self._pause_mode is not None

    def pause(self, mode: PauseMode) -> None:
        """Stop admitting requests. keep: running requests stop where they are; wait: they finish first; abort: all
        end."""
        self._pause_mode = mode
        if mode == "abort":
            for request in list(self._request_by_id.values()):
                self._end(request, "abort")

    @property
    def is_quiet(self) -> bool:
        """Whether a pause is complete: no step is in flight and, in mode wait, every request that has run is
        finished."""
        if self._pause_mode == "wait" and any(r.num_cached_tokens >= 0 for r in self._request_by_id.values()):
            return False
        return len(self.scheduler.ledger) == 0

    def resume(self) -> None:
        self._pause_mode = None

    def reset_prefix_cache(self) -> None:
        """Empty the prefix cache. Running requests keep their blocks."""
        self.scheduler.kv_cache.forget_idle()
        for request in self._request_by_id.values():
            if not request.block_ids:
                request.block_keys = []

    def forget_computed(self) -> None:
        """Drop all computed and cached blocks after new weights; requests continue from their tokens."""
        self._reset_scheduler()
        self.scheduler.kv_cache.change_namespace()
        for request in self._request_by_id.values():
            request.block_keys = []

    def _reset_scheduler(self) -> None:
        self.scheduler.reset(
            shares_prompts=not self._crash_isolation.has_suspects
        )  # a suspect must not wait for its prompt group

    def _is_held(self, request: Request) -> bool:
        is_new = request.num_cached_tokens < 0
        return self._crash_isolation.is_held(request) or (self._pause_mode == "wait" and is_new)

    @property
    def num_requests(self) -> int:
        return len(self._request_by_id)

    # ── steps ────────────────────────────────────────────────────────────────────────────────────────────────────

    def step(self) -> int:
        """Schedule and send steps until enough are in flight or nothing can be computed; return how many."""
        scheduler = self.scheduler
        num_sent = 0
        if self._pause_mode in ("keep", "abort") or self.asleep:
            return 0
        while len(scheduler.ledger.entries) < self._config.steps_in_flight and scheduler.has_work():
            if self._has_grammars and self._awaits_masks:
                break
            begun_at = time.monotonic()
            output = scheduler.schedule()
            if output is None:
                break
            scheduled_at = time.monotonic()
            if output.new_rows:
                self._announce_started(output)
            self._executor.send(output)
            self.step_timer.begin()
            self.stats.on_sent(scheduled_at - begun_at, time.monotonic() - scheduled_at)
            num_sent += 1
        if self._has_grammars:
            self._want_masks()
        return num_sent

    def _announce_started(self, output: SchedulerOutput) -> None:
        for new_row in output.new_rows:
            request = self.scheduler.rows.request(new_row.row)
            if request.num_preemptions == 0:
                started = Started(key=request.key, num_cached_tokens=request.num_cached_tokens)
                self._outbox.start(request.frontend_id, started)

    def on_result(self, output: ModelRunnerOutput) -> None:
        """Apply the result of a step."""
        begun_at = time.monotonic()
        entry, new_tokens, finished = self.scheduler.update_from_output(output)
        batch = entry.batch
        if self.step_timer.on_step(entry.step, batch.num_tokens, output.execute_s, scores_prompts=batch.scores_prompts):
            num_decodes = batch.num_tokens - batch.num_prompt_tokens
            self.scheduler.prefill_throttle.on_step(num_decodes, batch.num_prompt_tokens, output.execute_s)
        self._outbox.add_tokens(new_tokens)
        for done in finished:
            del self._request_by_id[done.request.frontend_id, done.request.key]
            self._finish(done.request, done.reason, done.error, done.vector)
        if new_tokens.token_owners.has_grammar:
            self._tell_grammars(new_tokens)
        if self._crash_isolation.is_watching:
            self._crash_isolation.on_progress(self.scheduler.known_tokens())
        if self._has_grammars:
            self._want_masks()
        now = time.monotonic()
        num_new = num_ids(new_tokens.token_ids)
        num_prefilled, execute_s = batch.num_prefilled_tokens, output.execute_s
        self.stats.on_step(len(batch.rows), batch.num_tokens, num_prefilled, num_new, execute_s, now)
        self.stats.host_s += now - begun_at

    def _tell_grammars(self, new: NewTokens, *, are_jump_tokens: bool = False) -> None:
        pairs = zip(new.token_owners.grammar_ids.tolist(), decode_ids(new.token_ids), strict=True)
        self._grammars.advance([pair for pair in pairs if pair[0]], are_jump_tokens=are_jump_tokens)

    # ── grammars ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _want_masks(self) -> None:
        """Request the masks of the oldest step in flight: all tokens before its samples are known by now."""
        entry = self.scheduler.ledger.oldest
        if entry is not None and entry.step > self._masked_step and entry.batch.grammar_ids:
            self._masked_step = entry.step
            if not self._grammars.want_masks(entry.batch.grammar_ids):
                self._send_masks([])
        self._grammars.flush(self._clock.now)

    def take_grammars(self) -> None:
        """Apply the answers of the grammar host: admit, finish or fail requests, and send the masks of the oldest
        step."""
        if not (self._has_grammars or self._grammar_host.has_process):
            return
        news = self._grammars.take(self._clock.look())
        for request in news.ready:
            self.scheduler.waiting.release(request, WaitReason.GRAMMAR)
        for request in news.complete:
            if request.state is not State.FINISHED:
                self._end(request, "stop")
        for request, error in news.failed:
            if request.state is not State.FINISHED:
                self._end(request, "error", error)
        if news.masks is not None:
            self._send_masks(news.masks)
            self._append_jump_tokens(news.masks)
        is_in_step = any(entry.batch.grammar_ids for entry in self.scheduler.ledger.entries)
        self._has_grammars = is_in_step or not self._grammars.is_idle

    def _send_masks(self, masks: list[RequestMask]) -> None:
        """Send the masks of requests that have a row. A row that got another request since the step ignores its
        mask."""
        placed = [mask for mask in masks if mask.request.row >= 0]
        self.step_timer.begin()
        self._executor.send(
            TokenMask(
                step=self._masked_step,
                core_epoch=self.scheduler.core_epoch,
                generation=self.scheduler.generation,
                rows=encode_ids(mask.request.row for mask in placed),
                bits=b"".join(mask.bits for mask in placed),
            )
        )

    def _append_jump_tokens(self, masks: list[RequestMask]) -> None:
        """Append jump-forward tokens, so that the next step computes them together. A single token is left to the step
        in flight, which samples it."""
        forced = [(mask.request, mask.jump_tokens) for mask in masks if len(mask.jump_tokens) > 1]
        if forced := [(request, token_ids) for request, token_ids in forced if may_jump(request.params)]:
            new_tokens = self.scheduler.append_jump_tokens(forced)
            self.stats.num_generated_tokens += num_ids(new_tokens.token_ids)
            self._outbox.add_jump_tokens(new_tokens)
            self._tell_grammars(new_tokens, are_jump_tokens=True)

    @property
    def _awaits_masks(self) -> bool:
        """Whether the oldest step waits for masks. Its masks may make more tokens known, so no step is scheduled
        before."""
        entry = self.scheduler.ledger.oldest
        if entry is None or not entry.batch.grammar_ids:
            return False
        return entry.step > self._masked_step or self._grammars.is_awaiting_masks

    @property
    def next_grammar_deadline(self) -> float | None:
        """When to call `take_grammars` next if the host sends nothing; by the clock."""
        return self._grammars.next_deadline

    @property
    def overdue_at(self) -> float | None:
        """When the oldest step in flight counts as hung; by the clock."""
        entry = self.scheduler.ledger.oldest
        if entry is None or self._grammars.is_awaiting_masks:
            return None
        return self.step_timer.overdue_at(entry.batch.num_tokens, scores_prompts=entry.batch.scores_prompts)

    def on_suspended(self) -> None:
        """Restart the time limit of the oldest step, since the workers may have been suspended with this process."""
        self.step_timer.on_suspended(self.scheduler.num_steps, has_step=len(self.scheduler.ledger) > 0)

    def lose_workers(self, reason: str) -> None:
        """Return every running request to the queue with nothing computed. A request that is proven to kill the
        workers fails."""
        culprit = self._crash_isolation.on_loss(self.scheduler.known_tokens_in_oldest_step())
        self._reset_scheduler()
        self._grammars.forget_masks()
        if culprit is not None:
            message = f"this request has ended the workers {CRASHES_TO_FAIL} times and was given up; last: {reason}"
            self._end(culprit, "error", error_info(InternalError(message)))

    def gain_workers(self, executor: Executor, generation: int) -> None:
        """Use a new worker group; its steps count from 1."""
        self._executor = executor
        self.scheduler.begin_generation(generation)
        self._masked_step = 0
        self.step_timer.reset()

    def progress(self, now: float) -> Progress | None:
        """Return the report for the supervisor and health answers if one is due; `now` in monotonic seconds."""
        is_idle, is_paused, is_asleep = not self._request_by_id, self._pause_mode is not None, bool(self.asleep)
        return self.stats.progress(self.scheduler, now, is_idle=is_idle, is_paused=is_paused, is_asleep=is_asleep)

    def log_line(self, now: float) -> str | None:
        """Return a log line every LOG_INTERVAL_S while there is work."""
        return self.stats.log_line(self.scheduler, now)

    def take_outputs(self) -> list[tuple[int, EngineCoreOutputs]]:
        return self._outbox.take()
