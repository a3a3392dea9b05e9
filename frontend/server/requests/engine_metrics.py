"""EngineMetrics: metrics of the requests, counted in the frontend, and of the steps, reported by the core.

RequestManager calls it when answers start, get tokens and end; the core's totals arrive in Progress messages. A metric
that vLLM has, too, has vLLM's name. While no request is open, these equations hold exactly:

    prompt_tokens = Σ prompt_tokens_by_source              generation_tokens = request_generation_tokens_sum
    Σ request_success = count of e2e_request_latency, request_prompt_tokens and request_generation_tokens
    count of request_num_preemptions = count of e2e_request_latency      count of iteration_tokens = engine_steps
    Σ request_aborts, request_timeouts = request_success of those reasons        count of batch_size = engine_steps
"""

from __future__ import annotations

import hmac
import time
from collections import deque
from collections.abc import Callable, Hashable, Mapping
from itertools import islice

from ....ipc.codec import JsonObject, num_ids
from ....ipc.messages import metrics as messages
from ....ipc.messages.core import Started
from ....ipc.messages.supervisor import Initialize, Progress
from ....ipc.spec.config.engine_spec import EngineSpec
from ..metrics.adapter_metrics import AdapterMetrics
from ..metrics.answer_metrics import AnswerMetrics
from ..metrics.batch_metrics import BatchMetrics
from ..metrics.core_metrics import CoreMetrics
from ..metrics.encoder_metrics import EncoderMetrics
from ..metrics.registry import Counter, Gauge, Histogram, Registry
from ..metrics.shared_counts import MAX_SHOWN, FrontendCounts, SharedCounts
from ..metrics.speculation_metrics import SpeculationMetrics
from ..metrics.state_metrics import StateMetrics
from ..metrics.tier_metrics import TierMetrics
from ..metrics.tracing import Timeline, Tracing
from .engine_gauges import OWN_GAUGES, new_gauges
from .request_state import AnswerState, RequestState

SECONDS = (  # upper bounds of the latency histograms
    *(0.0005, 0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.3),
    *(0.4, 0.6, 0.8, 1.0, 1.5, 2.0, 3.0, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
REFUSALS = ("request", "overloaded", "draining")  # error kinds with which the core refuses requests that never ran
HISTORY_S = 120  # length of the history, one sample a second, that a newly opened dashboard shows
TOKENS = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))  # histogram bounds


