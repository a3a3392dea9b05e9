"""RandomSchedule: a core that admits, chunks, interleaves and preempts at random.

Also helpers to write one step by hand: messages, new rows, a runner of the history model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from tokenloom.ipc.messages.workers import ModelRunnerOutput, NewRow, RowLogprobs, RowSampling, SchedulerOutput
from tokenloom.tests.workers.history_model import ONE_GROUP, VOCAB_SIZE, HistoryModel, logits_after
from tokenloom.workers.machine.parallel import ParallelGroup
from tokenloom.workers.model_runner import ModelRunner
from tokenloom.workers.sampling.row_processors import CustomLogitsProcessor
from tokenloom.workers.sampling.sampler import Sampler
from tokenloom.workers.sampling.sampling_columns import SamplingColumns
from tokenloom.workers.step.input_batch import InputBatch
from tokenloom.workers.step.model_step import Model

MAX_NUM_SEQS, MAX_MODEL_LEN, BLOCK_SIZE, NUM_BLOCKS = 8, 64, 4, 129


def new_runner(
    model: Model | None = None,
    group: ParallelGroup | None = None,
    processors: Sequence[CustomLogitsProcessor] = (),
    windows: Sequence[int | None] = ONE_GROUP,
    **options: Any,
) -> ModelRunner:
    batch = new_batch(windows, vocab_size=VOCAB_SIZE, processors=processors)
    model = model or HistoryModel(windows)
    return ModelRunner(model, batch, new_caches(windows), group or ParallelGroup(), **options)


def new_batch(windows: Sequence[int | None] = ONE_GROUP, **options: Any) -> InputBatch:
    num_blocks = [NUM_BLOCKS * len(windows)] * len(windows)
    return InputBatch(MAX_NUM_SEQS, MAX_MODEL_LEN, BLOCK_SIZE, num_blocks, windows=windows, **options)


def new_caches(windows: Sequence[int | None] = ONE_GROUP) -> list[torch.Tensor]:
    """Return a view for each KV group of one buffer. Their blocks have one size, so that no two groups use one id."""
    return [torch.zeros(NUM_BLOCKS * len(windows), 1, 2, 1, BLOCK_SIZE, 1)] * len(windows)


def frame(*values: int) -> bytes:
    return np.array(values, np.int32).tobytes()


def new_row(
    row: int, tokens: list[int], computed: int = 0, sampling: RowSampling | None = None, num_prompt: int | None = None
) -> NewRow:
    """Greedy unless `sampling` says otherwise; all tokens are the prompt's without `num_prompt`."""
    return NewRow(
        row=row,
        token_ids=frame(*tokens),
        num_prompt_tokens=len(tokens) if num_prompt is None else num_prompt,
        num_computed_tokens=computed,
        sampling=sampling or RowSampling(temperature=0.0),
    )


def message(
    rows: list[int] | None = None,
    counts: list[int] | None = None,
    freed: list[int] | None = None,
    new_rows: list[NewRow] | None = None,
    appends: list[int] | None = None,
    forced: list[int] | None = None,
    drafts: list[int] | None = None,
    frees: list[int] | None = None,
) -> SchedulerOutput:
    return SchedulerOutput(
        step=1,
        core_epoch=0,
        generation=0,
        rows=frame(*rows or []),
        counts=frame(*counts or []),
        freed_rows=frame(*freed or []),
        new_rows=new_rows or [],
        block_appends=frame(*appends or []),
        block_frees=frame(*frees or []),
        token_appends=frame(*forced or []),
        drafts=frame(*drafts or []),
    )


class Sampled(NamedTuple):
    """A ModelRunnerOutput with rows and tokens as lists; a row with several tokens is repeated."""

    rows: list[int]
    token_ids: list[int]
    logprobs: RowLogprobs | None
    prompt_logprobs: RowLogprobs | None


def sampled_by(output: ModelRunnerOutput) -> Sampled:
    rows, counts, token_ids = (np.frombuffer(each, np.int32) for each in (output.rows, output.counts, output.token_ids))
    return Sampled(np.repeat(rows, counts).tolist(), token_ids.tolist(), output.logprobs, output.prompt_logprobs)


def execute(runner: ModelRunner, step: SchedulerOutput) -> Sampled:
    return sampled_by(runner.execute(step))


def expected_tokens(prompt: list[int], sampling: RowSampling, count: int) -> list[int]:
    """The oracle: sample each token alone from the logits of its history."""
    columns = SamplingColumns.greedy(1)
    columns.put(0, sampling)
    history = list(prompt)
    for _ in range(count):
        history.append(int(Sampler().sample(logits_after(history), columns, np.array([len(history)]))[0]))
    return history[len(prompt) :]


@dataclass
class Request:
    prompt: list[int]
    sampling: RowSampling
    limit: int
    outputs: list[int] = field(default_factory=list)
    row: int | None = None
    num_computed: int = 0
    tables: list[list[int]] = field(default_factory=list)  # blocks by KV group, 0 for those that are freed

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + len(self.outputs)


