"""Experts on the device: choose them for each token, list each one's rows, and mix their answers.

Six launches, with grids that depend on shapes alone: nothing is read back, so that a step can be captured in a CUDA
graph. An expert's list is in the order of the tokens.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..activation import silu_and_mul
from .matmul import ExpertRows, Matrices, matmul

CHUNK = 1024  # choices that a program looks at at once
WIDTH_BLOCK = 1024  # elements that a program adds up


@dataclass(frozen=True, eq=False)
class TritonExperts:
    """Gates and ups [E, 2 n, hidden], and the way back [E, hidden, n]."""

    gate_up: Matrices
    down: Matrices

    @property
    def nbytes(self) -> int:
        return self.gate_up.nbytes + self.down.nbytes


@triton.jit
def route_kernel(
    scores,  # [T, E]
    weights,  # [T, NUM_CHOSEN] float32
    experts,  # [T, NUM_CHOSEN] int32
    NUM_EXPERTS: tl.constexpr,
    EXPERTS_PAD: tl.constexpr,
    NUM_CHOSEN: tl.constexpr,
    CHOSEN_PAD: tl.constexpr,
    IS_NORMALIZED: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    numbers = tl.arange(0, EXPERTS_PAD)
    is_expert = numbers < NUM_EXPERTS
    values = tl.load(scores + token * NUM_EXPERTS + numbers, mask=is_expert, other=0.0).to(tl.float32)
    # of a request that overflowed the choice does not matter, but that its experts differ does
    values = tl.where(is_expert & (tl.abs(values) < float("inf")), values, -1e38)
    powers = tl.where(is_expert, tl.exp(values - tl.max(values, axis=0)), 0.0)
    left = tl.where(is_expert, powers / tl.sum(powers, axis=0), -1.0)
    places = tl.arange(0, CHOSEN_PAD)
    chosen_weights = tl.zeros((CHOSEN_PAD,), dtype=tl.float32)
    chosen = tl.zeros((CHOSEN_PAD,), dtype=tl.int32)
    total = 0.0
    for place in range(NUM_CHOSEN):
        best = tl.max(left, axis=0)
        number = tl.argmax(left, axis=0)
        chosen_weights = tl.where(places == place, best, chosen_weights)
        chosen = tl.where(places == place, number, chosen)
        left = tl.where(numbers == number, -1.0, left)
        total += best
    if IS_NORMALIZED:
        chosen_weights = chosen_weights / total
    exists = places < NUM_CHOSEN
    tl.store(weights + token * NUM_CHOSEN + places, chosen_weights, mask=exists)
    tl.store(experts + token * NUM_CHOSEN + places, chosen, mask=exists)


@triton.jit(do_not_specialize=["num_tokens", "num_choices"])
def list_rows_kernel(experts, rows, counts, num_tokens, num_choices, CHUNK: tl.constexpr):
    """rows [E, num_tokens]: the choices that fell on this program's expert, in order; counts [E]."""
    expert = tl.program_id(0)
    count = 0
    for start in range(0, num_choices, CHUNK):
        choices = start + tl.arange(0, CHUNK)
        is_mine = tl.load(experts + choices, mask=choices < num_choices, other=-1) == expert
        ones = is_mine.to(tl.int32)
        places = count + tl.cumsum(ones, axis=0) - ones
        tl.store(rows + expert.to(tl.int64) * num_tokens + places, choices, mask=is_mine)
        count += tl.sum(ones, axis=0)
    tl.store(counts + expert, count)


@triton.jit
def add_answers_kernel(
    answers,  # [T * NUM_CHOSEN, WIDTH] float32
    output,  # [T, WIDTH]
    WIDTH: tl.constexpr,
    NUM_CHOSEN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    exists = columns < WIDTH
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for place in range(NUM_CHOSEN):
        total += tl.load(answers + (token * NUM_CHOSEN + place) * WIDTH + columns, mask=exists, other=0.0)
    tl.store(output + token * WIDTH + columns, total.to(output.dtype.element_ty), mask=exists)


def route(scores: Tensor, num_chosen: int, is_normalized: bool) -> tuple[Tensor, Tensor]:
    """Weights [T, num_chosen] float32 and numbers (int32) of the experts with the highest scores [T, E]."""
    num_tokens, num_experts = scores.shape
    weights = torch.empty((num_tokens, num_chosen), dtype=torch.float32, device=scores.device)
    experts = torch.empty((num_tokens, num_chosen), dtype=torch.int32, device=scores.device)
    if num_tokens:
        route_kernel[(num_tokens,)](
            scores,
            weights,
            experts,
            NUM_EXPERTS=num_experts,
            EXPERTS_PAD=triton.next_power_of_2(num_experts),
            NUM_CHOSEN=num_chosen,
            CHOSEN_PAD=triton.next_power_of_2(num_chosen),
            IS_NORMALIZED=is_normalized,
            num_warps=1,
        )
    return weights, experts


def list_rows(experts: Tensor, num_experts: int) -> ExpertRows:
    """experts: [T, num_chosen] int32, different ones for each token."""
    num_tokens, num_chosen = experts.shape
    rows = torch.empty((num_experts, num_tokens), dtype=torch.int32, device=experts.device)
    counts = torch.empty(num_experts, dtype=torch.int32, device=experts.device)
    if num_tokens:
        list_rows_kernel[(num_experts,)](experts, rows, counts, num_tokens, experts.numel(), CHUNK=CHUNK, num_warps=4)
    return ExpertRows(rows, counts, experts.numel(), num_chosen)


def add_answers(answers: Tensor, num_chosen: int, dtype: torch.dtype) -> Tensor:
    """The sum of each token's answers, [T * num_chosen, n] float32, in their order: [T, n] `dtype`."""
    num_tokens, width = answers.shape[0] // num_chosen, answers.shape[1]
    output = torch.empty((num_tokens, width), dtype=dtype, device=answers.device)
    if num_tokens:
        add_answers_kernel[(num_tokens, triton.cdiv(width, WIDTH_BLOCK))](
            answers, output, WIDTH=width, NUM_CHOSEN=num_chosen, BLOCK=WIDTH_BLOCK, num_warps=4
        )
    return output


def mix_experts(
    x: Tensor, scores: Tensor, packed: TritonExperts, num_chosen: int, is_normalized: bool, is_uniform: bool = False
) -> Tensor:
    """Ops.mix_experts; each token's answers are added in the order of their scores. `is_uniform`: see matmul."""
    weights, experts = route(scores, num_chosen, is_normalized)
    lists = list_rows(experts, packed.gate_up.codes.shape[0])
    inner = silu_and_mul(matmul(x, packed.gate_up, None, x.dtype, lists, is_uniform=is_uniform))
    answers = matmul(inner, packed.down, None, torch.float32, lists, weights, is_uniform)
    return add_answers(answers, num_chosen, x.dtype)
