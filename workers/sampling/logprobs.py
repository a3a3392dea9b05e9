"""Logprobs of tokens under the model's own distribution: log_softmax of the logits, before any mask or processor.

A rank is 1 + the number of larger logits, and of equal ones with a lower id, so that ranks are a strict order and the
most likely token has rank 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from ...ipc.messages.workers import RowLogprobs
from ..machine.arrays import F32, I64
from .candidates import largest_ids

LogprobTargets: TypeAlias = int | I64  # tokens to score together with a token: that many most likely ones, or these ids


class ScoredToken(NamedTuple):
    """One token, and the other tokens that were scored at its position."""

    rank: int  # rank of the token itself
    ids: I64  # [1 + k]: the token, then the most likely ones by falling logprob, or the given ones
    logprobs: F32  # [1 + k]


def score_tokens(logits: Tensor, token_ids: I64, targets: Sequence[LogprobTargets]) -> list[ScoredToken]:
    """Return the scores of n tokens and of their targets; NaN if a row of logits has no distribution. logits: [n,
    vocab] float32, left unchanged. token_ids, targets: [n]."""
    if logits.device.type != "cpu":
        return list(_score_on_device(logits, token_ids, targets)) if len(token_ids) else []
    array, scratch = logits.numpy(), np.empty(logits.shape[1], np.float32)
    wanted = zip(array, token_ids.tolist(), targets, strict=True)
    return [_score_row(row, scratch, token_id, target) for row, token_id, target in wanted]


def to_columns(scored: Sequence[ScoredToken], rows: Sequence[int], positions: Sequence[int]) -> RowLogprobs:
    """Encode n ≥ 1 scored tokens and the row and position of each."""
    ranks, ids, logprobs = zip(*scored, strict=True)
    return RowLogprobs(
        rows=np.array(rows, np.int32).tobytes(),
        positions=np.array(positions, np.int32).tobytes(),
        widths=np.array([len(each) for each in ids], np.int32).tobytes(),
        ranks=np.array(ranks, np.int32).tobytes(),
        token_ids=np.concatenate(ids).astype(np.int32).tobytes(),
        logprobs=np.concatenate(logprobs).tobytes(),
    )


def _score_row(logits: F32, scratch: F32, token_id: int, targets: LogprobTargets) -> ScoredToken:
    """Return the score of one token and its targets; NaN if the logits have no distribution. logits: [vocab]. scratch:
    [vocab], overwritten."""
    k = min(targets, len(logits)) if isinstance(targets, int) else 0
    ids = largest_ids(logits, max(k, 1))
    ids = ids[np.lexsort((ids, -logits[ids]))]  # by falling logit, ties by rising id
    if not len(ids) or not np.isfinite(logits[ids[0]]):  # a row of infinities or NaN has no distribution
        ids = np.append(token_id, np.arange(k) if isinstance(targets, int) else targets)
        return ScoredToken(1, ids, np.full(len(ids), np.nan, np.float32))
    largest = logits[ids[0]]
    np.subtract(logits, largest, out=scratch)
    np.exp(scratch, out=scratch)
    total = np.float32(largest + np.log(scratch.sum()))
    found = np.flatnonzero(ids == token_id)
    rank = int(found[0]) + 1 if len(found) else _rank(logits, token_id)
    ids = np.append(token_id, ids[:k] if isinstance(targets, int) else targets)
    return ScoredToken(rank, ids, logits[ids] - total)


def _rank(logits: F32, token_id: int) -> int:
    value = logits[token_id]
    return 1 + int(np.count_nonzero(logits > value)) + int(np.count_nonzero(logits[:token_id] == value))


def _score_on_device(logits: Tensor, token_ids: I64, targets: Sequence[LogprobTargets]) -> Iterator[ScoredToken]:
    from ...kernels.gpu.sampling.logprobs import logsumexp

    index = torch.from_numpy(token_ids).to(logits.device)[:, None]
    values = logits.gather(1, index)
    ties_before = (logits == values) & (torch.arange(logits.shape[1], device=logits.device) < index)
    ranks = 1 + (logits > values).sum(-1) + ties_before.sum(-1)
    totals = logsumexp(logits)[:, None]
    num_top = [target if isinstance(target, int) else 0 for target in targets]
    top_logits, top_ids = logits.topk(min(max(num_top), logits.shape[1]), dim=-1)
    logprobs = (torch.cat([values, top_logits], dim=-1) - totals).cpu().numpy()
    ids = torch.cat([index, top_ids], dim=-1).cpu().numpy()
    for i, (rank, target) in enumerate(zip(ranks.tolist(), targets, strict=True)):
        order = np.lexsort((ids[i, 1:], -logprobs[i, 1:]))[: num_top[i]] + 1
        kept = np.concatenate([np.zeros(1, np.int64), order])
        row_ids, row_logprobs = ids[i, kept], logprobs[i, kept]
        if not isinstance(target, int):
            given = logits[i, torch.from_numpy(target).to(logits.device)] - totals[i]
            row_ids, row_logprobs = np.append(row_ids, target), np.append(row_logprobs, given.cpu().numpy())
        yield ScoredToken(rank, row_ids, row_logprobs)
