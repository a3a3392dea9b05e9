"""Ops.fused_moe on the device: route tokens to experts, list each expert's pairs, multiply, and sum the outputs.

Six launches with grids that depend only on shapes: nothing is read back, so a CUDA graph can capture the step. An
expert's list is in token order.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ... import reference
from ...contract import GATED_SILU, Routing
from ..activation import activate
from .matmul import ExpertRows, Matrices, matmul

CHUNK = 1024  # pairs per iteration of list_rows_kernel
WIDTH_BLOCK = 1024  # elements per program of moe_sum_kernel


@dataclass(frozen=True, eq=False)
class TritonExperts:
    """The stacked weights of all experts: gate_up [E, 2 n, hidden], gates first, and down [E, hidden, n]."""

    gate_up: Matrices
    down: Matrices

    @property
    def nbytes(self) -> int:
        return self.gate_up.nbytes + self.down.nbytes


@triton.jit
def route_kernel(
    scores,  # [T, E]
    weights,  # [T, TOP_K] float32
    experts,  # [T, TOP_K] int32
    NUM_EXPERTS: tl.constexpr,
    EXPERTS_PAD: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_K_PAD: tl.constexpr,
    IS_NORMALIZED: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    numbers = tl.arange(0, EXPERTS_PAD)
    is_expert = numbers < NUM_EXPERTS
    values = tl.load(scores + token * NUM_EXPERTS + numbers, mask=is_expert, other=0.0).to(tl.float32)
    # scores of a request that overflowed may be NaN: any experts will do, but list_rows needs distinct ones
    values = tl.where(is_expert & (tl.abs(values) < float("inf")), values, -1e38)
    powers = tl.where(is_expert, tl.exp(values - tl.max(values, axis=0)), 0.0)
    left = tl.where(is_expert, powers / tl.sum(powers, axis=0), -1.0)
    places = tl.arange(0, TOP_K_PAD)
    chosen_weights = tl.zeros((TOP_K_PAD,), dtype=tl.float32)
    chosen = tl.zeros((TOP_K_PAD,), dtype=tl.int32)
    total = 0.0
    for place in range(TOP_K):
        best = tl.max(left, axis=0)
        number = tl.argmax(left, axis=0)
        chosen_weights = tl.where(places == place, best, chosen_weights)
        chosen = tl.where(places == place, number, chosen)
        left = tl.where(numbers == number, -1.0, left)
        total += best
    if IS_NORMALIZED:
        chosen_weights = chosen_weights / total
    exists = places < TOP_K
    tl.store(weights + token * TOP_K + places, chosen_weights, mask=exists)
    tl.store(experts + token * TOP_K + places, chosen, mask=exists)


@triton.jit(do_not_specialize=["num_tokens", "num_pairs"])
def list_rows_kernel(experts, rows, counts, num_tokens, num_pairs, CHUNK: tl.constexpr):
    """Write the pairs of one expert to its row of rows [E, num_tokens], in order, and their number to counts [E]."""
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


def route(scores: Tensor, top_k: int, is_normalized: bool) -> tuple[Tensor, Tensor]:
    """Return weights [T, top_k] float32 and ids [T, top_k] int32 of each token's experts of highest scores [T, E]."""
    num_tokens, num_experts = scores.shape
    weights = torch.empty((num_tokens, top_k), dtype=torch.float32, device=scores.device)
    experts = torch.empty((num_tokens, top_k), dtype=torch.int32, device=scores.device)
    if num_tokens:
        route_kernel[(num_tokens,)](
            scores,
            weights,
            experts,
            NUM_EXPERTS=num_experts,
            EXPERTS_PAD=triton.next_power_of_2(num_experts),
            TOP_K=top_k,
            TOP_K_PAD=triton.next_power_of_2(top_k),
            IS_NORMALIZED=is_normalized,
            num_warps=1,
        )
    return weights, experts


def choose(scores: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
    """Compute `route` of reference.py: by the kernel for plain routers, else in torch."""
    if routing.is_plain:
        return route(scores, routing.top_k, routing.is_normalized)
    weights, experts = reference.route(scores, routing)
    return weights, experts.int()


def list_rows(experts: Tensor, num_experts: int) -> ExpertRows:
    """List the (token, expert) pairs of each expert. experts: [T, top_k] int32, distinct for each token."""
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
    x: Tensor, scores: Tensor, packed: TritonExperts, routing: Routing, is_batch_invariant: bool = False
) -> Tensor:
    """Compute Ops.fused_moe; a token's expert outputs are added in the order of their scores."""
    weights, experts = choose(scores, routing)
    lists = list_rows(experts, packed.gate_up.qweight.shape[0])
    inner = matmul(x, packed.gate_up, None, x.dtype, lists, is_batch_invariant=is_batch_invariant)
    inner = activate(inner, GATED_SILU)
    expert_outputs = matmul(inner, packed.down, None, torch.float32, lists, weights, is_batch_invariant)
    return moe_sum(expert_outputs, routing.top_k, x.dtype)
