"""Ops.fused_moe on the device: route tokens to experts, list each expert's pairs, multiply, and sum the outputs.

Six launches (more with adapters), with grids that depend only on shapes: the host reads nothing back, so a CUDA graph
can capture the step. An expert's list is in token order.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...contract import GATED_SILU, Activation, Routing
from ..activation import activate
from .adapter_rows import list_slots
from .expand import expand
from .low_rank import LowRankMatrices, shrink
from .matmul import ExpertRows, Matrices, matmul

CHUNK = 1024  # pairs per iteration of list_rows_kernel
WIDTH_BLOCK = 1024  # elements per program of moe_sum_kernel


@dataclass(frozen=True, eq=False)
class TritonExperts:
    """The stacked weights of all experts: gate_up [E, 2 n, hidden], gates first, and down [E, hidden, n]."""

    gate_up: Matrices
    down: Matrices
    activation: Activation = GATED_SILU
    gate_up_bias: Tensor | None = None  # [E, 2 n]
    down_bias: Tensor | None = None  # [E, hidden]

    @property
    def nbytes(self) -> int:
        biases = (each.nbytes for each in (self.gate_up_bias, self.down_bias) if each is not None)
        return self.gate_up.nbytes + self.down.nbytes + sum(biases)


@dataclass(frozen=True, eq=False)
class ExpertAdapters:
    """A step's adapters for the experts of a layer."""

    ups: LowRankMatrices  # updates of gate_up
    downs: LowRankMatrices
    slots: Tensor  # [T] int32: each token's slot
    num_slots: int


