"""Pooler: makes the results of pooled prompts from their hidden states.

A prompt is computed in chunks, of which only sums are kept. Where all hidden states count, a row resumed after a
preemption or a restart starts from its first token again, so its result does not depend on interruptions.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ....ipc.errors import ProtocolError
from ....ipc.messages.base import BulkArray
from ....ipc.messages.workers import NewRow, Pooled, SchedulerOutput
from ...machine.arrays import ids_of
from ...step.runner_feature import BegunStep, RunnerFeature
from ...step.step_inputs import StepInputs
from .pooled_prompt import PooledPrompt
from .pooling_layers import PoolingLayers


class Pooler(RunnerFeature):
    """Owner of the prompts of pooled rows until they are complete. Other rows cost nothing."""

    def __init__(self, layers: PoolingLayers) -> None:
        self._layers = layers
        self._prompt_by_row: dict[int, PooledPrompt] = {}

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
        """Add a step's hidden states to their prompts, and the results of the prompts that it completes to `begun`."""
        if not self._prompt_by_row:
            return
        complete: list[tuple[int, PooledPrompt]] = []
        for i, row in enumerate(inputs.rows.tolist()):
            prompt = self._prompt_by_row.get(row)
            if prompt is None:
                continue
            begin, end = inputs.query_starts[i : i + 2].tolist()
            seq_len = int(inputs.seq_lens[i])
            prompt.add(hidden[begin:end], seq_len - (end - begin))
            if seq_len == prompt.num_tokens:
                complete.append((row, prompt))
        begun.pooled += self._results(complete)

    def _admit(self, new_row: NewRow) -> None:
        """Record the row if it is pooled. ProtocolError for cached tokens, which have no hidden states, if these
        count."""
        params = new_row.pooling
        if params is None:
            return
        if params.needs_all_states and new_row.num_computed_tokens:
            raise ProtocolError(
                f"row {new_row.row} is admitted with {new_row.num_computed_tokens} tokens computed: its pooling needs "
                "the hidden states of all"
            )
        self._prompt_by_row[new_row.row] = PooledPrompt(new_row, params, self._layers.config.methods)

    def _results(self, complete: list[tuple[int, PooledPrompt]]) -> Iterator[Pooled]:
        """Yield the results of complete prompts. Vectors of prompts with equal parameters pass the layers together."""
        alike: dict[tuple[object, ...], list[tuple[int, PooledPrompt]]] = {}
        for row, prompt in complete:
            params = prompt.params
            if params.is_token_level:
                yield _pooled(row, self._token_results(prompt))
                continue
            alike.setdefault((params.task, params.method, params.use_activation, params.dimensions), []).append(
                (row, prompt)
            )
        for group in alike.values():
            vectors = torch.stack([prompt.vector for _, prompt in group])
            results = self._layers.results(vectors, group[0][1].params).cpu()
            yield from (_pooled(row, result) for (row, _), result in zip(group, results, strict=True))

    def _token_results(self, prompt: PooledPrompt) -> Tensor:
        """Return the results [n, outputs] of a prompt's tokens; those of the tokens with step_tag_id alone if it is
        given."""
        results, head = self._layers.results(prompt.states, prompt.params), self._layers.config.head
        tag = prompt.params.step_tag_id
        if tag is None and prompt.params.task == "token_classify" and head is not None:
            tag = head.step_tag_id
        if tag is not None:
            results = results[torch.from_numpy(prompt.token_ids == tag)]
        return results.cpu()


def _pooled(row: int, result: Tensor) -> Pooled:
    array = BulkArray(dtype="float32", shape=list(result.shape), data=result.numpy().tobytes())
    return Pooled(row=row, vector=array)
