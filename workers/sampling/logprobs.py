"""Logprobs: how likely the model found a token, beside the likeliest or given others, whatever the sampler did.

log_softmax of the logits as the model gives them. A rank is 1 + the number of larger logits, and of equal ones with a
lower id, so that ranks are a strict order and the likeliest token has rank 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ...ipc.messages.core import LogprobColumns
from .candidates import largest_ids

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
F32 = npt.NDArray[np.float32]
LogprobTargets: TypeAlias = int | I64  # beside a token: so many of the likeliest, or these tokens


@dataclass(frozen=True)
class TokenLogprobs:
    """Of n tokens; `ids[i]` begins with token i itself, then its place's likeliest by falling logprob, or others."""

    ranks: list[int]  # [n]
    ids: list[I64]  # [n] of [1 + k]
    logprobs: list[F32]  # likewise

    def to_columns(self, rows: Sequence[int], positions: Sequence[int]) -> LogprobColumns:
        """rows, positions: [n]."""
        return LogprobColumns(
            owners=np.array(rows, np.int32).tobytes(),
            positions=np.array(positions, np.int32).tobytes(),
            widths=np.array([len(ids) for ids in self.ids], np.int32).tobytes(),
            ranks=np.array(self.ranks, np.int32).tobytes(),
            token_ids=np.concatenate(self.ids).astype(np.int32).tobytes(),
            logprobs=np.concatenate(self.logprobs).tobytes(),
        )


def score_tokens(logits: Tensor, token_ids: I64, others: Sequence[LogprobTargets]) -> TokenLogprobs:
    """logits: [n, vocab] float32, left unchanged. token_ids, others: [n]."""
    scored = TokenLogprobs([], [], [])
    if logits.device.type == "cpu":
        array, scratch = logits.numpy(), np.empty(logits.shape[1], np.float32)
        for i, (token_id, wanted) in enumerate(zip(token_ids.tolist(), others, strict=True)):
            _add(scored, _score_row(array[i], scratch, token_id, wanted))
    elif len(token_ids):
        _score_on_device(logits, token_ids, others, scored)
    return scored


def _add(scored: TokenLogprobs, row: tuple[int, I64, F32]) -> None:
    scored.ranks.append(row[0])
    scored.ids.append(row[1])
    scored.logprobs.append(row[2])


def _score_row(logits: F32, scratch: F32, token_id: int, others: LogprobTargets) -> tuple[int, I64, F32]:
    """logits: [vocab]; scratch: [vocab], overwritten."""
    k = min(others, len(logits)) if isinstance(others, int) else 0
    ids = _ordered(largest_ids(logits, max(k, 1)), logits)
    if not len(ids) or not np.isfinite(logits[ids[0]]):  # a row of infinities or NaN has no distribution
        ids = np.append(token_id, np.arange(k) if isinstance(others, int) else others)
        return 1, ids, np.full(len(ids), np.nan, np.float32)
    largest = logits[ids[0]]
    np.subtract(logits, largest, out=scratch)
    np.exp(scratch, out=scratch)
    total = np.float32(largest + np.log(scratch.sum()))
    places = np.flatnonzero(ids == token_id)
    rank = int(places[0]) + 1 if len(places) else _rank(logits, token_id)
    ids = np.append(token_id, ids[:k] if isinstance(others, int) else others)
    return rank, ids, logits[ids] - total


def _rank(logits: F32, token_id: int) -> int:
    value = logits[token_id]
    return 1 + int(np.count_nonzero(logits > value)) + int(np.count_nonzero(logits[:token_id] == value))


def _ordered(token_ids: I64, logits: F32) -> I64:
    """By falling logit, ties by rising id."""
    return token_ids[np.lexsort((token_ids, -logits[token_ids]))]


def _score_on_device(logits: Tensor, token_ids: I64, others: Sequence[LogprobTargets], scored: TokenLogprobs) -> None:
    from ...kernels.gpu.sampling.logprobs import log_totals

    index = torch.from_numpy(token_ids).to(logits.device)[:, None]
    values = logits.gather(1, index)
    ties_before = (logits == values) & (torch.arange(logits.shape[1], device=logits.device) < index)
    ranks = 1 + (logits > values).sum(-1) + ties_before.sum(-1)
    totals = log_totals(logits)[:, None]
    num_top = [wanted if isinstance(wanted, int) else 0 for wanted in others]
    top_logits, top_ids = logits.topk(min(max(num_top), logits.shape[1]), dim=-1)
    logprobs = (torch.cat([values, top_logits], dim=-1) - totals).cpu().numpy()
    ids = torch.cat([index, top_ids], dim=-1).cpu().numpy()
    for i, (rank, wanted) in enumerate(zip(ranks.tolist(), others, strict=True)):
        order = np.lexsort((ids[i, 1:], -logprobs[i, 1:]))[: num_top[i]] + 1
        kept = np.concatenate([np.zeros(1, np.int64), order])
        row_ids, row_logprobs = ids[i, kept], logprobs[i, kept]
        if not isinstance(wanted, int):
            given = logits[i, torch.from_numpy(wanted).to(logits.device)] - totals[i]
            row_ids, row_logprobs = np.append(row_ids, wanted), np.append(row_logprobs, given.cpu().numpy())
        _add(scored, (rank, row_ids, row_logprobs))