class RandomSchedule:
    """Admits, chunks, interleaves and preempts at random, as a core may. A draft is right as often as `accuracy` says;
    None: there are none. `has_filters`: some requests have top-k or top-p. `windows`: of each KV group."""

    def __init__(
        self,
        seed: int,
        accuracy: float | None = None,
        *,
        has_filters: bool = True,
        windows: Sequence[int | None] = ONE_GROUP,
    ) -> None:
        self.rng, self.accuracy, self._has_filters = np.random.default_rng(seed), accuracy, has_filters
        self.num_drafts = self.num_accepted = 0
        self.windows, self.num_freed = windows, 0
        self.free_blocks = list(range(1, NUM_BLOCKS * len(windows)))
        self.requests = [self._request() for _ in range(20)]

    def _request(self) -> Request:
        prompt = self.rng.integers(0, VOCAB_SIZE, self.rng.integers(1, 40)).tolist()
        temperature = float(self.rng.choice([0.0, 0.7, 1.3]))
        top_k, top_p = int(self.rng.choice([0, 20])), float(self.rng.choice([1.0, 0.9]))
        if not self._has_filters:
            top_k, top_p = 0, 1.0
        sampling = RowSampling(temperature=temperature, top_k=top_k, top_p=top_p, seed=int(self.rng.integers(1 << 40)))
        return Request(prompt, sampling, int(self.rng.integers(1, MAX_MODEL_LEN - len(prompt) + 1)))

    @property
    def open(self) -> list[Request]:
        return [request for request in self.requests if len(request.outputs) < request.limit]

    def step(self) -> SchedulerOutput:
        freed = self._free()
        new_rows = self._admit()
        running = [request for request in self.open if request.row is not None and self.rng.random() < 0.8]
        rows, counts, appends, drafts, frees = ([] for _ in range(5))  # type: tuple[list[int], ...]
        for index in self.rng.permutation(len(running)):
            request = running[index]
            count = int(self.rng.integers(1, request.num_tokens - request.num_computed + 1))
            if request.num_computed + count == request.num_tokens and (guesses := self._guess(request)):
                drafts += [request.row or 0, len(guesses), *guesses]
                count += len(guesses)
            self._grow(request, request.num_computed + count, appends, frees)
            request.num_computed += count
            rows.append(request.row or 0)
            counts.append(count)
        return message(rows, counts, freed, new_rows, appends, drafts=drafts, frees=frees)

    def _grow(self, request: Request, end: int, appends: list[int], frees: list[int]) -> None:
        """Append blocks for the tokens up to `end` to all tables, and free those behind windows in tables that grow."""
        for group, window in enumerate(self.windows):
            table = request.tables[group]
            num_missing = -(-end // BLOCK_SIZE) - len(table)
            for _ in range(num_missing):
                table.append(self.free_blocks.pop(int(self.rng.integers(len(self.free_blocks)))))
                appends += [request.row or 0, group, table[-1]]
            first = min(request.num_computed, request.num_tokens - 1)
            num_behind = 0 if window is None else max(first - window + 1, 0) // BLOCK_SIZE
            if num_missing > 0 and any(table[:num_behind]):
                self.free_blocks += filter(None, table[:num_behind])
                table[:num_behind] = [0] * num_behind
                frees += [request.row or 0, group, num_behind]
                self.num_freed += 1

    def _guess(self, request: Request) -> list[int]:
        if self.accuracy is None:
            return []
        num_left = request.limit - len(request.outputs) - 1
        count = min(int(self.rng.integers(0, 6)), num_left)
        history = [*request.prompt, *request.outputs]
        right = expected_tokens(history, request.sampling, count)
        guesses = [t if self.rng.random() < self.accuracy else int(self.rng.integers(VOCAB_SIZE)) for t in right]
        self.num_drafts += count
        wrong = [i for i, pair in enumerate(zip(right, guesses, strict=True)) if pair[0] != pair[1]]
        self.num_accepted += min(wrong, default=count)
        return guesses

    def _free(self) -> list[int]:
        freed = []
        for request in self.requests:
            is_done = len(request.outputs) == request.limit
            if request.row is not None and (is_done or self.rng.random() < 0.05):  # finished or preempted
                freed.append(request.row)
                self.free_blocks += [block for table in request.tables for block in table if block]
                request.row, request.num_computed = None, 0
        return freed

    def _admit(self) -> list[NewRow]:
        new_rows = []
        for row in set(range(MAX_NUM_SEQS)) - {request.row for request in self.requests}:
            waiting = [request for request in self.open if request.row is None]
            if waiting and self.rng.random() < 0.5:
                request = waiting[0]
                request.row, request.tables = row, [[] for _ in self.windows]
                tokens = [*request.prompt, *request.outputs]
                new_rows.append(new_row(row, tokens, 0, request.sampling, len(request.prompt)))
        return new_rows

    def take(self, rows: list[int], token_ids: list[int]) -> None:
        by_row = {request.row: request for request in self.requests}
        for row, token in zip(rows, token_ids, strict=True):
            by_row[row].outputs.append(token)
        for row in set(rows):
            by_row[row].num_computed = min(by_row[row].num_computed, by_row[row].num_tokens - 1)

    def run(self, runner: ModelRunner, check: Callable[[list[int]], None] = lambda rows: None) -> None:
        """Run steps until all requests have all their tokens; call `check` with the rows of each."""
        for _ in range(3000):
            if not self.open:
                return
            step = self.step()
            sampled = execute(runner, step)
            check(np.frombuffer(step.rows, np.int32).tolist())
            self.take(sampled.rows, sampled.token_ids)
        raise AssertionError("the requests do not finish")

    def check(self) -> None:
        """Check that each request has the tokens that it gets alone."""
        for request in self.requests:
            assert request.outputs == expected_tokens(request.prompt, request.sampling, request.limit)
