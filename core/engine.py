"""EngineCore: schedules requests, sends steps, applies results and collects outputs. The core without its sockets.

Owns the scheduler and the table of requests. Frontends are numbers here (`frontend_id`); the workers are an Executor.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from ..ipc.codec import num_ids
from ..ipc.errors import ErrorInfo, InternalError, RequestError, TokenloomError, error_info
from ..ipc.messages.base import FinishReason, MemoryTag, PauseMode
from ..ipc.messages.core import EngineCoreOutputs, EngineCoreRequest, Finished, Started
from ..ipc.messages.media import A_MEDIUM, FailedEntry
from ..ipc.messages.supervisor import Progress
from ..ipc.messages.workers import ModelRunnerOutput, SchedulerOutput, TokenMask
from ..ipc.process.awake_clock import AwakeClock
from ..ipc.spec.config.engine_spec import EngineSpec
from .admission import Admission, reason_to_stop
from .deadlines import Deadlines
from .features.adapters.adapter_queue import AdapterQueue
from .features.blobs.needed_blobs import NeededBlobs
from .features.crash_isolation import CRASHES_TO_FAIL, CrashIsolation, noting
from .features.grammar.host import GrammarHost
from .features.grammar.manager import GrammarManager
from .features.grammar.prover import GrammarProver
from .features.media.encode_queue import EncodeQueue
from .features.speculation.lookup import lookup_of
from .features.tiers.options import Tiers
from .hang_detector import HangDetector, StepTimer
from .kv.block_record import BlockRecord
from .kv.manager import KVCacheManager
from .outbox import Outbox
from .request import Request, WaitReason
from .scheduling.result_processor import FinishedRequest, NewTokens
from .scheduling.scheduler import Scheduler
from .scheduling.step.ledger import LedgerEntry
from .scheduling.waiting_queue import WaitingQueue
from .stats import CoreStats

BEAT_S = 0.5  # period of the clock for step and grammar limits


class Executor(Protocol):
    """The workers: steps and token masks go in, results come back through EngineCore.on_result."""

    def send(self, message: SchedulerOutput | TokenMask) -> None: ...


class EngineCore:
    """`step` sends steps, `on_result` applies results, `take_outputs` returns messages for the frontends. Invariant:
    each unfinished request is in the table, and in the scheduler."""

    def __init__(
        self,
        spec: EngineSpec,
        num_blocks: int,
        executor: Executor,
        grammar_host: GrammarHost,
        *,
        grammar_prover: GrammarHost | None = None,
        core_epoch: int = 0,
        generation: int = 0,
        record: BlockRecord | None = None,
        tiers: Tiers | None = None,
        clock: AwakeClock | None = None,
        asleep: list[MemoryTag] | None = None,
        has_exact_drafts: bool = False,
        on_admission: Callable[[Request], None] | None = None,
        blobs: NeededBlobs | None = None,
    ) -> None:
        """grammar_prover: compiles unknown grammars first; None: nothing protects the host from them.

        record: file with the keys of the blocks that this generation of workers has computed. tiers: places for
        blocks outside the pool. clock: given if the caller advances it, too. asleep: parts of their memory that the
        workers do not hold. has_exact_drafts: as in Initialize. on_admission: is called before a request is
        admitted to a step. blobs: those that requests of gateways need, if there are any."""
        config = spec.config
        self._config = config
        self._executor = executor
        self._outbox = Outbox()
        self._pause_mode: PauseMode | None = None
        self.asleep: list[MemoryTag] = asleep or []  # parts of the workers' memory; no step runs until all are awake
        self.deadlines = Deadlines()
        self._crash_isolation = CrashIsolation()
        self._clock = clock or AwakeClock(BEAT_S)
        self._request_by_id: dict[tuple[int, int], Request] = {}
        self.open_requests = self._request_by_id.values()  # a view
        self.stats = CoreStats()
        kv_cache = KVCacheManager(num_blocks, config.block_size, spec.shares_prefixes, record)
        self.offload = None if tiers is None else kv_cache.attach_tiers(*tiers)
        waiting, self._blobs = WaitingQueue(), blobs
        if blobs is not None:
            blobs.connect(waiting, self._end)
        self.adapters = AdapterQueue(spec, waiting, self._clock, self._end, self._is_held)
        self.scheduler = Scheduler(
            kv_cache,
            waiting,
            self.adapters,
            EncodeQueue.of(spec),
            max_num_seqs=config.max_num_seqs,
            max_model_len=spec.max_model_len,
            max_num_batched_tokens=spec.max_num_batched_tokens,
            long_prefill_token_threshold=config.long_prefill_token_threshold,
            core_epoch=core_epoch,
            generation=generation,
            is_held=self._is_held if on_admission is None else noting(self._is_held, on_admission),
            preempts_for_waiting=config.scheduling_policy == "priority",
            are_spans_bidirectional=spec.model.encoder is not None and spec.model.encoder.is_bidirectional,
        )
        if self.offload is not None:
            self.offload.connect(self.scheduler.waiting.release, self._enter_namespace)
        self.speculation = lookup_of(spec, has_exact_drafts=has_exact_drafts)
        self.scheduler.drafting.proposer = self.speculation
        detector = HangDetector(config.step_timeout_s)
        self.step_timer = StepTimer(self._clock, detector, self.scheduler)
        self._admission = Admission(spec, self.scheduler.kv_cache, self.scheduler.waiting, self.stats)
        self.grammars = GrammarManager(
            grammar_host,
            None if grammar_prover is None else GrammarProver(grammar_prover, config.grammar_timeout_s, self._clock),
            self._clock,
            self.scheduler,
            send=self._send_masks,
            end=self._end,
            append=self._append_jump_tokens,
        )

    # ── requests ─────────────────────────────────────────────────────────────────────────────────────────────────

    def add_request(self, frontend_id: int, message: EngineCoreRequest) -> None:
        """Queue the answers of a request, in place of those of an earlier attempt; finish them with an error if the
        request is refused. An attempt that is not newer is accepted again and changes nothing."""
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
                self._crash_isolation.suspect(added, message.num_losses)
                for running in filter(self._crash_isolation.is_held, self.scheduler.rows.requests()):
                    self.scheduler.preempt(running)
        self._outbox.of(frontend_id).accepted.append(first)

    def _add_answer(self, request: Request) -> bool:
        """Add one answer in place of an earlier attempt. If its tokens end it already, report that and return False."""
        place = request.frontend_id, request.key
        if (stale := self._request_by_id.pop(place, None)) is not None:
            self.scheduler.abort(stale)
            self._forget(stale)
        if (reason := reason_to_stop(request)) is not None:
            self._outbox.of(request.frontend_id).finished.append(Finished(key=request.key, reason=reason))
            return False
        self._request_by_id[place] = request
        self.deadlines.add(request)
        if self._blobs is not None:
            self._blobs.add(request)
        if request.params.structured_outputs is not None:
            self.grammars.add(request)
        return True

    def abort(self, frontend_id: int, keys: list[int]) -> None:
        """End requests with "abort"; skip unknown keys, which belong to requests that have finished."""
        for key in keys:
            request = self._request_by_id.get((frontend_id, key))
            if request is not None:
                self._end(request, "abort")

    def expire(self, now: float) -> None:
        """End requests past their deadlines with "timeout", at most MAX_EXPIRED in a call; `now` in unix seconds."""
        for request in self.deadlines.expired(now):
            self._end(request, "timeout")

    def _end(self, request: Request, reason: FinishReason, error: ErrorInfo | None = None) -> None:
        """Abort an unfinished request in the scheduler, and report `reason` as its end."""
        self.scheduler.abort(request)
        self._on_finished(FinishedRequest(request, reason, error=error))

    def _on_finished(self, done: FinishedRequest) -> None:
        """Remove a finished request from the table, and queue the report of its end for its frontend."""
        request = done.request
        if self.speculation is not None:
            self.speculation.on_finished(request, is_whole=done.reason in ("stop", "length"))
        del self._request_by_id[request.frontend_id, request.key]
        self._forget(request)
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

    def _forget(self, request: Request) -> None:
        """Release what an ended request has used beside the scheduler."""
        self.grammars.drop(request)
        if self._blobs is not None:
            self._blobs.forget(request)

    def drop_frontend(self, frontend_id: int) -> int:
        """End all requests of a frontend that has gone, and drop its outputs; return the number of requests."""
        requests = [request for request in self.open_requests if request.frontend_id == frontend_id]
        for request in requests:
            self._end(request, "abort")
        self._outbox.drop(frontend_id)
        return len(requests)

    # ── pause and resume ─────────────────────────────────────────────────────────────────────────────────────────

    @property
    def is_paused(self) -> bool:
        return self._pause_mode is not None

    def pause(self, mode: PauseMode) -> None:
        """Pause until `resume`; requests are still accepted. keep: no step is sent; abort: nor is one, and all
        requests end now; wait: only requests that have run before go on, to their ends."""
        self._pause_mode = mode
        if mode == "abort":
            for request in list(self._request_by_id.values()):
                self._end(request, "abort")

    @property
    def is_quiet(self) -> bool:
        """Whether a pause is complete: no step is in flight and, in mode wait, no request is left that has run."""
        if self._pause_mode == "wait" and any(r.num_cached_tokens >= 0 for r in self.open_requests):
            return False
        return len(self.scheduler.ledger) == 0

    def resume(self) -> None:
        self._pause_mode = None

    def reset_prefix_cache(self) -> None:
        """Empty the prefix cache: the pool, not the tiers. Running requests keep their blocks."""
        self.scheduler.kv_cache.pool.forget_all()

    def clear_kv_cache(self, done: Callable[[], None]) -> None:
        """Empty the pool and all tiers, then call `done`. Running requests keep their blocks."""
        self.reset_prefix_cache()
        if self.offload is None:
            done()
        else:
            self.offload.clear(done)

    def forget_computed(self) -> None:
        """Drop all computed and cached blocks before weights change; requests then continue from their tokens."""
        if self.offload is not None:
            self.offload.close()
        self._reset_scheduler()
        self._enter_namespace(None)

    def _enter_namespace(self, namespace: bytes | None) -> None:
        """Name blocks from now on after the given weights, or at random. Running requests keep their names."""
        kv_cache = self.scheduler.kv_cache
        if namespace != kv_cache.namespace:
            kv_cache.change_namespace(namespace)
            for request in self._request_by_id.values():
                if not request.block_ids:
                    request.block_keys = []

    def _reset_scheduler(self) -> None:
        self.scheduler.reset(shares_prompts=not self._crash_isolation.has_suspects)  # these wait for no prompt group

    def _is_held(self, request: Request) -> bool:
        is_new, lacks_blobs = request.num_cached_tokens < 0, WaitReason.BLOB in request.waits_for
        return lacks_blobs or self._crash_isolation.is_held(request) or (self._pause_mode == "wait" and is_new)

    @property
    def has_suspects(self) -> bool:
        """Whether requests run alone now that may be the cause of lost workers."""
        return self._crash_isolation.has_suspects

    @property
    def num_requests(self) -> int:
        return len(self._request_by_id)

    # ── steps ────────────────────────────────────────────────────────────────────────────────────────────────────

    def step(self) -> int:
        """Schedule and send steps until `steps_in_flight` are in flight, nothing can be computed, or the oldest waits
        for masks; return their number. None is sent while memory is asleep or a pause (keep, abort) holds."""
        scheduler = self.scheduler
        num_sent = 0
        if self._pause_mode in ("keep", "abort") or self.asleep:
            return 0
        while len(scheduler.ledger.entries) < self._config.steps_in_flight and scheduler.has_work():
            if self.grammars.is_active and self.grammars.delays_next_step:
                break
            if scheduler.ledger.entries and scheduler.drafting.holds_next_step():
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

    def _announce_started(self, output: SchedulerOutput) -> None:
        for new_row in output.new_rows:
            request = self.scheduler.rows.request(new_row.row)
            if request.num_preemptions == 0:
                cached, loaded = request.num_cached_tokens, request.num_loaded_tokens
                started = Started(key=request.key, num_cached_tokens=cached, num_loaded_tokens=loaded)
                self._outbox.of(request.frontend_id).started.append(started)

    def on_result(self, output: ModelRunnerOutput) -> None:
        """Apply the result of the oldest step in flight, and queue its tokens and the ends of requests."""
        begun_at = time.monotonic()
        entry, new_tokens, finished = self.scheduler.update_from_output(output)
        batch = entry.batch
        self.step_timer.on_step(entry, output.execute_s)
        if self.speculation is not None:
            is_busy = self.scheduler.rows.num_active > 0
            self.speculation.on_result(batch, begun_at, has_next=len(self.scheduler.ledger) > 0, is_busy=is_busy)
        if self.offload is not None and batch.num_prompt_tokens:
            self.offload.on_prompts(batch.ends, batch.counts, output.execute_s)
        self._outbox.add_tokens(new_tokens)
        for done in finished:
            self._on_finished(done)
        if entry.encodes:
            self._on_encoded(entry, output.failed_entries)
        if new_tokens.token_owners.has_grammar:
            self.grammars.advance(new_tokens)
        if self._crash_isolation.is_watching:
            self._crash_isolation.on_progress(self.scheduler.rows.known_tokens())
        if self.grammars.is_active:
            self.grammars.want_masks()
        now = time.monotonic()
        num_new = num_ids(new_tokens.token_ids)
        num_prefilled, execute_s = batch.num_prefilled_tokens, output.execute_s
        if len(batch.rows):
            self.stats.on_step(len(batch.rows), batch.num_tokens, num_prefilled, num_new, execute_s, now)
        self.stats.host_s += now - begun_at

    def _on_encoded(self, entry: LedgerEntry, failed: list[FailedEntry]) -> None:
        """Let rows use the media of a finished step; end the requests that need one that could not be read."""
        for request, reason in self.scheduler.media.on_encoded(entry.step, entry.encodes, failed):
            error = RequestError(f"{A_MEDIUM[request.media[0].kind]} of the prompt could not be read: {reason}")
            self._end(request, "error", error_info(error))

    def _send_masks(self, masks: TokenMask) -> None:
        self.step_timer.begin()
        self._executor.send(masks)

    def _append_jump_tokens(self, jumps: list[tuple[Request, list[int]]]) -> NewTokens:
        new_tokens = self.scheduler.processor.append_jump_tokens(jumps)
        self.stats.num_generated_tokens += num_ids(new_tokens.token_ids)
        self._outbox.add_tokens(new_tokens, are_jump_tokens=True)
        return new_tokens

    @property
    def overdue_at(self) -> float | None:
        """When the oldest step in flight counts as hung, by the clock; None if there is none, or it waits for masks."""
        entry = self.scheduler.ledger.oldest
        if entry is None or self.grammars.is_awaiting_masks:
            return None
        return self.step_timer.overdue_at(entry)

    def look(self) -> float:
        """Advance the clock and return its time. After a suspension of this process the time limit of the oldest step
        starts again, at most MAX_EXCUSES times: the workers may have been suspended, too."""
        return self.step_timer.look(self.scheduler.num_steps, has_step=len(self.scheduler.ledger) > 0)

    def lose_workers(self, reason: str) -> None:
        """Return every running request to the queue with nothing computed. A request that is proven to kill the
        workers fails with an error that quotes `reason`; if they were loading its adapter, all that wait for this."""
        culprit = self._crash_isolation.on_loss(self.scheduler.in_work())
        is_loading = culprit is not None and culprit.row < 0
        self._reset_scheduler()
        self.grammars.forget_masks()
        if culprit is not None and culprit.adapter is not None and is_loading:
            self.adapters.give_up(culprit.adapter, f"the workers have ended while they did nothing else: {reason}")
        elif culprit is not None:
            message = f"this request has ended the workers {CRASHES_TO_FAIL} times and was given up; last: {reason}"
            self._end(culprit, "error", error_info(InternalError(message)))

    def gain_workers(self, executor: Executor, generation: int) -> None:
        """Use a new worker group; its steps count from 1."""
        self._executor = executor
        self.scheduler.begin_generation(generation)
        self.step_timer.reset()

    def progress(self, now: float) -> Progress | None:
        """Return the report for the supervisor, or None if none is due; `now` in monotonic seconds."""
        is_idle, is_asleep = not self._request_by_id, bool(self.asleep)
        return self.stats.progress(self.scheduler, now, is_idle=is_idle, is_paused=self.is_paused, is_asleep=is_asleep)

    def take_outputs(self) -> list[tuple[int, EngineCoreOutputs]]:
        return self._outbox.take()