class EngineMetrics:
    """Owner of all metrics and of the timelines of open answers."""

    def __init__(
        self,
        spec: EngineSpec,
        queue_depths: Callable[[], Mapping[str, float]] = dict,
        tracing: Tracing | None = None,
        counts: Mapping[str, int] | None = None,
        names_of: Callable[[bytes], list[str]] = lambda digest: [],
    ) -> None:
        """`queue_depths` returns the number of unanswered messages by socket of the frontend. `tracing` records a span
        for each finished answer. `counts`: the frontend's other event counts, by name. `names_of` returns the names of
        the adapter with a digest."""
        self.prompt_tokens = Counter("prompt_tokens_total", "Prompt tokens of answers that have started.")
        self.prompt_tokens_by_source = Counter(
            "prompt_tokens_by_source_total", "Prompt tokens by the source of their KV.", ["source"]
        )
        self.generation_tokens = Counter("generation_tokens_total", "Tokens generated.")
        self.finished = Counter("request_success_total", "Finished answers by reason.", ["finished_reason"])
        self.aborts = Counter("request_aborts_total", "Aborted answers by cause.", ["cause"])
        self.timeouts = Counter("request_timeouts_total", "Answers that timed out, by their state.", ["cause"])
        self.refused = Counter("requests_refused_total", "Requests refused before they ran, by error kind.", ["kind"])
        self.events = Counter("frontend_events_total", "Other events of the frontend.", ["event"])
        self.first_token = Histogram("time_to_first_token_seconds", "From arrival to the first token.", SECONDS)
        self.inter_token = Histogram("inter_token_latency_seconds", "Between tokens of an answer.", SECONDS)
        name, about = "request_time_per_output_token_seconds", "Mean time per token after the first."
        self.per_token = Histogram(name, about, SECONDS)
        self.end_to_end = Histogram("e2e_request_latency_seconds", "From arrival to the end.", SECONDS)
        self.queue = Histogram("request_queue_time_seconds", "From arrival to the first step.", SECONDS)
        self.inference = Histogram("request_inference_time_seconds", "From the first step to the end.", SECONDS)
        self.prefill = Histogram("request_prefill_time_seconds", "From the first step to the first token.", SECONDS)
        self.decode = Histogram("request_decode_time_seconds", "From the first token to the end.", SECONDS)
        self.prompt_lengths = Histogram("request_prompt_tokens", "Prompt tokens of ended answers.", TOKENS)
        self.output_lengths = Histogram("request_generation_tokens", "Tokens of ended answers.", TOKENS)
        self.param_n = Histogram("request_params_n", "n of ended requests.", (1, 2, 5, 10, 20))
        self.param_max_tokens = Histogram("request_params_max_tokens", "max_tokens of ended answers.", TOKENS)
        self.preempted = Histogram(
            "request_num_preemptions", "Preemptions of ended answers.", (0, 1, 2, 3, 4, 5, 10, 20)
        )
        self._counts = {} if counts is None else counts
        self.queue_depths = queue_depths
        self._tracing = tracing
        self.progress = Progress(step=0, step_age_s=0.0, num_running=0, num_waiting=0)
        self.num_kv_blocks = 0
        self.kernels = ""  # names of the kernels in use, as in Info; "" until the workers have measured them
        self.history: deque[tuple[float, JsonObject]] = deque(maxlen=HISTORY_S)  # (monotonic seconds, sample)
        self._progress_at = time.monotonic()
        self._core_totals: dict[Hashable, float] = {}  # last totals reported by the current core, by any key
        is_vllm = spec.config.metrics_names == "vllm"  # vLLM's name of one histogram ends like a counter's
        self.core = CoreMetrics(self._increase, "iteration_tokens_total" if is_vllm else "iteration_tokens")
        self.tiers = TierMetrics(self._increase) if spec.config.has_tiers else None
        max_loras = spec.config.max_loras
        self.adapters = AdapterMetrics(self._increase, names_of, max_loras) if spec.config.enable_lora else None
        self.encoder = None if spec.model.encoder is None else EncoderMetrics(self._increase)
        is_speculating = spec.config.speculation_options is not None
        self.speculation = SpeculationMetrics(self._increase) if is_speculating else None
        self.state = StateMetrics.of(spec)
        self.batches = None if spec.config.state_dir is None else BatchMetrics()
        self.answers = AnswerMetrics(has_audio=spec.model.audio is not None)
        self._timelines: dict[int, Timeline] = {}  # by answer key
        self._config = spec.config
        self.registry = Registry(
            "vllm:" if is_vllm else "tokenloom_", {"model_name": spec.served_model_name, "engine": "0"}
        )
        parts = (self.core, self.tiers, self.adapters, self.encoder, self.speculation, self.state)
        gauges = new_gauges(self, spec)
        counted = [each for each in vars(self).values() if isinstance(each, (Counter, Histogram))]
        counted += self.answers.metrics
        if self.batches is not None:  # frontend 0 alone counts anything
            counted += self.batches.counters
            gauges += self.batches.gauges
        of_parts = [each for part in parts if part is not None for each in part.metrics]
        self.registry.metrics += [*gauges, *counted, *of_parts]
        # the other metrics follow from Progress, which every frontend gets
        self.registry.own = [*counted, *(each for each in gauges if each.name in OWN_GAUGES)]

    def on_sizes(self, sizes: Initialize) -> None:
        """Record the size of the KV pool and the kernels, which clients may query as soon as the engine is ready."""
        self.num_kv_blocks, self.kernels = sizes.num_all_blocks, sizes.kernels or self.kernels

    def _own_counts(self, identity: str, num_open_requests: int) -> FrontendCounts:
        """Return this frontend's counts, which the engine's other frontends add to their own when they show metrics."""
        self._take_counts()
        return FrontendCounts(
            identity=identity,
            totals={each.name: each.state for each in self.registry.own if not isinstance(each, Gauge)},
            gauges={each.name: each.state for each in self.registry.own if isinstance(each, Gauge)},
            num_open_requests=num_open_requests,
            open_answers=self.open_answers(MAX_SHOWN),
        )

    def share(self, spec: EngineSpec, index: int, identity: str, num_open_requests: Callable[[], int]) -> SharedCounts:
        """From now on, show the sums over all frontends; return the file of shared counts. Continue the totals of the
        frontend that this one replaces. `index`, `identity`: those of this frontend."""
        shared = SharedCounts(
            spec,
            index,
            lambda: self._own_counts(identity, num_open_requests()),
            lambda other: other in self.progress.frontends,
        )
        self.registry.others = shared.states
        if (before := shared.predecessor()) is not None:
            for metric in self.registry.own:
                if not isinstance(metric, Gauge) and metric.name in before.totals:
                    metric.add_state(before.totals[metric.name])
        return shared

    @property
    def kv_use(self) -> float:
        """The share of the KV blocks that is in use, over all running cores; 0 if none runs."""
        num_blocks = self.progress.num_blocks
        return 1 - self.progress.num_free_blocks / num_blocks if num_blocks else 0.0

    @property
    def step_age_s(self) -> float:
        return self.progress.step_age_s + time.monotonic() - self._progress_at

    @property
    def num_open(self) -> int:
        return len(self._timelines)

    def open_answers(self, limit: int) -> list[JsonObject]:
        """Return up to `limit` open answers, oldest first, for the dashboard."""
        now = time.monotonic()
        return [each.shown(now) for each in islice(self._timelines.values(), limit)]

    def find_answer(self, shown_key: str) -> int | None:
        """Return the core's key of the open answer that was shown with the key `shown_key`; None if there is none."""
        given = shown_key.encode()
        found = (key for key, each in self._timelines.items() if hmac.compare_digest(each.shown_key.encode(), given))
        return next(found, None) if given else None

    def latencies(self) -> JsonObject:
        """Return the cumulative counts of four latency histograms, by the names ttft, itl, queue and e2e: the number of
        observations up to each bound of SECONDS, then the number of all."""
        shown = {"ttft": self.first_token, "itl": self.inter_token, "queue": self.queue, "e2e": self.end_to_end}
        return {name: self.registry.joined(histogram).cumulative for name, histogram in shown.items()}

    # ── answers ──────────────────────────────────────────────────────────────────────────────────────────────────

    def on_open(self, request: RequestState) -> None:
        """Start the timelines of a valid request's answers, and count the answers that have ended already."""
        assert request.processed is not None
        now, num_prompt_tokens = time.monotonic(), num_ids(request.processed.prompt.token_ids)
        for answer in request.answers:
            timeline = Timeline(request.submit, num_prompt_tokens, arrived_at=now, num_resumed=len(answer.token_ids))
            self._timelines[answer.key] = timeline
            if answer.finish_reason is not None:
                self.on_end(answer)

    def on_rekeyed(self, old: int, new: int) -> None:
        """Move the timeline of an answer to its new key, which it gets when another core takes it over."""
        if (timeline := self._timelines.pop(old, None)) is not None:
            self._timelines[new] = timeline

    def on_outputs(self, all_started: list[Started], answers: list[AnswerState]) -> None:
        """Count the starts and new tokens of one message of the core. Must be called before `on_end` for the same
        answers."""
        now, timelines, num_new = time.monotonic(), self._timelines, 0
        for started in all_started:
            timeline = timelines.get(started.key)
            if timeline is not None and not timeline.started_at:
                self._start(timeline, now, started)
        num_by_gap: dict[float, int] = {}  # answers of the same steps have equal gaps: one `observe` for all
        for answer in answers:
            timeline = timelines.get(answer.key)
            if timeline is None or not (count := len(answer.token_ids) - timeline.num_resumed - timeline.num_tokens):
                continue
            if timeline.first_at:
                gap = (now - timeline.last_at) / count
                num_by_gap[gap] = num_by_gap.get(gap, 0) + count
            else:
                timeline.first_at = now
                self.first_token.observe(now - timeline.arrived_at)
                if count > 1:
                    self.inter_token.observe(0.0, count - 1)
            timeline.last_at = now
            timeline.num_tokens += count
            num_new += count
        for gap, count in num_by_gap.items():
            self.inter_token.observe(gap, count)
        self.generation_tokens.add(num_new)

    def _start(self, timeline: Timeline, now: float, started: Started) -> None:
        timeline.started_at = now
        self.queue.observe(now - timeline.arrived_at)
        self.prompt_tokens.add(timeline.num_prompt_tokens)
        num_cached = started.num_cached_tokens
        for place, num_loaded in started.num_loaded_tokens.items():
            self.prompt_tokens_by_source.add(num_loaded, place)
            num_cached -= num_loaded
        self.prompt_tokens_by_source.add(num_cached, "local_cache_hit")
        self.prompt_tokens_by_source.add(timeline.num_prompt_tokens - started.num_cached_tokens, "local_compute")

    def on_end(self, answer: AnswerState, cause: str = "pause") -> None:
        """Count an ended answer, once. If the core refused it before its start, count its request as refused, once for
        all its answers. `cause`: metric label of an abort; the core itself aborts only for a pause."""
        timeline = self._timelines.pop(answer.key, None)
        if timeline is None:
            return
        error = answer.error
        if error is not None and error.kind in REFUSALS and not timeline.started_at:  # refused by the core
            if answer is answer.request.answers[0]:
                self.on_refused(error.kind)
            return
        now = time.monotonic()
        reason = answer.finish_reason or "abort"
        self.finished.add(1, reason)
        if reason == "abort":
            self.aborts.add(1, cause)
        elif reason == "timeout":
            self.timeouts.add(1, "running" if timeline.started_at else "waiting")
        self.end_to_end.observe(now - timeline.arrived_at)
        self.prompt_lengths.observe(timeline.num_prompt_tokens)
        self.output_lengths.observe(timeline.num_tokens)
        self.preempted.observe(answer.num_preemptions)
        if self.adapters is not None and answer.request.adapter is not None:
            self.adapters.on_end(timeline.submit.adapter, timeline.num_prompt_tokens, timeline.num_tokens)
        if answer.index == 0:
            self.param_n.observe(timeline.submit.params.n)
        if (processed := answer.request.processed) is not None:
            if processed.core.pooling is None:
                self.param_max_tokens.observe(processed.core.max_tokens)
            elif answer.embedding is not None:
                self.answers.on_pooled(processed.core.pooling, timeline.num_prompt_tokens)
        if timeline.started_at:
            self.inference.observe(now - timeline.started_at)
        if timeline.first_at:
            self.prefill.observe(timeline.first_at - (timeline.started_at or timeline.arrived_at))
            self.decode.observe(now - timeline.first_at)
        if timeline.num_tokens > 1:
            self.per_token.observe((timeline.last_at - timeline.first_at) / (timeline.num_tokens - 1))
        if self._tracing is not None:
            self._tracing.record(timeline, reason, now)

    def on_refused(self, kind: str) -> None:
        """Count a request that was refused before it ran. `kind`: the kind of an ErrorInfo, or a reason of the HTTP
        server."""
        self.refused.add(1, kind)

    # ── the core ─────────────────────────────────────────────────────────────────────────────────────────────────

    def on_progress(self, progress: Progress) -> None:
        """Keep a report for the gauges, and add the increase of the core's totals since the last report."""
        self.progress, self._progress_at = progress, time.monotonic()
        self.core.on_progress(progress)
        if self.tiers is not None and progress.tiers is not None:
            self.tiers.on_progress(progress.tiers)
        if self.adapters is not None and progress.adapters is not None:
            self.adapters.on_progress(progress.adapters)
        if self.encoder is not None and progress.encoder is not None:
            self.encoder.on_progress(progress.encoder)
        if self.speculation is not None and progress.speculation is not None:
            self.speculation.on_progress(progress.speculation)
        self._remember()

    def _remember(self) -> None:
        """Append a sample to `history`, at most one a second, and another one when the engine becomes idle."""
        now, progress = self._progress_at, self.progress
        is_idle = not progress.num_running + progress.num_waiting
        is_recent = bool(self.history) and now - self.history[-1][0] < 1.0
        if is_recent and (not is_idle or not self.history[-1][1]["running"]):
            return
        totals = {"generation_tokens": self.generation_tokens, "prompt_tokens": self.prompt_tokens}
        sample: JsonObject = {
            "running": progress.num_running,
            "waiting": progress.num_waiting,
            "kv_use": self.kv_use,
            "totals": {name: self.registry.joined(each).sum for name, each in totals.items()},
            "histograms": self.latencies(),
        }
        self.history.append((now, sample))

    def _increase(self, key: Hashable, total: float) -> float:
        """Return the increase of a total since its last report; all of `total` if it is less, since a new core counts
        from 0."""
        known = self._core_totals.get(key, 0.0)
        self._core_totals[key] = total
        return total - known if total >= known else total

    def render(self) -> str:
        self._take_counts()
        return self.registry.render()

    def read(self) -> list[messages.Metric]:
        self._take_counts()
        return self.registry.read()

    def _take_counts(self) -> None:
        for event, count in self._counts.items():
            self.events.add(self._increase(("event", event), count), event)
