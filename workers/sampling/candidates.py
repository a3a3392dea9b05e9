"""Candidates: the tokens of a row that can still be sampled, for logits on the host.

A token's weight is exp((logit − largest) / T), so the most likely token's weight is 1. The token with the highest
score, logit / T plus noise (see sampler.py), wins. The filters, each applied to the tokens that the previous one keeps:
    min_p        tokens at least min_p times as likely as the most likely one
    top_k        the k largest logits
    top_p        the most likely tokens, until their probability reaches top_p
Each cuts at a value and keeps ties with the last token, so the set does not depend on a sort.

Without top_k and top_p, if a large part of the vocabulary could win, the noise of the whole vocabulary is generated at
once. Then only tokens whose score reaches that of the most likely token become candidates.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from ...kernels import noise
from ...kernels.cpu.sampling import DRAW, CandidateList, CpuSampling
from ..machine.arrays import F32, F64, I64, U32, Bools

_SLACK = 1e-3  # relative error allowed for float32 weights when they are only used to rule tokens out
_WIDE_SHARE = 1 / 16  # share of the vocabulary above which the noise of the whole vocabulary is cheaper than a list
_NUM_GROUP_MEMBERS = 64  # logits per group; the groups' maxima give a bound of the k-th largest logit


class RowDraw(NamedTuple):
    """The sampling inputs of one row besides its logits. Never greedy; the largest logit is finite."""

    row: int  # index in the logits
    position: int  # position of the token to draw
    temperature: np.float32
    top_k: int  # 0: all
    top_p: float
    min_p: float
    seed: U32  # [2]
    largest: np.float32  # the largest logit
    reached_noise: float  # noise −log E of the most likely token; the sampled token's score is at least that token's

    def weights(self, logits: F32) -> F64:
        weights: F64 = np.exp((logits.astype(np.float64) - self.largest) / self.temperature)
        return weights

    def most_bits(self, logits: F32) -> F64:
        """Return the largest noise bits with which each token's score still reaches the most likely token's; smaller
        bits give a higher score."""
        return self.weights(logits) * self.noise_scale()

    @property
    def least_winning_weight(self) -> float:
        """The weight below which no token can win, because no noise exceeds MAX_GUMBEL."""
        return math.exp(self.reached_noise - noise.MAX_GUMBEL) * (1 - _SLACK)

    def total(self, logits: F32) -> float:
        """Return the sum of the weights that min_p keeps; 0 without top_p, as only top_p needs the sum."""
        if self.top_p == 1:
            return 0.0
        weights = self.weights(logits)
        return float(weights[weights >= self.min_p].sum())

    def weight_floor(self, total: float, vocab_size: int) -> float:
        """Return the weight below which, without top_k, a token cannot win or a filter removes it.

        top_p removes all tokens that weigh less than (1 − top_p) · total / vocab_size, as together they are too light.
        """
        left_out = (1 - self.top_p) * total / vocab_size if self.top_p < 1 else 0.0
        return max(self.least_winning_weight, max(self.min_p, left_out) * (1 - _SLACK))

    def noise_scale(self) -> float:
        """Return the factor f such that a token needs bits ≤ weight · f to win.

        Its exponential noise E must be ≤ weight · exp(−reached_noise), and E > bits / 2³².
        """
        return math.exp(-self.reached_noise) * 2.0**32 * (1 + _SLACK)


@dataclass(frozen=True)
class Candidates:
    """Tokens of one row by rising id: with top_k those that it keeps, else all that can win and perhaps some more."""

    token_ids: I64
    logits: F32
    total: float  # sum of the weights of all tokens, candidates or not, that min_p and top_k keep; 0 without top_p

    def filtered(self, draw: RowDraw) -> Candidates:
        """Return the candidates that pass min_p and top_p and whose weight is large enough to win."""
        kept = self._keep(draw.weights(self.logits) >= draw.min_p) if draw.min_p else self
        mask = draw.weights(kept.logits) >= draw.least_winning_weight
        if draw.top_p < 1:
            mask &= kept.logits >= kept._top_p_cut(draw)
        return kept._keep(mask)

    def _top_p_cut(self, draw: RowDraw) -> np.float32:
        """Return the smallest logit that top_p keeps."""
        falling = np.sort(self.logits)[::-1]
        last = int(np.searchsorted(np.cumsum(draw.weights(falling)), draw.top_p * self.total))
        return np.float32(falling[min(last, len(falling) - 1)])

    def _keep(self, mask: Bools) -> Candidates:
        return Candidates(self.token_ids[mask], self.logits[mask], self.total)


def find_candidates(logits: Tensor, draws: list[RowDraw], kernels: CpuSampling | None) -> list[Candidates]:
    """Return the candidates of each draw, in the order of `draws`. logits: [n, vocab] float32 on the CPU. `kernels`:
    used instead of numpy for draws without top_k; None: all use numpy."""
    array, vocab_size = logits.numpy(), logits.shape[1]
    wide = [draw for draw in draws if draw.top_k == 0]  # top_k leaves few tokens by itself
    if kernels is not None:
        listed = iter(kernels.list_candidates(logits, _kernel_draws(wide, vocab_size)))
    else:
        scratch = np.empty(vocab_size, np.float32)
        listed = (_list_in_row(array[draw.row], draw, scratch) for draw in wide)  # row by row, for the CPU's cache
    found = []
    for draw in draws:
        row = array[draw.row]
        if draw.top_k:
            token_ids = largest_ids(row, draw.top_k)
            found.append(Candidates(token_ids, row[token_ids], draw.total(row[token_ids])))
        else:
            token_ids, total = next(listed)
            found.append(Candidates(token_ids, row[token_ids], total))
    return found


def _list_in_row(logits: F32, draw: RowDraw, weights: F32) -> CandidateList:
    """Return the candidates of a draw without top_k. logits: [vocab]. weights: [vocab], scratch memory."""
    np.subtract(logits, draw.largest, out=weights)
    np.divide(weights, draw.temperature, out=weights)
    np.exp(weights, out=weights)
    total = 0.0
    if draw.top_p < 1:
        total = float(weights[weights >= draw.min_p].sum() if draw.min_p else weights.sum())
    mask = weights >= np.float32(draw.weight_floor(total, len(logits)))
    if draw.top_p == 1 and np.count_nonzero(mask) > len(logits) * _WIDE_SHARE:
        bits = noise.vocabulary_bits(len(logits), draw.position, draw.seed)
        np.multiply(weights, np.float32(draw.noise_scale()), out=weights)
        mask = weights >= bits
    return CandidateList(np.flatnonzero(mask), total)


def largest_ids(logits: F32, k: int) -> I64:
    """Return the ids of the k largest logits and of ties with the k-th, by rising id.

    The k-th largest maximum of disjoint groups is a lower bound, which first removes most logits.
    """
    num_groups = len(logits) // _NUM_GROUP_MEMBERS
    grouped = logits[: num_groups * _NUM_GROUP_MEMBERS].reshape(_NUM_GROUP_MEMBERS, num_groups)
    bound = _kth_largest(grouped.max(axis=0), k) if k <= num_groups else _kth_largest(logits, k)
    token_ids = np.flatnonzero(logits >= bound)
    kept = logits[token_ids]
    return token_ids[kept >= _kth_largest(kept, k)] if len(kept) > k else token_ids


def _kth_largest(values: F32, k: int) -> np.float32:
    return np.float32(np.partition(values, len(values) - k)[len(values) - k])


def _kernel_draws(draws: list[RowDraw], vocab_size: int) -> npt.NDArray[np.void]:
    """Encode the draws for the kernel, with the bounds of RowDraw.weight_floor.

    With top_p, noise does not rule out tokens, because top_p depends on all of them.
    """
    columns = np.zeros(len(draws), DRAW)
    for column, draw in zip(columns, draws, strict=True):
        column["row"], column["position"] = draw.row, draw.position
        column["largest"], column["temperature"] = draw.largest, draw.temperature
        column["least_weight"] = max(draw.least_winning_weight, draw.min_p * (1 - _SLACK))
        column["counted_weight"] = draw.min_p
        column["share"] = (1 - draw.top_p) / vocab_size * (1 - _SLACK)
        column["noise_scale"] = draw.noise_scale() if draw.top_p == 1 else 0
        column["seed_low"], column["seed_high"] = draw.seed
    return columns
