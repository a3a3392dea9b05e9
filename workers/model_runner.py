"""ModelRunner: runs steps, from a SchedulerOutput to a ModelRunnerOutput.

    begin → apply changes → inputs → forward → logits of last tokens → mask, processors → Sampler → rows
                                             ↘ hidden states of prompts, chunk by chunk → logits → logprobs

Further parts of a step, such as copies of blocks, adapters, media and vectors, are each a RunnerFeature.

A step is started and later finished. On a GPU, a DeviceRunner runs the steps that sample without the host, and the next
step may start before such a step is finished. Any other step with rows waits for all earlier ones and is computed when
it starts.

Knows the model as a Protocol and the rows as an InputBatch; knows no socket and does not check the order of steps.
Every rank of a group runs the same steps: rank 0 samples and broadcasts the ids, so that rows are equal on all ranks.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..ipc.codec import encode_ids
from ..ipc.messages.workers import ModelRunnerOutput, RowLogprobs, SchedulerOutput
from ..ipc.process.faults import maybe_fail
from ..kernels.contract import StateViews
from .machine.arrays import I32, I64, ids_of, tuples_of
from .machine.parallel import ParallelGroup
from .sampling.drafts import NO_DRAFT, StepDrafts
from .sampling.logprobs import score_tokens, to_columns
from .sampling.sampler import Sampler
from .sampling.token_mask import MaskSource
from .step.input_batch import InputBatch
from .step.model_step import Model, compute
from .step.runner_feature import BegunStep, Pending, RunnerFeature, RunnerFeatures
from .step.step_inputs import ExpectedTokens, PromptSpan, StepInputs
from .step.step_layout import StepLayout
from .step.token_drawer import TokenDrawer

if TYPE_CHECKING:
    from .device.device_runner import DeviceRunner
    from .device.token_copy import PendingTokens

LOGITS_BYTES = 48 << 20  # of one chunk of a prompt's logits; scoring takes as much again, and on a GPU twice that

_NO_ROWS = np.empty(0, np.int32)
_ONE = encode_ids([1])


class _SampledTokens(NamedTuple):
    """The tokens of a step, rows in the order of its message, and everything else that rank 0 reports about them."""

    rows: I32  # [s]; a row with drafts is here once for each of its draws
    token_ids: I64  # [s]; NO_DRAFT: not kept
    logprobs: RowLogprobs | None = None  # of the rows that asked for them
    prompt_logprobs: RowLogprobs | None = None
    fully_masked_rows: I32 = _NO_ROWS  # mask and processors leave no token


class _DeviceTokens(NamedTuple):
    """The tokens of a step that the device samples and the host does not know yet."""

    expected: ExpectedTokens
    pending: PendingTokens


class _StartedStep(NamedTuple):
    step: SchedulerOutput
    start_time: float
    tokens: _SampledTokens | _DeviceTokens
    begun: BegunStep


class ModelRunner:
    """Owner of the rows and the started steps. `stage` names the current stage of a step, for error reports."""

    def __init__(
        self,
        model: Model,
        batch: InputBatch,
        kv_caches: Sequence[Tensor],
        group: ParallelGroup,
        states: StateViews | None = None,
        device_runner: DeviceRunner | None = None,
        sampler: Sampler | None = None,
        trace: Callable[[int], AbstractContextManager[object]] = nullcontext,
        features: Sequence[RunnerFeature] = (),
        logits_bytes: int = LOGITS_BYTES,
    ) -> None:
        """kv_caches: of each KV group with keys and values; states: of the layers that keep one. `device_runner` runs
        the steps that sample without the host. `trace(n)` surrounds the start of step n."""
        self._model = model
        self._device_runner = device_runner
        self._started: deque[_StartedStep] = deque()
        self._last_finish = 0.0
        self._logits_bytes = logits_bytes
        self._batch, self._kv_caches, self._states, self._group = batch, kv_caches, states, group
        self._drawer = TokenDrawer(sampler or Sampler(), kv_caches[0].device)
        self._trace, self._features = trace, RunnerFeatures(features)
        self.stage = "idle"

    def execute(self, step: SchedulerOutput, receive_mask: MaskSource | None = None) -> ModelRunnerOutput:
        """Start and finish one step while no other is started."""
        self.start(step, receive_mask)
        return self.finish()

    def start(
        self,
        step: SchedulerOutput,
        receive_mask: MaskSource | None = None,
        finish_all: Callable[[], None] | None = None,
    ) -> Pending | None:
        """Begin one step; return the last copy that `finish` would wait for, or None. ProtocolError if the rows or a
        feature forbid it.

        `receive_mask` waits for the TokenMask of a step that says it is pending; rank 0 calls it once the logits exist.
        `finish_all` finishes all earlier steps; it is called before a step that the host samples, if there are any.
        """
        start_time = time.monotonic()
        self.stage = "begin"
        with self._trace(step.step), self._features.beside(step), torch.inference_mode():
            begun = self._features.begin(step, self._enter)
            tokens = self._run(step, begun, receive_mask, finish_all)
        self._started.append(_StartedStep(step, start_time, tokens, begun))
        return tokens.pending if isinstance(tokens, _DeviceTokens) else begun.pending

    def finish(self) -> ModelRunnerOutput:
        """Wait for the oldest of the started steps, at least one; return its result. Only that of rank 0 has logprobs,
        vectors and fully masked rows."""
        step, start_time, tokens, begun = self._started[0]
        if begun.pending is not None:
            begun.pending.wait()
        if isinstance(tokens, _DeviceTokens):
            tokens = self._receive_tokens(tokens)
        self._started.popleft()
        # Time beside the step before does not count.
        start_time, self._last_finish = max(start_time, self._last_finish), time.monotonic()
        rows, token_ids, counts = tokens.rows, tokens.token_ids, _ONE * len(tokens.rows)
        if step.drafts:
            is_kept = token_ids != NO_DRAFT
            rows, kept_counts = _run_lengths(rows[is_kept])
            token_ids, counts = token_ids[is_kept], kept_counts.tobytes()
        return ModelRunnerOutput(
            step=step.step,
            core_epoch=step.core_epoch,
            generation=step.generation,
            rows=rows.tobytes(),
            counts=counts,
            token_ids=token_ids.astype(np.int32).tobytes(),
            fully_masked_rows=tokens.fully_masked_rows.tobytes(),
            logprobs=tokens.logprobs,
            prompt_logprobs=tokens.prompt_logprobs,
            pooled=begun.pooled,
            failed_entries=begun.failed_entries,
            draft_work=begun.draft_work,
            execute_s=self._last_finish - start_time,
        )

    @property
    def is_next_done(self) -> bool:
        """Whether a step is started and `finish` would not wait for it."""
        if not self._started:
            return False
        tokens, pending = self._started[0].tokens, self._started[0].begun.pending
        is_sampled = isinstance(tokens, _SampledTokens) or tokens.pending.is_here
        return is_sampled and (pending is None or pending.is_here)

    @property
    def highest_blocks(self) -> list[int]:
        """The highest block of each KV group that a row has had."""
        return self._batch.highest_blocks

    @property
    def unfinished_step(self) -> int | None:
        """The number of the oldest started step, if any."""
        return self._started[0].step.step if self._started else None

    def clear(self) -> None:
        """Finish the started steps, drop their results and forget all rows."""
        while self._started:
            self.finish()
        self._batch.clear()
        self._features.clear()
        if self._device_runner is not None:
            self._device_runner.rows.clear()

    def _enter(self, stage: str) -> None:
        self.stage = stage
        maybe_fail(f"worker.{stage}", self._group.rank)

    # ── one step ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _run(
        self,
        step: SchedulerOutput,
        begun: BegunStep,
        receive_mask: MaskSource | None,
        finish_all: Callable[[], None] | None,
    ) -> _SampledTokens | _DeviceTokens:
        """Apply the step's changes and compute its tokens, on the host or, without a wait, on the device."""
        self._enter("update rows")
        self._apply_changes(step)
        if not step.rows:
            return _SampledTokens(_NO_ROWS, np.empty(0, np.int64))
        self._enter("prepare inputs")
        layout = self._batch.layout(step.rows, step.counts)
        spans = self._batch.prompt_spans(layout)
        if self._device_runner is not None and not self._needs_host(step, layout, spans):
            return self._start_on_device(self._device_runner, layout)
        if self._started and finish_all is not None:
            finish_all()
        assert not self._started, "the host samples only after all earlier steps are finished"
        drafts = StepDrafts.of(ids_of(step.drafts), layout.rows, self._batch.vocab_size) if step.drafts else None
        inputs = self._features.prepare(self._batch.prepare(layout, drafts))
        self._enter("forward")
        hidden, logits = self._forward(inputs, has_spans=bool(spans))
        self._batch.advance(layout, drafts)
        self._enter("sample")
        self._features.read_hidden(hidden, inputs, begun)
        sampled = self._sample(hidden, logits, inputs, spans, receive_mask if step.is_mask_pending else None)
        if drafts is None:
            self._batch.append_tokens(inputs.sampled_rows, sampled.token_ids)
        else:
            self._batch.append_kept(inputs.sampled_rows, sampled.token_ids)
        self._features.follow(step, begun)
        self.stage = "idle"
        return sampled

    def _apply_changes(self, step: SchedulerOutput) -> None:
        if step.freed_rows:
            freed = ids_of(step.freed_rows)
            self._batch.free(freed)
            if self._device_runner is not None:
                self._device_runner.rows.forget(freed)
        for new_row in step.new_rows:
            self._batch.admit(new_row)
        self._features.update(step)
        if step.block_appends or step.block_frees:
            appends, frees = step.block_appends, step.block_frees
            self._batch.append_blocks(tuples_of("block_appends", appends), tuples_of("block_frees", frees))
        if step.loads:
            self._batch.load_states(tuples_of("loads", step.loads, 2))
        if step.state_moves:
            self._batch.move_states(tuples_of("state_moves", step.state_moves, 4), ids_of(step.rows))
        if step.token_appends:
            self._batch.append_forced(ids_of(step.token_appends))

    def _needs_host(self, step: SchedulerOutput, layout: StepLayout, spans: list[PromptSpan]) -> bool:
        """Return whether the host must sample: a row has drafts or gets some, or has a mask, processors, logprobs,
        prompt logprobs or pooling."""
        sampling = self._batch.sampling_metadata(layout.rows)
        return bool(
            step.is_mask_pending
            or step.drafts
            or step.draft_limits
            or layout.can_sample is not None
            or sampling.processors
            or len(sampling.logprob_indices)
            or spans
        )

    def _start_on_device(self, device: DeviceRunner, layout: StepLayout) -> _DeviceTokens:
        inputs = self._features.prepare(self._batch.prepare(layout))
        self._enter("start on the device")
        pending = device.start(inputs, self._batch.sampling_metadata(inputs.sampled_rows).sampling)
        self._batch.advance(layout)
        self.stage = "idle"
        return _DeviceTokens(self._batch.expect_tokens(inputs.sampled_rows), pending)

    def _receive_tokens(self, tokens: _DeviceTokens) -> _SampledTokens:
        """Wait for the tokens that the device samples and write them to their rows."""
        self._enter("wait for the device")
        token_ids = tokens.pending.take()
        self._batch.fill_tokens(tokens.expected, token_ids)
        self.stage = "idle"
        return _SampledTokens(tokens.expected.rows, token_ids)

    def _forward(self, inputs: StepInputs, has_spans: bool) -> tuple[Tensor, Tensor]:
        """Return (hidden, logits) as `compute` does. A decode step without drafts and prompt spans runs by CUDA graph
        if the device runner has graphs and no feature needs states; its hidden is empty."""
        if self._device_runner is not None and not (has_spans or inputs.needs_states) and inputs.drafts is None:
            sampling = self._batch.sampling_metadata(inputs.sampled_rows).sampling
            logits = self._device_runner.decode_logits(inputs, sampling)
            if logits is not None:
                return logits[:0], logits
        return compute(self._model, inputs, self._kv_caches, self._states)

    def _sample(
        self,
        hidden: Tensor,
        logits: Tensor,
        inputs: StepInputs,
        spans: list[PromptSpan],
        receive_mask: MaskSource | None,
    ) -> _SampledTokens:
        """Sample a token for each sampled position, equal on every rank; return them and, on rank 0, logprobs.

        hidden: [T, hidden_size]; logits: [s, vocab] float32 on rank 0.
        """
        prompt_logprobs = None
        if spans:
            prompt_logprobs = RowLogprobs.join(part for span in spans for part in self._score_prompt(hidden, span))
        rows = inputs.sampled_rows
        if len(rows) == 0:
            return _SampledTokens(rows, np.empty(0, np.int64), None, prompt_logprobs)
        token_ids, masked_rows, logprobs = np.empty(len(rows), np.int64), _NO_ROWS, None
        if self._group.rank == 0:
            mask = None
            if receive_mask is not None:
                self.stage = "wait for mask"
                mask = receive_mask()
                self.stage = "sample"
            metadata = self._batch.sampling_metadata(rows)
            token_ids, masked_rows, logprobs = self._drawer.draw(logits, inputs, metadata, mask)
        if self._group.size > 1:
            shared = self._group.broadcast(torch.from_numpy(token_ids).to(hidden.device))
            token_ids = shared.cpu().numpy()
        return _SampledTokens(rows, token_ids, logprobs, prompt_logprobs, masked_rows)

    def _score_prompt(self, hidden: Tensor, span: PromptSpan) -> Iterator[RowLogprobs]:
        """Yield logprobs of a prompt's tokens in chunks of bounded memory. Every rank computes; rank 0 yields."""
        num_rows = max(1, self._logits_bytes // (4 * self._batch.vocab_size))
        for start in range(0, len(span.token_ids), num_rows):
            token_ids = span.token_ids[start : start + num_rows].astype(np.int64)
            first = span.first_token + start
            indices = torch.arange(first, first + len(token_ids), device=hidden.device)
            logits = self._model.compute_logits(hidden, indices)
            if self._group.rank == 0:
                scored = score_tokens(logits, token_ids, [span.num_top] * len(token_ids))
                first_position = span.first_position + start
                positions = range(first_position, first_position + len(token_ids))
                yield to_columns(scored, [span.row] * len(token_ids), positions)


def _run_lengths(rows: I32) -> tuple[I32, I32]:
    """Return the rows without repetition in succession, and how often each is there."""
    starts = np.flatnonzero(np.diff(rows, prepend=-1))
    return rows[starts], np.diff(starts, append=len(rows)).astype(np.int32)