@triton.jit
def without_closed_groups(
    choice, numbers, NUM_GROUPS: tl.constexpr, GROUP_SIZE: tl.constexpr, TOP_GROUPS: tl.constexpr,
    GROUPS_PAD: tl.constexpr, SCORE_IS_TOP2: tl.constexpr,
):  # fmt: skip
    """Replace the scores of experts outside the TOP_GROUPS best groups by −inf."""
    groups = tl.arange(0, GROUPS_PAD)
    best = tl.full((GROUPS_PAD,), float("-inf"), tl.float32)
    for group in range(NUM_GROUPS):
        members = tl.where(numbers // GROUP_SIZE == group, choice, float("-inf"))
        score = tl.max(members, axis=0)
        if SCORE_IS_TOP2:
            score += tl.max(tl.where(numbers == tl.argmax(members, axis=0), float("-inf"), members), axis=0)
        best = tl.where(groups == group, score, best)
    is_open = numbers < 0
    for _ in range(TOP_GROUPS):
        group = tl.argmax(best, axis=0)
        is_open = is_open | (numbers // GROUP_SIZE == group)
        best = tl.where(groups == group, float("-inf"), best)
    return tl.where(is_open, choice, float("-inf"))


@triton.jit
def route_kernel(
    scores,  # [T, E]
    choice_bias,  # [E] float32
    expert_scales,  # [E] float32
    weights,  # [T, TOP_K] float32
    experts,  # [T, TOP_K] int32
    scale,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS_PAD: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_K_PAD: tl.constexpr,
    SCORE: tl.constexpr,
    HAS_CHOICE_BIAS: tl.constexpr,
    HAS_EXPERT_SCALES: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    GROUPS_PAD: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    GROUP_SCORE: tl.constexpr,
    IS_NORMALIZED: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    numbers = tl.arange(0, EXPERTS_PAD)
    is_expert = numbers < NUM_EXPERTS
    values = tl.load(scores + token * NUM_EXPERTS + numbers, mask=is_expert, other=0.0).to(tl.float32)
    # scores of a request that overflowed may be NaN: any experts will do, but list_rows needs distinct ones
    values = tl.where(is_expert & (tl.abs(values) < float("inf")), values, -1e30)
    if SCORE == "softmax":
        powers = tl.where(is_expert, tl.exp(values - tl.max(values, axis=0)), 0.0)
        values = powers / tl.sum(powers, axis=0)
    elif SCORE == "sigmoid":
        powers = tl.exp(-tl.abs(values))
        values = tl.where(values < 0, powers, 1.0) / (1.0 + powers)
    left = tl.where(is_expert, values, float("-inf"))
    if HAS_CHOICE_BIAS:
        left += tl.load(choice_bias + numbers, mask=is_expert, other=0.0)
    if NUM_GROUPS > 1:
        left = without_closed_groups(
            left, numbers, NUM_GROUPS, NUM_EXPERTS // NUM_GROUPS, TOP_GROUPS, GROUPS_PAD, GROUP_SCORE == "top2"
        )
    places = tl.arange(0, TOP_K_PAD)
    chosen_weights = tl.full((TOP_K_PAD,), -1e30, dtype=tl.float32)  # finite: places past TOP_K are multiplied
    chosen = tl.zeros((TOP_K_PAD,), dtype=tl.int32)
    total = 0.0
    for place in range(TOP_K):
        best = tl.max(left, axis=0)
        number = tl.argmax(left, axis=0)
        if HAS_CHOICE_BIAS:
            best = tl.sum(tl.where(numbers == number, values, 0.0), axis=0)
        chosen_weights = tl.where(places == place, best, chosen_weights)
        chosen = tl.where(places == place, number, chosen)
        left = tl.where(numbers == number, float("-inf"), left)
        total += best
    exists = places < TOP_K
    if SCORE == "softmax_of_chosen":
        powers = tl.where(exists, tl.exp(chosen_weights - tl.max(chosen_weights, axis=0)), 0.0)
        chosen_weights = powers / tl.sum(powers, axis=0)
    elif IS_NORMALIZED:
        chosen_weights = chosen_weights / total
    if HAS_EXPERT_SCALES:
        chosen_weights *= tl.load(expert_scales + chosen, mask=exists, other=0.0)
    tl.store(weights + token * TOP_K + places, chosen_weights * scale, mask=exists)
    tl.store(experts + token * TOP_K + places, chosen, mask=exists)


@triton.jit(do_not_specialize=["num_tokens", "num_pairs"])
def list_rows_kernel(experts, rows, counts, num_tokens, num_pairs, CHUNK: tl.constexpr):
    """Write the pairs of one expert, in order, to its row of `rows` [E, num_tokens], and their number to `counts`
    [E]."""
    expert = tl.program_id(0)
    count = 0
    for start in range(0, num_pairs, CHUNK):
        choices = start + tl.arange(0, CHUNK)
        is_mine = tl.load(experts + choices, mask=choices < num_pairs, other=-1) == expert
        ones = is_mine.to(tl.int32)
        places = count + tl.cumsum(ones, axis=0) - ones
        tl.store(rows + expert.to(tl.int64) * num_tokens + places, choices, mask=is_mine)
        count += tl.sum(ones, axis=0)
    tl.store(counts + expert, count)


@triton.jit
def moe_sum_kernel(
    expert_outputs,  # [T * TOP_K, WIDTH] float32
    output,  # [T, WIDTH]
    WIDTH: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    exists = columns < WIDTH
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for place in range(TOP_K):
        total += tl.load(expert_outputs + (token * TOP_K + place) * WIDTH + columns, mask=exists, other=0.0)
    tl.store(output + token * WIDTH + columns, total.to(output.dtype.element_ty), mask=exists)


def route(scores: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
    """Return weights [T, top_k] float32 and ids [T, top_k] int32 of each token's experts, like `route` of reference.py.

    scores: [T, E]. Experts are distinct even if scores are not finite.
    """
    (num_tokens, num_experts), top_k = scores.shape, routing.top_k
    weights = torch.empty((num_tokens, top_k), dtype=torch.float32, device=scores.device)
    experts = torch.empty((num_tokens, top_k), dtype=torch.int32, device=scores.device)
    if num_tokens:
        route_kernel[(num_tokens,)](
            scores,
            weights if routing.choice_bias is None else routing.choice_bias,
            weights if routing.expert_scales is None else routing.expert_scales,
            weights,
            experts,
            float(routing.scale),
            NUM_EXPERTS=num_experts,
            EXPERTS_PAD=triton.next_power_of_2(num_experts),
            TOP_K=top_k,
            TOP_K_PAD=triton.next_power_of_2(top_k),
            SCORE=routing.score,
            HAS_CHOICE_BIAS=routing.choice_bias is not None,
            HAS_EXPERT_SCALES=routing.expert_scales is not None,
            NUM_GROUPS=routing.num_groups,
            GROUPS_PAD=triton.next_power_of_2(routing.num_groups),
            TOP_GROUPS=routing.top_groups,
            GROUP_SCORE=routing.group_score,
            IS_NORMALIZED=routing.is_normalized,
            num_warps=1,
        )
    return weights, experts


def list_rows(experts: Tensor, num_experts: int) -> ExpertRows:
    """Return the (token, expert) pairs of each expert. experts: [T, top_k] int32, distinct for each token."""
    num_tokens = len(experts)
    rows = torch.empty((num_experts, num_tokens), dtype=torch.int32, device=experts.device)
    counts = torch.empty(num_experts, dtype=torch.int32, device=experts.device)
    if num_tokens:
        list_rows_kernel[(num_experts,)](experts, rows, counts, num_tokens, experts.numel(), CHUNK=CHUNK, num_warps=4)
    return ExpertRows(rows, counts, experts.numel())


def moe_sum(expert_outputs: Tensor, top_k: int, dtype: torch.dtype) -> Tensor:
    """Sum the outputs [T * top_k, n] float32 of each token's experts, in order: [T, n] of `dtype`."""
    num_tokens, width = expert_outputs.shape[0] // top_k, expert_outputs.shape[1]
    output = torch.empty((num_tokens, width), dtype=dtype, device=expert_outputs.device)
    if num_tokens:
        moe_sum_kernel[(num_tokens, triton.cdiv(width, WIDTH_BLOCK))](
            expert_outputs, output, WIDTH=width, TOP_K=top_k, BLOCK=WIDTH_BLOCK, num_warps=4
        )
    return output


def fused_moe(
    x: Tensor,
    scores: Tensor,
    packed: TritonExperts,
    routing: Routing,
    is_batch_invariant: bool = False,
    adapters: ExpertAdapters | None = None,
) -> Tensor:
    """Compute Ops.fused_moe; a token's expert outputs are added in the order of their scores."""
    weights, experts = route(scores, routing)
    lists = list_rows(experts, packed.gate_up.qweight.shape[0])
    if adapters is not None:
        expert_outputs = _adapted_outputs(x, packed, adapters, lists, weights, is_batch_invariant)
        return moe_sum(expert_outputs, routing.top_k, x.dtype)
    inner = matmul(x, packed.gate_up, packed.gate_up_bias, x.dtype, lists, is_batch_invariant=is_batch_invariant)
    inner = activate(inner, packed.activation)
    expert_outputs = matmul(inner, packed.down, packed.down_bias, torch.float32, lists, weights, is_batch_invariant)
    return moe_sum(expert_outputs, routing.top_k, x.dtype)


def _adapted_outputs(
    x: Tensor,
    packed: TritonExperts,
    adapters: ExpertAdapters,
    lists: ExpertRows,
    weights: Tensor,
    is_batch_invariant: bool,
) -> Tensor:
    """Compute the weighted outputs [pairs, hidden] float32 of each token's experts with their adapters' updates."""
    tiles = list_slots(adapters.slots, adapters.num_slots, lists)
    ups, downs, bias = adapters.ups, adapters.downs, packed.gate_up_bias
    sums = matmul(x, packed.gate_up, bias, torch.float32, lists, is_batch_invariant=is_batch_invariant)
    inner = expand(sums, shrink(x, ups, tiles), ups, tiles, x.dtype, bias, packed.activation)
    bias = packed.down_bias
    sums = matmul(inner, packed.down, bias, torch.float32, lists, is_batch_invariant=is_batch_invariant)
    return expand(sums, shrink(inner, downs, tiles), downs, tiles, torch.float32, bias, row_scales=weights)
