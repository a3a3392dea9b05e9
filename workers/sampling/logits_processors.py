"""LogitsProcessors: changes the logits of all rows of a step, in the order that SamplingParams documents.

    allowed tokens → bans (suppressed tokens, bad words, stops before min_tokens) → biases → custom processors
    → penalties → timestamps → forced tokens

Rows without processors cost nothing. Changes of single tokens are gathered over all rows and computed at once, on the
device of the logits.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ...ipc.errors import ConfigError
from ...ipc.messages.workers import NewRow
from ...ipc.spec.models.model_config import OutputRules
from ..machine.arrays import F32, I32, I64
from .row_processors import CustomLogitsProcessor, RowProcessors, needs_processors
from .timestamps import apply_timestamps


class LogitsProcessors:
    """The processors of each row, from the row's admission until it is freed."""

    def __init__(
        self, vocab_size: int, processors: Sequence[CustomLogitsProcessor] = (), rules: OutputRules | None = None
    ) -> None:
        """`processors`: the operator's own. `rules`: the model's rules, for all rows."""
        self._vocab_size = vocab_size
        self._custom, self._rules = processors, rules
        self._processors_by_row: dict[int, RowProcessors] = {}

    def admit(self, new_row: NewRow) -> None:
        if self._rules is not None or needs_processors(new_row.sampling):
            made = RowProcessors(new_row, self._custom, self._vocab_size, self._rules)
            self._processors_by_row[new_row.row] = made

    def free(self, rows: Sequence[int]) -> None:
        for row in rows:
            self._processors_by_row.pop(row, None)

    def clear(self) -> None:
        self._processors_by_row.clear()

    def append(self, rows: I32, token_ids: I64) -> None:
        """Append the sampled token of each row to its output."""
        if self._processors_by_row:
            for row, token_id in zip(rows.tolist(), token_ids.tolist(), strict=True):
                processors = self._processors_by_row.get(row)
                if processors is not None:
                    processors.append(token_id)

    def follow(self, row: int, token_ids: list[int], num_outputs: int) -> None:
        """Append the output tokens that the row's processors do not have yet. token_ids: the last of the row's
        `num_outputs` output tokens, at least all that are missing."""
        if (processors := self._processors_by_row.get(row)) is not None:
            num_missing = num_outputs - len(processors.outputs)
            for token_id in token_ids[len(token_ids) - num_missing :]:
                processors.append(token_id)

    def of(self, rows: I32) -> dict[int, RowProcessors]:
        """Return the processors of these rows, by index in `rows`; rows without processors are left out."""
        if not self._processors_by_row:
            return {}
        found = ((i, self._processors_by_row.get(row)) for i, row in enumerate(rows.tolist()))
        return {i: processors for i, processors in found if processors is not None}


def apply_processors(logits: Tensor, processors: dict[int, RowProcessors]) -> None:
    """Change logits [n, vocab] float32, contiguous, in place. processors: by index of the logits' row.

    Masks of grammars come first: no end of a thought is forced where they do not allow it."""
    forced = {i: row.forced(logits[i]) for i, row in processors.items()}
    for i, row in processors.items():
        if len(row.allowed):
            _keep_only(logits[i], row.allowed)
    _ban(logits, processors)
    _add_biases(logits, processors)
    for i, row in processors.items():
        row.process(logits[i])
    _penalize(logits, {i: row for i, row in processors.items() if row.counts is not None})
    apply_timestamps(logits, {i: row.timestamps for i, row in processors.items() if row.timestamps is not None})
    for i, token_id in forced.items():
        if token_id is not None:
            logits[i].fill_(-torch.inf)
            logits[i, token_id] = 0.0


def _keep_only(logits: Tensor, allowed: I64) -> None:
    index = torch.from_numpy(allowed).to(logits.device)
    kept = logits[index]
    logits.fill_(-torch.inf)
    logits[index] = kept


def _ban(logits: Tensor, processors: dict[int, RowProcessors]) -> None:
    banned = {i: row.banned() for i, row in processors.items()}
    index = _flat_index(logits, banned)
    if index.numel():
        logits.view(-1).index_fill_(0, index, -torch.inf)


def _add_biases(logits: Tensor, processors: dict[int, RowProcessors]) -> None:
    biased = {i: row for i, row in processors.items() if len(row.bias_ids)}
    if biased:
        index = _flat_index(logits, {i: row.bias_ids for i, row in biased.items()})
        values = torch.from_numpy(np.concatenate([row.bias_values for row in biased.values()])).to(logits.device)
        logits.view(-1).index_add_(0, index, values)


def _penalize(logits: Tensor, processors: dict[int, RowProcessors]) -> None:
    if not processors:
        return
    counts = {i: row.counts for i, row in processors.items() if row.counts is not None}
    index = _flat_index(logits, {i: count.token_ids for i, count in counts.items()})
    sizes = [len(count.token_ids) for count in counts.values()]
    num_output = np.concatenate([count.counts for count in counts.values()])

    def column(values: list[float]) -> F32:
        return np.repeat(np.array(values, np.float32), sizes)

    samplings = [row.sampling for row in processors.values()]
    lost = column([sampling.frequency_penalty for sampling in samplings]) * num_output
    lost += column([sampling.presence_penalty for sampling in samplings]) * (num_output > 0)
    factors = torch.from_numpy(column([sampling.repetition_penalty for sampling in samplings])).to(logits.device)
    flat = logits.view(-1)
    values = flat[index]
    values = torch.where(values > 0, values / factors, values * factors)
    flat[index] = values - torch.from_numpy(lost).to(logits.device)


def _flat_index(logits: Tensor, ids_by_row: dict[int, I64]) -> Tensor:
    """Return the indices of these tokens of these rows in the flattened logits."""
    vocab_size = logits.shape[1]
    parts = [ids + i * vocab_size for i, ids in ids_by_row.items()]
    return torch.from_numpy(np.concatenate(parts) if parts else np.empty(0, np.int64)).to(logits.device)


def load_processors(paths: str | None) -> list[CustomLogitsProcessor]:
    """Import the processors of --allowed-logits-processors: "module:function", separated by commas. ConfigError if one
    cannot be imported or called."""
    return [_load_processor(path.strip()) for path in (paths or "").split(",") if path.strip()]


def _load_processor(path: str) -> CustomLogitsProcessor:
    module_name, _, name = path.partition(":")
    try:
        processor = getattr(importlib.import_module(module_name), name)
    except Exception as error:  # the operator's module may raise anything
        raise ConfigError(f"--allowed-logits-processors {path} cannot be imported: {error}") from None
    if not callable(processor):
        raise ConfigError(f"--allowed-logits-processors {path} is {type(processor).__name__}, not a function")
    loaded: CustomLogitsProcessor = processor
    return loaded
