"""LogitsProcessors: changes the logits of all rows of a step, in the order that SamplingParams documents.

    allowed tokens → banned tokens (bad words, stops before min_tokens) → biases → processors → penalties → forced ones

Rows without rules cost nothing. What touches single tokens is gathered over all rows, computed at once and put back,
on whatever device the logits are.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ...ipc.errors import ConfigError
from ...ipc.messages.workers import NewRow
from .row_processors import CustomLogitsProcessor, RowProcessors, needs_processors

I64 = npt.NDArray[np.int64]


class LogitsProcessors:
    """Owns the rules by row, from admission until the row is freed."""

    def __init__(self, vocab_size: int, processors: Sequence[CustomLogitsProcessor] = ()) -> None:
        self._vocab_size = vocab_size
        self._processors = processors
        self._rules_by_row: dict[int, RowProcessors] = {}

    def admit(self, new_row: NewRow) -> None:
        if needs_processors(new_row.sampling):
            self._rules_by_row[new_row.row] = RowProcessors(new_row, self._processors, self._vocab_size)

    def free(self, rows: Sequence[int]) -> None:
        for row in rows:
            self._rules_by_row.pop(row, None)

    def clear(self) -> None:
        self._rules_by_row.clear()

    def append(self, rows: npt.NDArray[np.int32], token_ids: I64) -> None:
        """Each row's sampled token has become part of its output."""
        if self._rules_by_row:
            for row, token_id in zip(rows.tolist(), token_ids.tolist(), strict=True):
                rules = self._rules_by_row.get(row)
                if rules is not None:
                    rules.append(token_id)

    def of(self, rows: npt.NDArray[np.int32]) -> dict[int, RowProcessors]:
        """The rules of these rows by their place among them; rows without any are left out."""
        if not self._rules_by_row:
            return {}
        found = ((i, self._rules_by_row.get(row)) for i, row in enumerate(rows.tolist()))
        return {i: rules for i, rules in found if rules is not None}


def apply_processors(logits: Tensor, rules: dict[int, RowProcessors]) -> None:
    """Change logits [n, vocab] float32, contiguous, in place; `rules` by row of it."""
    for i, row in rules.items():
        if len(row.allowed):
            _keep_only(logits[i], row.allowed)
    _ban(logits, rules)
    _add_biases(logits, rules)
    for i, row in rules.items():
        row.process(logits[i])
    _penalize(logits, {i: row for i, row in rules.items() if row.counts is not None})
    for i, row in rules.items():
        if (token_id := row.forced()) is not None:
            logits[i].fill_(-torch.inf)
            logits[i, token_id] = 0.0


def _keep_only(logits: Tensor, allowed: I64) -> None:
    index = torch.from_numpy(allowed).to(logits.device)
    kept = logits[index]
    logits.fill_(-torch.inf)
    logits[index] = kept


def _ban(logits: Tensor, rules: dict[int, RowProcessors]) -> None:
    banned = {i: row.banned() for i, row in rules.items()}
    index = _flat_index(logits, banned)
    if index.numel():
        logits.view(-1).index_fill_(0, index, -torch.inf)


def _add_biases(logits: Tensor, rules: dict[int, RowProcessors]) -> None:
    biased = {i: row for i, row in rules.items() if len(row.bias_ids)}
    if biased:
        index = _flat_index(logits, {i: row.bias_ids for i, row in biased.items()})
        values = torch.from_numpy(np.concatenate([row.bias_values for row in biased.values()])).to(logits.device)
        logits.view(-1).index_add_(0, index, values)


def _penalize(logits: Tensor, rules: dict[int, RowProcessors]) -> None:
    if not rules:
        return
    counts = {i: row.counts for i, row in rules.items() if row.counts is not None}
    index = _flat_index(logits, {i: count.token_ids for i, count in counts.items()})
    sizes = [len(count.token_ids) for count in counts.values()]
    num_output = np.concatenate([count.counts for count in counts.values()])

    def column(values: list[float]) -> npt.NDArray[np.float32]:
        return np.repeat(np.array(values, np.float32), sizes)

    lost = column([row.frequency_penalty for row in rules.values()]) * num_output
    lost += column([row.presence_penalty for row in rules.values()]) * (num_output > 0)
    factors = torch.from_numpy(column([row.repetition_penalty for row in rules.values()])).to(logits.device)
    flat = logits.view(-1)
    values = flat[index]
    values = torch.where(values > 0, values / factors, values * factors)
    flat[index] = values - torch.from_numpy(lost).to(logits.device)


def _flat_index(logits: Tensor, ids_by_row: dict[int, I64]) -> Tensor:
    """Where these tokens of these rows stand in the flattened logits."""
    vocab_size = logits.shape[1]
    parts = [ids + i * vocab_size for i, ids in ids_by_row.items()]
    return torch.from_numpy(np.concatenate(parts) if parts else np.empty(0, np.int64)).to(logits.device)


def load_processors(paths: str | None) -> list[CustomLogitsProcessor]:
    """The processors of --allowed-logits-processors: "module:function", separated by commas."""
    return [_load_processor(path.strip()) for path in (paths or "").split(",") if path.strip()]


def _load_processor(path: str) -> CustomLogitsProcessor:
    module_name, _, name = path.partition(":")
    try:
        processor = getattr(importlib.import_module(module_name), name)
    except Exception as error:  # whatever the operator's module does
        raise ConfigError(f"--allowed-logits-processors {path} cannot be imported: {error}") from None
    if not callable(processor):
        raise ConfigError(f"--allowed-logits-processors {path} is {type(processor).__name__}, not a function")
    loaded: CustomLogitsProcessor = processor
    return loaded
