"""EngineCore: schedules requests, sends steps, applies results and collects outputs. The core without its sockets.

Owns the scheduler and the table of requests. Frontends are numbers here (`frontend_id`); the workers are an Executor.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from ..ipc.codec import num_ids
from ..ipc.errors import ErrorInfo, InternalError, TokenloomError, error_info
from ..ipc.kv.pool_shape import PoolShape
from ..ipc.messages.base import CacheMisses, FinishReason, MemoryTag, PauseMode
from ..ipc.messages.core import EngineCoreOutputs, EngineCoreRequest, Finished, Missed, Started
from ..ipc.messages.supervisor import Progress
from ..ipc.messages.workers import ModelRunnerOutput, SchedulerOutput, TokenMask
from ..ipc.process.awake_clock import AwakeClock
from ..ipc.spec.config.engine_spec import EngineSpec
from .admission import Admission, reason_to_stop
from .deadlines import Deadlines
from .features.crash_isolation import CRASHES_TO_FAIL
from .features.new import Surroundings, new_features
from .hang_detector import HangDetector, StepTimer
from .kv.block_record import BlockRecord
from .kv.kv_sizes import KVSizes
from .kv.manager import KVCacheManager
from .outbox import Outbox
from .request import Request
from .scheduling.result_processor import FinishedRequest, NewTokens
from .scheduling.scheduler import Scheduler
from .stats import CoreStats

BEAT_S = 0.5  # period of the clock for step and grammar limits


class Executor(Protocol):
    """Interface of the workers, which get steps and token masks. Their results come through EngineCore.on_result."""

    def send(self, message: SchedulerOutput | TokenMask) -> None: ...


class EngineCore:
    """The core without its sockets: `step` sends steps, `on_result` applies results, `take_outputs` returns messages
    for the frontends. Invariant: each unfinished request is in the table of requests and in the scheduler."""

    def __init__(
        self,
        spec: EngineSpec,
        pool: PoolShape,
        executor: Executor,
        surroundings: Surroundings,
        *,
        core_epoch: int = 0,
        generation: int = 0,
        record: BlockRecord | None = None,
        clock: AwakeClock | None = None,
        asleep: list[MemoryTag] | None = None,
    ) -> None:
        """record: file with the keys of the blocks that this generation of workers has computed. clock: the caller's
        clock, if the caller advances it, too. asleep: the kinds of memory that the workers have freed."""
        config = spec.config
        self._config = config
        self._executor = executor
        self._outbox = Outbox()
        self.asleep: list[MemoryTag] = asleep or []  # memory that the workers have freed: no step runs until it is back
        self.deadlines = Deadlines()
        self._clock = clock or AwakeClock(BEAT_S)
        self._request_by_id: dict[tuple[int, int], Request] = {}
        self.open_requests = self._request_by_id.values()  # a view
        self.stats = CoreStats()
        self.scheduler = Scheduler(
            KVCacheManager(
                KVSizes(spec.kv_groups, pool, config.block_size, spec.step_tokens, spec.max_model_len),
                spec.shares_prefixes,
                record,
            ),
            max_num_seqs=config.max_num_seqs,
            max_model_len=spec.max_model_len,
            max_num_batched_tokens=spec.max_num_batched_tokens,
            long_prefill_token_threshold=config.long_prefill_token_threshold,
            core_epoch=core_epoch,
            generation=generation,
            preempts_for_waiting=config.scheduling_policy == "priority",
        )
        features = new_features(self, spec, self.scheduler, self._clock, surroundings)
        self._pause, self._isolation, self.offload, self.adapters, self.media, self.grammars = features
        self.features = self.scheduler.features
        detector = HangDetector(config.step_timeout_s)
        self.step_timer = StepTimer(self._clock, detector, self.scheduler.prefill_throttle, self.media)
        self._admission = Admission(spec, self.scheduler, self.stats)

    # ── requests ─────────────────────────────────────────────────────────────────────────────────────────────────

    def add_request(self, frontend_id: int, message: EngineCoreRequest) -> None:
        """Queue the answers of a request, in place of those of an earlier attempt, or report an error as their end if
        the request is refused. If the attempt is not newer than the known one, only report it as accepted again."""
        first = message.children[0].key
        known = self._request_by_id.get((frontend_id, first))
        if known is not None and known.attempt >= message.attempt:
            self._outbox.of(frontend_id).accepted.append(first)
            return
        try:
            self._admission.check(message)
        except TokenloomError as error:
            failed = [Finished(key=child.key, reason="error", error=error_info(error)) for child in message.children]
            self._outbox.of(frontend_id).finished += failed
            return
        if added := [*filter(self._add_answer, self._admission.requests_of(frontend_id, message))]:
            self.scheduler.add_requests(added)
            if message.num_losses:
                self._isolation.suspect(added, message.num_losses)
                for running in filter(self._isolation.holds, self.scheduler.rows.requests()):
                    self.scheduler.preempt(running)
        self._outbox.of(frontend_id).accepted.append(first)

    def _add_answer(self, request: Request) -> bool:
        """Add one answer in place of an earlier attempt. If its tokens end it already, report that and return False."""
        place = request.frontend_id, request.key
        if (stale := self._request_by_id.pop(place, None)) is not None:
            self.scheduler.abort(stale)
            self._tell_end(stale, None)
        if (reason := reason_to_stop(request)) is not None:
            self._outbox.of(request.frontend_id).finished.append(Finished(key=request.key, reason=reason))
            return False
        self._request_by_id[place] = request
        self.deadlines.add(request)
        for arrive in self.features.arrive:
            arrive(request)
        return True

    def abort(self, frontend_id: int, keys: list[int]) -> None:
        """End requests with "abort"; skip unknown keys, which belong to requests that have finished."""
        for key in keys:
            request = self._request_by_id.get((frontend_id, key))
            if request is not None:
                self.end(request, "abort")

    def expire(self, now: float) -> None:
        """End requests past their deadlines with "timeout", at most MAX_EXPIRED in a call; `now` in unix seconds."""
        for request in self.deadlines.expired(now):
            self.end(request, "timeout")

    def end(self, request: Request, reason: FinishReason, error: ErrorInfo | None = None) -> None:
        """Abort an unfinished request in the scheduler, and report `reason` as its end."""
        self.scheduler.abort(request)
        self._on_finished(FinishedRequest(request, reason, error=error))

    def _on_finished(self, done: FinishedRequest) -> None:
        """Remove a finished request from the table, and queue the report of its end for its frontend."""
        request = done.request
        del self._request_by_id[request.frontend_id, request.key]
        self._tell_end(request, done.reason)
        finished = Finished(
            key=request.key,
            reason=done.reason,
            num_preemptions=request.num_preemptions,
            num_drafts=request.num_drafts,
            num_accepted_drafts=request.num_accepted_drafts,
            error=done.error,
            vector=done.vector,
        )
        self._outbox.of(request.frontend_id).finished.append(finished)

    def _tell_end(self, request: Request, reason: FinishReason | None) -> None:
        for end in self.features.end:
            end(request, reason)

    def drop_frontend(self, frontend_id: int) -> int:
        """End all requests of a lost frontend, and drop its outputs; return the number of requests."""
        requests = [request for request in self.open_requests if request.frontend_id == frontend_id]
        for request in requests:
            self.end(request, "abort")
        self._outbox.drop(frontend_id)
        return len(requests)

    # ── pause and resume ─────────────────────────────────────────────────────────────────────────────────────────

    @property
    def is_paused(self) -> bool:
        return self._pause.mode is not None

    def pause(self, mode: PauseMode) -> None:
        """Pause until `resume`; requests are still accepted. Mode keep: no step is sent. Mode abort: no step is sent,
        and all requests end now. Mode wait: requests that have run before continue to their ends, others wait."""
        self._pause.mode = mode
        if mode == "abort":
            for request in list(self._request_by_id.values()):
                self.end(request, "abort")

    @property
    def is_quiet(self) -> bool:
        """Whether a pause is complete: no step is in flight and, in mode wait, each request that has run has ended."""
        if self._pause.mode == "wait" and any(r.num_cached_tokens >= 0 for r in self.open_requests):
            return False
        return len(self.scheduler.ledger) == 0

    def resume(self) -> None:
        self._pause.mode = None

    def reset_prefix_cache(self) -> None:
        """Empty the prefix cache: the pool, not the tiers. Running requests keep their blocks."""
        self.scheduler.kv_cache.forget_all()

    def clear_kv_cache(self, done: Callable[[], None]) -> None:
        """Empty the pool, the slots, the disk and the remote store of blocks of these weights; then call `done`.
        Running requests keep their blocks. If the tiers are closed, `done` is called at once: their blocks cannot be
        found, and are removed before the tiers open."""
        self.reset_prefix_cache()
        if self.offload is None:
            done()
        else:
            self.offload.clear(done)

    def forget_computed(self) -> None:
        """Drop all blocks of the pool, and close the tiers, before weights change; requests then compute their tokens
        again. Keys are in a random namespace until that of the new weights is known."""
        if self.offload is not None:
            self.offload.close()
        self._reset_scheduler()
        self.enter_namespace(None)

    def enter_namespace(self, namespace: bytes | None) -> None:
        """Compute block keys from now on in the given namespace, or in a random one if None. Requests that hold blocks
        keep their keys."""
        kv_cache = self.scheduler.kv_cache
        if namespace != kv_cache.namespace:
            kv_cache.change_namespace(namespace)
            for request in self._request_by_id.values():
                if not request.tables:
                    request.block_keys = []

    def _reset_scheduler(self) -> None:
        self.scheduler.reset(shares_prompts=not self._isolation.has_suspects)  # suspects must not wait for others

    @property
    def has_suspects(self) -> bool:
        """Whether some requests run alone because one of them may have ended the workers."""
        return self._isolation.has_suspects

    @property
    def num_requests(self) -> int:
        return len(self._request_by_id)

    # ── steps ────────────────────────────────────────────────────────────────────────────────────────────────────

    def step(self) -> int:
        """Schedule and send steps until `steps_in_flight` are in flight, nothing can be computed, or a feature delays
        the next one. Return the number of steps sent: 0 while memory is asleep or a pause (keep, abort) lasts."""
        scheduler = self.scheduler
        num_sent = 0
        if self._pause.mode in ("keep", "abort") or self.asleep:
            return 0
        while len(scheduler.ledger.entries) < self._config.steps_in_flight and scheduler.has_work():
            if scheduler.ledger.entries and self.features.delays_step():
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
        if self.grammars.is_active:
            self.grammars.want_masks()
        return num_sent

    def report_misses(self, request: Request, misses: CacheMisses) -> None:
        self._outbox.of(request.frontend_id).missed.append(Missed(key=request.key, misses=misses))

    def _announce_started(self, output: SchedulerOutput) -> None:
        for new_row in output.new_rows:
            request = self.scheduler.rows.request(new_row.row)
            if not request.is_announced:
                request.is_announced = True
                cached, loaded = request.num_cached_tokens, request.num_loaded_tokens
                started = Started(key=request.key, num_cached_tokens=cached, num_loaded_tokens=loaded)
                self._outbox.of(request.frontend_id).started.append(started)

    def on_result(self, output: ModelRunnerOutput) -> None:
        """Apply the result of the oldest step in flight, and queue its tokens and the ends of requests. ProtocolError
        if it does not fit that step."""
        begun_at = time.monotonic()
        entry, new_tokens, finished = self.scheduler.update_from_output(output)
        batch = entry.batch
        self.step_timer.on_step(entry, output.execute_s)
        self._outbox.add_tokens(new_tokens)
        for done in finished:
            self._on_finished(done)
        for on_feature_result in self.features.on_result:
            on_feature_result(entry, output, new_tokens)
        now = time.monotonic()
        num_new = num_ids(new_tokens.token_ids)
        num_prefilled, execute_s = batch.num_prefilled_tokens, output.execute_s
        if len(batch.rows):
            self.stats.on_step(len(batch.rows), batch.num_tokens, num_prefilled, num_new, execute_s, now)
        self.stats.host_s += now - begun_at

    def send_masks(self, masks: TokenMask) -> None:
        self.step_timer.begin()
        self._executor.send(masks)

    def append_jump_tokens(self, jumps: list[tuple[Request, list[int]]]) -> NewTokens:
        new_tokens = self.scheduler.processor.append_jump_tokens(jumps)
        self.stats.num_generated_tokens += num_ids(new_tokens.token_ids)
        self._outbox.add_tokens(new_tokens, are_jump_tokens=True)
        return new_tokens

    @property
    def overdue_at(self) -> float | None:
        """Time by the clock at which the oldest step in flight counts as hung; None without one, or if it waits for
        masks."""
        entry = self.scheduler.ledger.oldest
        if entry is None or self.grammars.is_awaiting_masks:
            return None
        return self.step_timer.overdue_at(entry)

    def look(self) -> float:
        """Advance the clock and return its time. After a suspension of this process the time limit of the oldest step
        starts again, at most MAX_EXCUSES times: the workers may have been suspended, too."""
        return self.step_timer.look(self.scheduler.num_steps, has_step=len(self.scheduler.ledger) > 0)

    def lose_workers(self, reason: str) -> None:
        """Return every running request to the queue with nothing computed. A request that is proven to end the workers
        fails with an error that quotes `reason`; if the workers were loading its adapter, all requests with that
        adapter fail."""
        culprit = self._isolation.on_loss(self.scheduler.in_work())
        is_loading = culprit is not None and culprit.row < 0
        self._reset_scheduler()
        if culprit is not None and culprit.adapter is not None and is_loading:
            self.adapters.give_up(culprit.adapter, f"the workers have ended while they did nothing else: {reason}")
        elif culprit is not None:
            message = f"this request has ended the workers {CRASHES_TO_FAIL} times and was given up; last: {reason}"
            self.end(culprit, "error", error_info(InternalError(message)))

    def gain_workers(self, executor: Executor, generation: int) -> None:
        """Use a new worker group; its steps count from 1."""
        self._executor = executor
        self.scheduler.begin_generation(generation)
        if self.offload is not None:
            self.offload.on_workers_ended()
        self.step_timer.reset()

    def progress(self, now: float) -> Progress | None:
        """Return the report for the supervisor, or None if none is due; `now` in monotonic seconds."""
        is_idle, is_asleep = not self._request_by_id, bool(self.asleep)
        return self.stats.progress(self.scheduler, now, is_idle=is_idle, is_paused=self.is_paused, is_asleep=is_asleep)

    def take_outputs(self) -> list[tuple[int, EngineCoreOutputs]]:
        return self._outbox.take()
