"""Sampling in one launch: top_k, top_p and min_p by threshold search instead of sorting, then a Gumbel-max draw.

One program per row makes at most three passes over its logits:

    1  largest logit                                          → the token of a greedy row
    2  sum of weights and histogram of logits                 only with top_p or top_k
    3  list of candidates: tokens that the draw can select or that a filter needs
    4  on the candidates: k-th largest and top_p cutoff by bisection of a float's bits, min_p, scores, argmax

A weight is exp((logit − largest) / T). The filters and their order are those of workers/sampling/candidates.py, with
ties kept. Pass 3 uses the bounds of that file too: a token that they drop cannot be the result.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...noise import MAX_GUMBEL
from .noise import gumbel, run_bits, token_bits

BLOCK = 4096  # logits per iteration of passes 1 to 3
PART = 512  # candidates per iteration of pass 4
NUM_WARPS = 8  # few enough for several programs per multiprocessor, which hide each other's latency
MIN_TEMPERATURE = 1e-5  # below it sampling is greedy, as in workers/sampling/sampling_columns.py

_MIN_TEMPERATURE = tl.constexpr(MIN_TEMPERATURE)
_SLACK = tl.constexpr(1e-3)  # relative error allowed for float32 weights when they are only used to drop tokens
_MAX_GUMBEL = tl.constexpr(MAX_GUMBEL + 1e-3)  # upper bound of a token's noise
_NUM_BINS = tl.constexpr(64)  # the cost per logit grows with it
_BINS_PER_UNIT = tl.constexpr(2.0)  # bins reach 32 below the largest logit; the last bin holds all lower logits
_NO_ID = tl.constexpr(2147483647)


@triton.jit
def ordered_key(values):
    """Map floats to int32 in the same order; NaN is largest, −0 equals 0."""
    bits = tl.where(values == 0.0, 0.0, values).to(tl.int32, bitcast=True)
    return tl.where(values != values, 0x7FFFFFFF, bits ^ ((bits >> 31) & 0x7FFFFFFF))


@triton.jit
def largest_token(logits, vocab_size, BLOCK: tl.constexpr):
    """Return the lowest id of the largest logit; NaN counts as largest."""
    steps = tl.arange(0, BLOCK)
    best_key = tl.full([BLOCK], -2147483648, tl.int32)
    best_id = tl.full([BLOCK], 0, tl.int32) + steps
    for start in tl.range(0, vocab_size, BLOCK):
        ids = start + steps
        key = ordered_key(tl.load(logits + ids, mask=ids < vocab_size, other=float("-inf")))
        is_better = key > best_key
        best_key = tl.where(is_better, key, best_key)
        best_id = tl.where(is_better, ids, best_id)
    return tl.min(tl.where(best_key == tl.max(best_key, axis=0), best_id, _NO_ID), axis=0)


@triton.jit
def bin_of(logit, largest):
    """Return the histogram bin (int32) of a logit, by its distance below the largest."""
    distance = tl.minimum((largest - logit) * _BINS_PER_UNIT, _NUM_BINS - 1.0)
    return distance.to(tl.int32)


@triton.jit
def weight_sum_and_histogram(logits, vocab_size, largest, temperature, min_p, BLOCK: tl.constexpr):
    """Return the sum of the weights that pass min_p, and the number of tokens in each bin."""
    steps = tl.arange(0, BLOCK)
    total = tl.zeros([1], tl.float64)
    histogram = tl.zeros([_NUM_BINS], tl.int32)
    for start in tl.range(0, vocab_size, BLOCK):
        ids = start + steps
        logit = tl.load(logits + ids, mask=ids < vocab_size, other=float("-inf"))
        weight = tl.exp((logit - largest) / temperature)
        total += tl.sum(tl.where(weight >= min_p, weight, 0.0), axis=0).to(tl.float64)
        histogram += tl.histogram(bin_of(logit, largest), _NUM_BINS)  # lanes past the vocabulary go to the last bin
    return tl.sum(total, axis=0), histogram


@triton.jit
def list_candidates(
    logits, vocab_size, listed, largest, temperature, floor, last_bin, noise_scale, position, seed_low, seed_high,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the candidates to `listed` by rising id; return their number.

    If last_bin ≥ 0 (top_k), the candidates are the tokens in bins up to it, whatever their weight; otherwise the tokens
    that weigh at least `floor`. If noise_scale > 0, a candidate's noise must also be high enough to win.
    """
    steps = tl.arange(0, BLOCK)
    count = vocab_size * 0
    for start in tl.range(0, vocab_size, BLOCK):
        ids = start + steps
        logit = tl.load(logits + ids, mask=ids < vocab_size, other=float("-inf"))
        weight = tl.exp((logit - largest) / temperature)
        is_kept = tl.where(last_bin >= 0, bin_of(logit, largest) <= last_bin, weight >= floor) & (ids < vocab_size)
        if noise_scale > 0.0:
            bits = run_bits(start, position, seed_low, seed_high, BLOCK)
            is_kept = is_kept & (bits.to(tl.float32) <= weight * noise_scale)
        ordinals = tl.cumsum(is_kept.to(tl.int32), axis=0)
        tl.store(listed + count + ordinals - 1, ids, mask=is_kept)
        count += tl.sum(is_kept.to(tl.int32), axis=0)
    return count


