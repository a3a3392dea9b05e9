"""Pooler: reduces the hidden states of each pooled prompt to one vector.

A prompt is computed in chunks, of which a mean keeps only a float32 sum. For a mean, a row resumed after a preemption
or a restart starts from its first token again, so its vector does not depend on interruptions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ....ipc.errors import ProtocolError
from ....ipc.messages.base import BulkArray
from ....ipc.messages.workers import NewRow, Pooled, SchedulerOutput
from ....ipc.params.pooling_params import PoolingParams
from ...machine.arrays import ids_of
from ...step.runner_feature import BegunStep, RunnerFeature
from ...step.step_inputs import StepInputs


@dataclass
class _Prompt:
    """`total` is the sum over the tokens computed so far; None before the first, and for pooling by the last token."""

    params: PoolingParams
    num_tokens: int
    total: Tensor | None = None


class Pooler(RunnerFeature):
    """Owner of the sums of pooled rows between their chunks. Other rows cost nothing."""

    def __init__(self) -> None:
        self._prompt_by_row: dict[int, _Prompt] = {}

    def update(self, step: SchedulerOutput) -> None:
        """Forget freed rows, and record the new rows that are pooled."""
        if self._prompt_by_row:
            for row in ids_of(step.freed_rows).tolist():
                self._prompt_by_row.pop(row, None)
        for new_row in step.new_rows:
            self._admit(new_row)

    def clear(self) -> None:
        self._prompt_by_row.clear()

    def read_hidden(self, hidden: Tensor, inputs: StepInputs, begun: BegunStep) -> None:
        """Add a step's hidden states to the sums, and add the vectors of the prompts that it completes to `begun`."""
        if not self._prompt_by_row:
            return
        for i, row in enumerate(inputs.rows.tolist()):
            prompt = self._prompt_by_row.get(row)
            if prompt is None:
                continue
            chunk = hidden[inputs.query_starts[i] : inputs.query_starts[i + 1]]
            if prompt.params.method == "mean":
                part = chunk.sum(0, dtype=torch.float32)
                prompt.total = part if prompt.total is None else prompt.total + part
            if inputs.seq_lens[i] == prompt.num_tokens:
                begun.pooled.append(Pooled(row=row, vector=_finish(prompt, chunk)))

    def _admit(self, new_row: NewRow) -> None:
        """Note the row, if it is pooled. ProtocolError for a mean with cached tokens, which have no hidden states."""
        params = new_row.pooling
        if params is None:
            return
        if params.method == "mean" and new_row.num_computed_tokens:
            raise ProtocolError(
                f"row {new_row.row} is admitted for a mean with {new_row.num_computed_tokens} tokens computed: it "
                "needs the hidden states of all"
            )
        self._prompt_by_row[new_row.row] = _Prompt(params, len(new_row.token_ids) // 4)


def _finish(prompt: _Prompt, chunk: Tensor) -> BulkArray:
    """Return the prompt's vector: its mean or last hidden state, cut to `dimensions`, normalized if wanted. chunk:
    [n, hidden_size], the prompt's last tokens."""
    vector = chunk[-1].float() if prompt.total is None else prompt.total / prompt.num_tokens
    vector = vector[: prompt.params.dimensions]
    if prompt.params.normalize:
        vector = torch.nn.functional.normalize(vector, dim=0)
    return BulkArray(dtype="float32", shape=list(vector.shape), data=vector.cpu().numpy().tobytes())
