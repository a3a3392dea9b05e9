"""HistoryModel: a model of a few lines that reads its whole context from the KV cache.

Each slot stores its token; the hidden state of a token is a number computed from all tokens of its context, in order,
through the row's block table. A wrong slot, table, position or query start changes the logits. Further KV groups store
the tokens, too; they must hold those in their windows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from tokenloom.kernels.contract import BatchColumns, CacheGroup
from tokenloom.kernels.reference import ReferenceOps
from tokenloom.kernels.select import Ops
from tokenloom.workers.step.kv_cache import KVCacheSpec
from tokenloom.workers.step.model_step import StepContext
from tokenloom.workers.step.state_cache import StateSpec

VOCAB_SIZE = 211
ONE_GROUP = (None,)  # windows by KV group: one that sees all tokens
_LOGITS = torch.from_numpy(np.random.default_rng(0).normal(0, 2, (VOCAB_SIZE, VOCAB_SIZE)).astype(np.float32))


def summary(history: Sequence[int]) -> int:
    value = 0
    for token in history:
        value = (value * 31 + token + 1) % VOCAB_SIZE
    return value


def logits_after(history: Sequence[int]) -> Tensor:
    """Return the logits [1, vocab] that the model must compute after these tokens."""
    return logits_of(summary(history))[None]


def logits_of(value: int) -> Tensor:
    """Return the logits [vocab] of a hidden state."""
    return _LOGITS[value]


class HistoryModel:
    """A token's embedding is its number. Rows of length 0 come last and are padding. The first group sees all
    tokens."""

    weight_bytes = state_bytes = 0
    state_spec: StateSpec | None = None

    def __init__(self, windows: Sequence[int | None] = ONE_GROUP) -> None:
        self._windows = windows

    _ops: Ops = ReferenceOps()
    _table = torch.arange(VOCAB_SIZE, dtype=torch.float32)[:, None]

    def kv_cache_specs(self, block_size: int, dtype: torch.dtype) -> list[KVCacheSpec]:
        return [KVCacheSpec(1, 1, 1, block_size, dtype) for _ in self._windows]

    def _forward(self, token_ids: Tensor, context: StepContext) -> Tensor:
        block_size = context.block_size
        for kv_cache, metadata in context.groups:
            is_written = metadata.slots >= 0
            slots = metadata.slots[is_written]
            kv_cache[slots // block_size, 0, 0, 0, slots % block_size, 0] = token_ids[is_written].to(kv_cache.dtype)
        metadata = context.metadata
        hidden = torch.zeros(len(token_ids), 1)
        for row, (start, end) in enumerate(pairwise(metadata.query_starts_host)):
            assert (end - start == 1) or row >= metadata.num_decode_rows
            history, *others = (
                kv_cache[each.block_tables[row].long(), 0, 0, 0, :, 0].flatten().long().tolist()
                for kv_cache, each in context.groups
            )
            for token in range(start, end):
                position = int(metadata.positions[token])
                assert position == metadata.seq_lens_host[row] - (end - token)
                hidden[token] = summary(history[: position + 1])
                for window, seen in zip(self._windows[1:], others, strict=True):
                    first = 0 if window is None else max(position - window + 1, 0)
                    assert seen[first : position + 1] == history[first : position + 1]
        return hidden

    def forward_logits(self, token_ids: Tensor, logits_indices: Tensor, context: StepContext) -> tuple[Tensor, Tensor]:
        hidden = self._forward(token_ids, context)
        return hidden, self.compute_logits(hidden, logits_indices)

    def forward_mixed(self, token_ids: Tensor, rows: BatchColumns, context: StepContext) -> Tensor:
        # Triton's interpreter would take a quarter of all time over each token of each prompt.
        embedded = ReferenceOps().begin_step(token_ids, rows, self._table, 0)
        return self._forward(embedded[:, 0].long(), context)

    def forward_decode(self, row_ids: Tensor, rows: BatchColumns, context: StepContext) -> Tensor:
        groups = [each.metadata for each in context.groups]
        token_ids = self._ops.begin_decode(row_ids, rows, groups, context.block_size, self._table, 0)[:, 0].long()
        n = int((context.metadata.seq_lens > 0).sum())
        live = [
            CacheGroup(
                kv_cache,
                replace(
                    metadata,
                    positions=metadata.positions[:n],
                    slots=metadata.slots[:n],
                    query_starts_host=metadata.query_starts_host[: len(metadata.seq_lens_host) + 1][: n + 1],
                    seq_lens_host=metadata.seq_lens.tolist()[:n],
                ),
            )
            for kv_cache, metadata in context.groups
        ]
        hidden = torch.zeros(len(token_ids), 1)
        hidden[:n] = self._forward(token_ids[:n], StepContext(live))
        return hidden

    def compute_logits(self, hidden: Tensor, indices: Tensor | None = None) -> Tensor:
        hidden = hidden if indices is None else hidden[indices]
        return _LOGITS[hidden[:, 0].long()]
