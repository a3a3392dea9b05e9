"""The ModelRunner: one step from SchedulerOutput to sampled tokens.

    apply changes → prepare inputs → forward → logits of last tokens → mask, rules → Sampler → row state
                                             ↘ hidden states of prompts, chunk by chunk → logits → logprobs
                                             ↘ hidden states of prompts to embed → Pooler → vectors

A step is started and later finished. On a GPU, a step that needs no host to sample runs in a DeviceRunner, and the next
may be started before it is finished; any other is computed when it is started, after all before it are finished.

Knows the model as a Protocol and the rows as InputBatch; knows no socket, no step number and no epoch. Every rank of a
group runs the same steps: rank 0 samples and broadcasts the ids, so that row state is equal on all.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..ipc.errors import ProtocolError
from ..ipc.messages.core import LogprobColumns, Pooled
from ..ipc.messages.workers import SchedulerOutput, TokenMask
from ..ipc.process.faults import maybe_fail
from .input_batch import ExpectedTokens, InputBatch, PromptSpan, StepInputs, ids_of
from .model_step import Model, compute
from .parallel import ParallelGroup
from .sampling.logits_processors import apply_processors
from .sampling.logprobs import score_tokens
from .sampling.pooler import Pooler
from .sampling.sampler import Sampler
from .sampling.token_mask import MaskSource, apply_mask, no_mask

if TYPE_CHECKING:
    from .device.device_runner import DeviceRunner
    from .device.token_copy import PendingTokens

LOGITS_BYTES = 48 << 20  # of one chunk of a prompt's logits; scoring takes as much again, and on a GPU twice that


_NO_ROWS = np.empty(0, np.int32)


class SampledTokens(NamedTuple):
    """What a step sampled; rows in the order of its message."""

    rows: npt.NDArray[np.int32]  # [s]
    token_ids: npt.NDArray[np.int64]  # [s]
    logprobs: LogprobColumns | None = None  # of those whose rows asked
    prompt_logprobs: LogprobColumns | None = None
    pooled: Sequence[Pooled] = ()
    fully_masked_rows: npt.NDArray[np.int32] = _NO_ROWS  # rules leave no token


class _StartedStep(NamedTuple):
    """A step whose tokens are on their way from the device."""

    rows: npt.NDArray[np.int32]
    expected: ExpectedTokens
    tokens: PendingTokens


def nothing_started() -> None:
    """For who finishes each step before the next is started."""


class ModelRunner:
    """Owns the rows and runs the model over its KV cache. `stage` says what it does, for the report of an error."""

    def __init__(
        self,
        model: Model,
        batch: InputBatch,
        kv_cache: Tensor,
        group: ParallelGroup,
        vocab_size: int = 1 << 17,
        on_device: DeviceRunner | None = None,
        sampler: Sampler | None = None,
    ) -> None:
        """`on_device` runs the steps whose rows want no more than a token drawn; None: as any."""
        self._model = model
        self._on_device = on_device
        self._started: deque[_StartedStep | SampledTokens] = deque()
        self._vocab_size = vocab_size  # bounds what a chunk of a prompt's logits takes
        self._batch = batch
        self._kv_cache = kv_cache
        self._group = group
        self._sampler = sampler or Sampler()
        self._scratch = torch.empty(0, device=kv_cache.device)
        self._pooler = Pooler()
        self.stage = "idle"

    def execute_model(self, output: SchedulerOutput, receive_mask: MaskSource = no_mask) -> SampledTokens:
        """Run one step, when none is started; one without rows only applies its changes."""
        self.start(output, receive_mask)
        return self.finish()

    @torch.inference_mode()
    def start(
        self,
        output: SchedulerOutput,
        receive_mask: MaskSource = no_mask,
        finish_all: Callable[[], None] = nothing_started,
    ) -> PendingTokens | None:
        """Begin one step; what `finish` would wait for, if anything. ProtocolError if the rows do not allow it.

        `receive_mask` is called, on rank 0, once the logits of a step with a pending mask are made. `finish_all` is
        called before a step that cannot be started behind others; it finishes them.
        """
        self._enter("update rows")
        self._apply_changes(output)
        rows, counts = ids_of(output.rows), ids_of(output.counts)
        if len(rows) == 0:
            self._started.append(SampledTokens(_NO_ROWS, np.empty(0, np.int64)))
            return None
        self._enter("prepare inputs")
        inputs = self._batch.prepare(rows, counts)
        if self._on_device is not None and self._needs_no_host(inputs, output):
            return self._start_on_device(self._on_device, inputs, rows, counts)
        finish_all()
        assert not self._started, "a step that is computed here follows finished ones"
        if self._on_device is not None:
            inputs = self._batch.prepare(rows, counts)  # with the tokens that are known now
        self._started.append(self._compute(inputs, rows, counts, receive_mask if output.is_mask_pending else no_mask))
        return None

    def finish(self) -> SampledTokens:
        """What the first step that is started and not finished has sampled; waits for it."""
        step = self._started.popleft()
        if isinstance(step, SampledTokens):
            return step
        self._enter("wait for the device")
        token_ids = step.tokens.take()
        self._batch.fill_tokens(step.expected, token_ids)
        self.stage = "idle"
        return SampledTokens(step.rows, token_ids)

    @property
    def is_next_done(self) -> bool:
        """Whether a step is started, and `finish` would not wait for it."""
        if not self._started:
            return False
        step = self._started[0]
        return isinstance(step, SampledTokens) or step.tokens.is_here

    def _enter(self, stage: str) -> None:
        self.stage = stage
        maybe_fail(f"worker.{stage}", self._group.rank)

    def clear(self) -> None:
        """Forget all rows and what was started for them."""
        while self._started:
            self.finish()
        self._batch.clear()
        self._pooler.clear()
        if self._on_device is not None:
            self._on_device.clear()

    def _needs_no_host(self, inputs: StepInputs, output: SchedulerOutput) -> bool:
        sampling_metadata = self._batch.sampling_metadata(inputs.rows)
        return (
            not output.is_mask_pending
            and not self._batch.has_pooled(inputs.rows)
            and not sampling_metadata.rules
            and not len(sampling_metadata.asking)
            and not self._batch.prompt_spans(inputs)
        )

    def _start_on_device(
        self,
        device: DeviceRunner,
        inputs: StepInputs,
        rows: npt.NDArray[np.int32],
        counts: npt.NDArray[np.int32],
    ) -> PendingTokens:
        self._enter("start on the device")
        tokens = device.start(inputs, self._batch.sampling_metadata(inputs.sampled_rows).sampling)
        self._batch.advance(rows, counts)
        self.stage = "idle"
        expected = self._batch.expect_tokens(inputs.sampled_rows)
        self._started.append(_StartedStep(inputs.sampled_rows, expected, tokens))
        return tokens

    def _compute(
        self,
        inputs: StepInputs,
        rows: npt.NDArray[np.int32],
        counts: npt.NDArray[np.int32],
        receive_mask: MaskSource,
    ) -> SampledTokens:
        self._enter("forward")
        hidden, logits = self._forward(inputs)
        self._batch.advance(rows, counts)
        self._enter("sample")
        sampled = self._sample(hidden, logits, inputs, receive_mask)
        self._batch.append_tokens(inputs.sampled_rows, sampled.token_ids)
        self.stage = "idle"
        return sampled

    def _forward(self, inputs: StepInputs) -> tuple[Tensor, Tensor]:
        """As `compute`; a graph gives no hidden states, and runs where nothing is asked of them."""
        if self._on_device is not None and not self._batch.prompt_spans(inputs):
            logits = self._on_device.decode_logits(inputs, self._batch.sampling_metadata(inputs.sampled_rows).sampling)
            if logits is not None:
                return logits[:0], logits
        return compute(self._model, inputs, self._kv_cache)

    def _apply_changes(self, output: SchedulerOutput) -> None:
        if output.freed_rows:
            freed = ids_of(output.freed_rows)
            self._batch.free(freed)
            self._pooler.free(freed)
            if self._on_device is not None:
                self._on_device.forget(freed)
        for new_row in output.new_rows:
            self._batch.admit(new_row)
            self._pooler.admit(new_row)
        if output.block_appends:
            appends = ids_of(output.block_appends)
            if len(appends) % 3:
                raise ProtocolError(f"block_appends holds {len(appends)} numbers, which make no triples")
            self._batch.append_blocks(appends.reshape(-1, 3))
        if output.token_appends:
            self._batch.append_forced(ids_of(output.token_appends))

    def _sample(self, hidden: Tensor, logits: Tensor, inputs: StepInputs, receive_mask: MaskSource) -> SampledTokens:
        """The token of each sampled row, on every rank, and what rank 0 was asked to tell about tokens.

        hidden: [T, hidden_size]; logits: [s, vocab] float32 on rank 0.
        """
        parts = [part for span in self._batch.prompt_spans(inputs) for part in self._score_prompt(hidden, span)]
        prompt_logprobs, rows = LogprobColumns.join(parts), inputs.sampled_rows
        pooled = self._pooler.pool(hidden, inputs) if self._group.rank == 0 else []
        if len(rows) == 0:
            return SampledTokens(rows, np.empty(0, np.int64), None, prompt_logprobs, pooled)
        token_ids, barred, logprobs = np.empty(len(rows), np.int64), _NO_ROWS, None
        if self._group.rank == 0:
            self._enter("wait for mask")
            mask = receive_mask()
            self._enter("sample")
            token_ids, barred, logprobs = self._draw(logits, inputs, mask)
        if self._group.size > 1:
            shared = self._group.broadcast(torch.from_numpy(token_ids).to(hidden.device))
            token_ids = shared.cpu().numpy()
        return SampledTokens(rows, token_ids, logprobs, prompt_logprobs, pooled, barred)

    def _draw(
        self, logits: Tensor, inputs: StepInputs, mask: TokenMask | None
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32], LogprobColumns | None]:
        """Tokens of rank 0, rows whose rules leave none, and the logprobs that rows asked for.

        logits: [s, vocab] float32, overwritten by rules.
        """
        rows = inputs.sampled_rows
        sampling_metadata = self._batch.sampling_metadata(rows)
        rules, asking = sampling_metadata.rules, sampling_metadata.asking
        original = logits
        if rules or mask is not None:
            logits = self._copy(logits) if len(asking) else logits.contiguous()
        if mask is not None:
            apply_mask(logits, rows, mask)
        if rules:
            apply_processors(logits, rules)
        token_ids = self._sampler.sample(logits, sampling_metadata.sampling, inputs.sampled_positions)
        barred = _NO_ROWS
        if rules or mask is not None:
            drawn = logits.gather(1, torch.from_numpy(token_ids).to(logits.device)[:, None])[:, 0]
            barred = rows[drawn.isneginf().cpu().numpy()]
        if not len(asking):
            return token_ids, barred, None
        if len(asking) < len(rows):
            original = original[torch.from_numpy(asking).to(logits.device)]
        scored = score_tokens(original, token_ids[asking], sampling_metadata.others)
        return token_ids, barred, scored.to_columns(rows[asking].tolist(), inputs.sampled_positions[asking].tolist())

    def _copy(self, logits: Tensor) -> Tensor:
        """A copy in memory that is kept from step to step: fresh pages cost more than the copying."""
        if self._scratch.numel() < logits.numel():
            self._scratch = torch.empty(logits.numel(), dtype=logits.dtype, device=logits.device)
        return self._scratch[: logits.numel()].view(logits.shape).copy_(logits)

    def _score_prompt(self, hidden: Tensor, span: PromptSpan) -> Iterator[LogprobColumns]:
        """Logprobs of a prompt's tokens in chunks of bounded memory; every rank takes part, rank 0 has the answer."""
        num_rows = max(1, LOGITS_BYTES // (4 * self._vocab_size))
        for start in range(0, len(span.token_ids), num_rows):
            token_ids = span.token_ids[start : start + num_rows].astype(np.int64)
            first = span.first_token + start
            logits = self._model.compute_logits(hidden[first : first + len(token_ids)])
            if self._group.rank == 0:
                scored = score_tokens(logits, token_ids, [span.num_top] * len(token_ids))
                first_position = span.first_position + start
                positions = range(first_position, first_position + len(token_ids))
                yield scored.to_columns([span.row] * len(token_ids), positions)
