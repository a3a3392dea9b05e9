"""The exact replica of a simulated fleet: the engine's own core over a worker that computes nothing, in virtual time.

EngineCore with its Scheduler, KVCacheManager and Admission runs as in an engine, with two steps in flight. Only the
seconds of a step are assumed (StepCost). Some 5,000 steps a second are simulated, so up to about 32 replicas.
"""

from __future__ import annotations

from collections import deque

import msgspec
import numpy as np

from tokenloom.core.engine import EngineCore
from tokenloom.core.features.grammar.local_helper import LocalGrammarHelper
from tokenloom.core.features.new import Surroundings
from tokenloom.ipc.codec import decode_ids, encode_ids
from tokenloom.ipc.kv.pool_shape import PoolShape
from tokenloom.ipc.messages.core import CoreChild, EngineCoreOutputs, EngineCoreRequest
from tokenloom.ipc.messages.workers import ModelRunnerOutput, SchedulerOutput, TokenMask
from tokenloom.ipc.params.sampling_params import SamplingParams
from tokenloom.ipc.spec.config.engine_config import EngineConfig
from tokenloom.ipc.spec.config.engine_spec import EngineSpec
from tokenloom.scripts.bench.engine_steps import new_spec
from tokenloom.scripts.bench.null_worker import NullWorker
from tokenloom.scripts.fleet.replica import NEVER, Event, Sizes, StepCost
from tokenloom.scripts.fleet.traces import BLOCK, Job

MAX_MODEL_LEN = 200_000
ANY_TOKEN = 7
NO_LIMIT = 1 << 30


def spec_of(sizes: Sizes, block_size: int = 16) -> EngineSpec:
    """Return the specification of an engine of these sizes, without a model."""
    config = EngineConfig(
        max_num_seqs=sizes.max_num_seqs,
        max_num_batched_tokens=sizes.max_num_batched_tokens,
        block_size=block_size,
        speculation="off",
        max_waiting_requests=NO_LIMIT,
        max_waiting_tokens=NO_LIMIT,
    )
    return msgspec.structs.replace(new_spec(config), max_model_len=MAX_MODEL_LEN)


def tokens_of(job: Job) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    """Return tokens for the prompt of a job: whole blocks are equal to those of other jobs if their keys are."""
    tokens = np.full(job.num_prompt_tokens, job.number & 0x7FFFFFFF, np.int32)
    for i, key in enumerate(job.keys):
        tokens[i * BLOCK : (i + 1) * BLOCK] = 0
        tokens[i * BLOCK : i * BLOCK + 3] = [key & 0xFFFFFF, key >> 24 & 0xFFFFFF, key >> 48]
    return tokens


class StepSizes:
    """Tracker of a core's steps. It gives for each the numbers on which its seconds depend."""

    def __init__(self, max_num_seqs: int) -> None:
        self._num_computed = np.zeros(max_num_seqs, np.int64)

    def of(self, output: SchedulerOutput) -> tuple[int, int, int, int]:
        """Return the step's decoding rows, prompt tokens, tokens of context and pairs, as StepCost takes them."""
        for new in output.new_rows:
            self._num_computed[new.row] = new.num_computed_tokens
        rows, counts = np.frombuffer(output.rows, np.int32), np.frombuffer(output.counts, np.int32)
        self._num_computed[rows] += counts
        ends, is_prompt = self._num_computed[rows], counts > 1
        chunks = counts[is_prompt].astype(np.int64)
        num_pairs = int((chunks * (ends[is_prompt] - chunks // 2)).sum())
        return int((~is_prompt).sum()), int(chunks.sum()), int(ends.sum()), num_pairs


class CostedWorker(NullWorker):
    """Worker that answers each step at once, with the seconds that the step would have taken."""

    def __init__(self, spec: EngineSpec, cost: StepCost) -> None:
        super().__init__(spec)
        self._cost, self.factor = cost, 1.0
        self._sizes = StepSizes(spec.config.max_num_seqs)

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        seconds = self.factor * self._cost.seconds(*self._sizes.of(output))
        return msgspec.structs.replace(super().execute(output), execute_s=seconds)


class ExactReplica:
    """Owner of a core, its worker, the steps on their way and the open jobs by their keys in the core."""

    def __init__(self, cost: StepCost, sizes: Sizes, spec: EngineSpec) -> None:
        self.next_at = NEVER
        num_blocks = max(sizes.pool_tokens // spec.config.block_size, 1) + 1
        self._worker = CostedWorker(spec, cost)
        self._core = EngineCore(spec, PoolShape(num_blocks, 1, (1,)), self, Surroundings(LocalGrammarHelper(spec)))
        self._steps: deque[SchedulerOutput] = deque()
        self._running: ModelRunnerOutput | None = None
        self._num_keys = 0
        self._open: dict[int, Job] = {}
        self._num_done: dict[int, int] = {}  # output tokens by key
        self._unanswered: set[int] = set()  # keys that had no token here
        self._events: list[Event] = []

    def send(self, message: SchedulerOutput | TokenMask) -> None:
        """Take a step, as the core's Executor."""
        assert isinstance(message, SchedulerOutput)
        self._steps.append(message)

    def submit(self, job: Job, now: float) -> None:
        key = self._num_keys
        self._num_keys += 1
        self._open[key], self._num_done[key] = job, job.num_done
        self._unanswered.add(key)
        outputs = encode_ids([ANY_TOKEN]) * job.num_done
        request = EngineCoreRequest(
            children=[CoreChild(key=key, seed=key, output_token_ids=outputs)],
            prompt_token_ids=tokens_of(job).tobytes(),
            params=SamplingParams(max_tokens=job.num_output_tokens, ignore_eos=True),
            max_tokens=job.num_output_tokens,
            stop_token_ids=[],
            arrival_time=job.arrived_at,
        )
        self._core.add_request(0, request)
        self._begin(now)

    def run(self, now: float) -> list[Event]:
        """Apply the result of the step that ends now; begin the next."""
        assert self._running is not None
        self._core.on_result(self._running)
        self._running = None
        self._begin(now)
        events, self._events = self._events, []
        return events

    def _begin(self, now: float) -> None:
        self._core.step()
        for _, outputs in self._core.take_outputs():
            self._take(outputs)
        if self._running is None:
            self.next_at = NEVER
            if self._steps:
                self._running = self._worker.execute(self._steps.popleft())
                self.next_at = now + self._running.execute_s

    def _take(self, outputs: EngineCoreOutputs) -> None:
        for started in outputs.started:
            self._events.append(Event("started", self._open[started.key], started.num_cached_tokens))
        for key in decode_ids(outputs.keys):
            if key in self._unanswered:
                self._unanswered.remove(key)
                self._events.append(Event("first_token", self._open[key]))
            self._num_done[key] += 1
        for finished in outputs.finished:
            assert finished.reason == "length", f"{finished.error}"
            self._events.append(Event("finished", self._open.pop(finished.key)))
            del self._num_done[finished.key]

    def progress(self, now: float) -> dict[Job, int]:
        return {job: self._num_done[key] for key, job in self._open.items()}

    def computing(self) -> list[Job]:
        return [self._open[request.key] for request in self._core.scheduler.in_work()]

    def abort_all(self, now: float) -> None:
        self._core.abort(0, list(self._open))
        self._core.take_outputs()
        for each in (self._open, self._num_done, self._unanswered):
            each.clear()
        self._events.clear()

    def slow_down(self, factor: float) -> None:
        self._worker.factor = factor