@triton.jit
def measure_from(logits, listed, count, largest, temperature, min_p, low_key, PART: tl.constexpr):
    """Return the number of candidates with keys ≥ low_key that pass min_p, and the sum of their weights."""
    steps = tl.arange(0, PART)
    number = count * 0
    total = tl.zeros([1], tl.float64)
    for start in tl.range(0, count, PART):
        exists = start + steps < count
        ids = tl.load(listed + start + steps, mask=exists, other=0)
        logit = tl.load(logits + ids, mask=exists, other=float("-inf"))
        weight = tl.exp((logit - largest).to(tl.float64) / temperature)
        is_in = exists & (ordered_key(logit).to(tl.int64) >= low_key) & (weight >= min_p)
        number += tl.sum(is_in.to(tl.int32), axis=0)
        total += tl.sum(tl.where(is_in, weight, 0.0), axis=0)
    return number, tl.sum(total, axis=0)


@triton.jit
def highest_cut(
    logits, listed, count, largest, temperature, min_p, low, high, min_number, min_weight, PART: tl.constexpr
):
    """Return the highest key in [low, high] at or above which there are at least min_number candidates of together at
    least min_weight; `low` if there is none."""
    while low < high:
        middle = low + (high - low + 1) // 2
        number, weight = measure_from(logits, listed, count, largest, temperature, min_p, middle, PART)
        if (number >= min_number) & (weight >= min_weight):
            low = middle
        else:
            high = middle - 1
    return low


@triton.jit
def best_candidate(
    logits, listed, count, largest, temperature, cut, min_weight, position, seed_low, seed_high, PART: tl.constexpr
):
    """Return the id with the highest logit / T + noise among candidates with key ≥ cut and weight ≥ min_weight."""
    steps = tl.arange(0, PART)
    best_score = tl.full([1], float("-inf"), tl.float64)
    best_id = tl.full([1], _NO_ID, tl.int32)
    for start in tl.range(0, count, PART):
        exists = start + steps < count
        ids = tl.load(listed + start + steps, mask=exists, other=0)
        logit = tl.load(logits + ids, mask=exists, other=float("-inf"))
        weight = tl.exp((logit - largest).to(tl.float64) / temperature)
        is_in = exists & (ordered_key(logit).to(tl.int64) >= cut) & (weight >= min_weight)
        score = tl.div_rn(logit, temperature).to(tl.float64) + gumbel(token_bits(ids, position, seed_low, seed_high))
        score = tl.where(is_in, score, float("-inf"))
        part_score = tl.max(score, axis=0)
        part_id = tl.min(tl.where(is_in & (score == part_score), ids, _NO_ID), axis=0)
        is_better = part_score > best_score
        best_score = tl.where(is_better, part_score, best_score)
        best_id = tl.where(is_better, part_id, best_id)
    return tl.min(best_id, axis=0)


@triton.jit
def sample_kernel(
    logits,  # [n, vocab_size] float32, contiguous
    row_ids,  # [n] int64: row of the parameters; negative: the result is token 0
    temperatures,  # [rows] float32
    top_ks,  # [rows] int32
    top_ps,  # [rows] float64
    min_ps,  # [rows] float64
    seeds,  # [rows, 2] int32 (the bits of the words)
    positions,  # [n]
    last_tokens,  # [rows] int64
    listed,  # [n, vocab_size] int32, scratch
    output,  # [n] int64
    vocab_size,
    BLOCK: tl.constexpr,
    PART: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64)
    row = tl.load(row_ids + index)
    if row < 0:
        tl.store(output + index, 0)
    else:
        logits += index * vocab_size
        listed += index * vocab_size
        temperature = tl.load(temperatures + row)
        token = largest_token(logits, vocab_size, BLOCK)
        largest = tl.load(logits + token)
        if (temperature >= _MIN_TEMPERATURE) & (tl.abs(largest) < float("inf")):
            top_k = tl.load(top_ks + row)
            top_k = tl.where(top_k < vocab_size, tl.maximum(top_k, 0), 0)
            top_p = tl.load(top_ps + row)
            min_p = tl.load(min_ps + row)
            position = tl.load(positions + index).to(tl.uint32)
            seed_low = tl.load(seeds + 2 * row).to(tl.uint32, bitcast=True)
            seed_high = tl.load(seeds + 2 * row + 1).to(tl.uint32, bitcast=True)
            reached = tl.sum(gumbel(token_bits(token + tl.zeros([1], tl.int32), position, seed_low, seed_high)), axis=0)
            least = tl.exp(reached - _MAX_GUMBEL) * (1.0 - _SLACK)  # a token of less weight cannot win
            total = tl.zeros([1], tl.float64)
            total = tl.sum(total, axis=0)
            floor = tl.maximum(least, min_p * (1.0 - _SLACK))
            last_bin = -1
            noise_scale = tl.exp(-reached) * (4294967296.0 * (1.0 + _SLACK))
            if (top_k > 0) | (top_p < 1.0):
                noise_scale = noise_scale * 0.0
                total, histogram = weight_sum_and_histogram(
                    logits, vocab_size, largest, temperature, min_p.to(tl.float32), BLOCK
                )
                floor = tl.maximum(floor, (1.0 - top_p) * total / vocab_size * (1.0 - _SLACK))
                if top_k > 0:
                    last_bin = tl.sum((tl.cumsum(histogram, axis=0) < top_k).to(tl.int32), axis=0)
            tl.debug_barrier()
            count = list_candidates(
                logits, vocab_size, listed, largest, temperature, floor.to(tl.float32), last_bin,
                noise_scale.to(tl.float32), position, seed_low, seed_high, BLOCK,
            )  # fmt: skip
            tl.debug_barrier()  # threads read entries of `listed` that other threads wrote
            high = tl.max(ordered_key(largest + tl.zeros([1], tl.float32)), axis=0).to(tl.int64)
            cut = tl.full([1], -2147483648, tl.int64)
            cut = tl.min(cut, axis=0)
            if top_k > 0:
                cut = highest_cut(logits, listed, count, largest, temperature, min_p, cut, high, top_k, 0.0, PART)
                _, total = measure_from(logits, listed, count, largest, temperature, min_p, cut, PART)
            if top_p < 1.0:
                cut = highest_cut(logits, listed, count, largest, temperature, min_p, cut, high, 1, top_p * total, PART)
            token = best_candidate(
                logits, listed, count, largest, temperature, cut, tl.maximum(min_p, least), position, seed_low,
                seed_high, PART,
            )  # fmt: skip
        tl.store(output + index, token.to(tl.int64))
        tl.store(last_tokens + row, token.to(tl.int64))


def sample(
    logits: Tensor,
    row_ids: Tensor,
    drawing: Sequence[Tensor],
    positions: Tensor,
    last_tokens: Tensor | None = None,
    output: Tensor | None = None,
) -> Tensor:
    """Sample a token for each of n rows: [n] int64, written to `output` if given.

    logits: [n, vocab] float32, contiguous, not modified. row_ids: [n] int64, index into the columns; negative gives
    token 0. drawing: the columns temperatures, top_ks, top_ps, min_ps and seeds, as in the kernel.
    positions: [n] int32, those of the tokens to sample. last_tokens: [rows] int64, also receives the tokens.
    """
    num_rows, vocab_size = logits.shape
    if output is None:
        output = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if last_tokens is None:
        last_tokens = torch.empty(len(drawing[0]), dtype=torch.int64, device=logits.device)
    listed = torch.empty((num_rows, vocab_size), dtype=torch.int32, device=logits.device)
    if num_rows:
        sample_kernel[(num_rows,)](
            logits,
            row_ids,
            *drawing,
            positions,
            last_tokens,
            listed,
            output,
            vocab_size,
            BLOCK=BLOCK,
            PART=PART,
            num_warps=NUM_WARPS,
        )
    return output
