"""The operations of layers with a state: causal convolution, scan and gated norm.

A program of the convolution or of the scan takes some channels of a row, or some columns of one of its heads, and goes
through all segments of the row in the step, in order. No other program reads or writes these numbers of its states. A
program that starts at a segment in the middle of a row does nothing.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..contract import ConvActivation, GateOrder, Norm, StateMetadata
from .launch import next_power_of_2

MAX_KEY_DIM = 256
MAX_TAPS = 8
MAX_GROUP_SIZE = 1 << 15  # elements of a group of a gated norm: a program holds all of them in registers
CHANNELS, TOKENS = 128, 8  # of a program of the convolution; tokens that it computes at a time


@triton.jit
def end_of_row(segment, reads, writes, num_segments):
    """Return the segment behind the last one of a row; `segment` itself if that is not the row's first."""
    read = tl.load(reads + segment)
    before = tl.load(writes + segment - 1, mask=segment > 0, other=-1)
    end = segment
    is_open = (read < 0) | (read != before)
    while is_open:
        write = tl.load(writes + end)
        end += 1
        read = tl.load(reads + end, mask=end < num_segments, other=-1)
        is_open = (read >= 0) & (read == write)
    return end


@triton.jit(do_not_specialize=["num_segments"])  # changes with the step
def conv_kernel(
    x,  # [T, C], tokens x_stride apart
    factors,  # [K, C] float32
    bias,  # [C] float32
    states,  # [blocks, K - 1, C], blocks block_stride apart
    starts,
    reads,
    writes,
    output,  # [T, C]
    x_stride,
    block_stride,
    num_segments,
    NUM_CHANNELS: tl.constexpr,
    NUM_TAPS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SILU: tl.constexpr,
    CHANNELS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    first_segment = tl.program_id(1)
    channels = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    exists = channels < NUM_CHANNELS
    for segment in range(first_segment, end_of_row(first_segment, reads, writes, num_segments)):
        start = tl.load(starts + segment).to(tl.int64)
        stop = tl.load(starts + segment + 1).to(tl.int64)
        block = tl.load(reads + segment)
        state = states + block.to(tl.int64) * block_stride + channels
        for first in range(start, stop, TOKENS):
            tokens = first + tl.arange(0, TOKENS)
            sums = tl.zeros((TOKENS, CHANNELS), dtype=tl.float32)
            if HAS_BIAS:
                sums += tl.load(bias + channels, mask=exists, other=0.0)[None, :]
            for tap in tl.static_range(NUM_TAPS):
                sources = tokens - (NUM_TAPS - 1 - tap)
                is_here = ((sources >= start) & (tokens < stop))[:, None] & exists[None, :]
                is_before = ((sources < start) & (block >= 0))[:, None] & exists[None, :]
                here = tl.load(x + sources[:, None] * x_stride + channels[None, :], mask=is_here, other=0.0)
                rows = (sources - start + NUM_TAPS - 1) * NUM_CHANNELS
                before = tl.load(state[None, :] + rows[:, None], mask=is_before, other=0.0)
                factor = tl.load(factors + tap * NUM_CHANNELS + channels, mask=exists, other=0.0)
                sums += tl.where((sources >= start)[:, None], here, before).to(tl.float32) * factor[None, :]
            if HAS_SILU:
                sums = sums / (1 + tl.exp(-sums))
            at = output + tokens[:, None] * NUM_CHANNELS + channels[None, :]
            tl.store(at, sums.to(output.dtype.element_ty), mask=(tokens < stop)[:, None] & exists[None, :])
        write = tl.load(writes + segment)
        target = states + write.to(tl.int64) * block_stride + channels
        tl.debug_barrier()  # a state may be written over the one that all threads have read
        for row in tl.static_range(NUM_TAPS - 1):  # none is read after it is written
            source = stop - (NUM_TAPS - 1 - row)
            here = tl.load(x + source * x_stride + channels, mask=exists & (source >= start), other=0.0)
            old_row = (source - start + NUM_TAPS - 1) * NUM_CHANNELS
            before = tl.load(state + old_row, mask=exists & (source < start) & (block >= 0), other=0.0)
            tl.store(target + row * NUM_CHANNELS, tl.where(source >= start, here, before), mask=exists & (write >= 0))
        tl.debug_barrier()


@triton.jit(do_not_specialize=["num_segments"])
def scan_kernel(
    q,  # [T, KEY_HEADS, KEY_DIM], tokens q_stride apart
    k,
    v,  # [T, VALUE_HEADS, VALUE_DIM]
    decay,  # [T, VALUE_HEADS]
    beta,
    states,  # [blocks, VALUE_HEADS, KEY_DIM, VALUE_DIM], blocks block_stride apart
    starts,
    reads,
    writes,
    output,  # [T, VALUE_HEADS, VALUE_DIM]
    q_stride,
    k_stride,
    v_stride,
    block_stride,
    num_segments,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    KEY_PAD: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    HAS_BETA: tl.constexpr,
):
    NUM_PARTS: tl.constexpr = VALUE_DIM // COLUMNS
    head = tl.program_id(0) // NUM_PARTS
    key_head = head * KEY_HEADS // VALUE_HEADS
    columns = tl.program_id(0) % NUM_PARTS * COLUMNS + tl.arange(0, COLUMNS)
    dims = tl.arange(0, KEY_PAD)
    exists = dims < KEY_DIM
    places = (head * KEY_DIM + dims)[:, None] * VALUE_DIM + columns[None, :]  # in a block
    first_segment = tl.program_id(1)
    block = tl.load(reads + first_segment)
    is_read = exists[:, None] & (block >= 0)
    state = tl.load(states + block.to(tl.int64) * block_stride + places, mask=is_read, other=0.0)
    for segment in range(first_segment, end_of_row(first_segment, reads, writes, num_segments)):
        start = tl.load(starts + segment).to(tl.int64)
        stop = tl.load(starts + segment + 1).to(tl.int64)
        for token in range(start, stop):
            key = tl.load(k + token * k_stride + key_head * KEY_DIM + dims, mask=exists, other=0.0).to(tl.float32)
            query = tl.load(q + token * q_stride + key_head * KEY_DIM + dims, mask=exists, other=0.0).to(tl.float32)
            change = tl.load(v + token * v_stride + head * VALUE_DIM + columns).to(tl.float32)
            state *= tl.load(decay + token * VALUE_HEADS + head)
            if HAS_BETA:
                rest = change - tl.sum(state * key[:, None], axis=0)
                change = rest * tl.load(beta + token * VALUE_HEADS + head)
            state += key[:, None] * change[None, :]
            found = tl.sum(state * query[:, None], axis=0)
            at = output + (token * VALUE_HEADS + head) * VALUE_DIM + columns
            tl.store(at, found.to(output.dtype.element_ty))
        write = tl.load(writes + segment)
        is_written = exists[:, None] & (write >= 0)
        tl.store(states + write.to(tl.int64) * block_stride + places, state, mask=is_written)


@triton.jit
def gated_norm_kernel(
    x,  # [T, groups * SIZE], tokens x_stride apart
    gate,
    weight,  # [SIZE], or [groups, SIZE] with `weight_stride` SIZE
    output,  # [T, groups * SIZE]
    x_stride,
    gate_stride,
    weight_stride,
    eps,
    NUM_GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    SIZE_PAD: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    GATES_FIRST: tl.constexpr,
):
    token = (tl.program_id(0) // NUM_GROUPS).to(tl.int64)
    group = tl.program_id(0) % NUM_GROUPS
    elements = tl.arange(0, SIZE_PAD)
    exists = elements < SIZE
    places = group * SIZE + elements
    wide = tl.load(x + token * x_stride + places, mask=exists, other=0.0).to(tl.float32)
    gates = tl.load(gate + token * gate_stride + places, mask=exists, other=0.0).to(tl.float32)
    factor = gates / (1 + tl.exp(-gates))
    if GATES_FIRST:
        wide *= factor
    if HAS_NORM:
        wide *= 1.0 / tl.sqrt(tl.sum(wide * wide, axis=0) / SIZE + eps)
    if HAS_WEIGHT:
        wide *= tl.load(weight + group * weight_stride + elements, mask=exists, other=0.0)
    if not GATES_FIRST:
        wide *= factor
    at = output + token * (NUM_GROUPS * SIZE) + places
    tl.store(at, wide.to(output.dtype.element_ty), mask=exists)


def causal_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: ConvActivation,
    states: Tensor,
    metadata: StateMetadata,
) -> Tensor:
    """Compute ReferenceOps.causal_conv for at most MAX_TAPS taps."""
    num_channels, num_taps = weight.shape
    num_segments = metadata.reads.shape[0]
    output = torch.zeros(x.shape, dtype=x.dtype, device=x.device)
    if num_segments:
        conv_kernel[(triton.cdiv(num_channels, CHANNELS), num_segments)](
            x,
            weight.t().float().contiguous(),
            x if bias is None else bias.float(),
            states,
            metadata.segment_starts,
            metadata.reads,
            metadata.writes,
            output,
            x.stride(0),
            states.stride(0),
            num_segments,
            NUM_CHANNELS=num_channels,
            NUM_TAPS=num_taps,
            HAS_BIAS=bias is not None,
            HAS_SILU=activation == "silu",
            CHANNELS=CHANNELS,
            TOKENS=TOKENS,
            num_warps=4,
        )
    return output


def can_scan(key_dim: int, value_dim: int) -> bool:
    """Return whether the scan has a kernel for heads of these dimensions."""
    return key_dim <= MAX_KEY_DIM and value_dim % 16 == 0


def state_scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    beta: Tensor | None,
    states: Tensor,
    metadata: StateMetadata,
) -> Tensor:
    """Compute ReferenceOps.state_scan for a shape that `can_scan` accepts.

    One warp holds a tile of the state in registers, at most 128 numbers a thread, and so needs no barrier to sum over
    its rows.
    """
    _, key_heads, key_dim = k.shape
    _, value_heads, value_dim = v.shape
    num_segments = metadata.reads.shape[0]
    columns = 16
    if key_dim <= 64 and value_dim % 32 == 0:
        columns = 32
    decay = decay.contiguous()
    output = torch.zeros(v.shape, dtype=v.dtype, device=v.device)
    if num_segments:
        scan_kernel[(value_heads * (value_dim // columns), num_segments)](
            q,
            k,
            v,
            decay,
            decay if beta is None else beta.contiguous(),
            states,
            metadata.segment_starts,
            metadata.reads,
            metadata.writes,
            output,
            q.stride(0),
            k.stride(0),
            v.stride(0),
            states.stride(0),
            num_segments,
            KEY_HEADS=key_heads,
            VALUE_HEADS=value_heads,
            KEY_DIM=key_dim,
            KEY_PAD=next_power_of_2(key_dim),
            VALUE_DIM=value_dim,
            COLUMNS=columns,
            HAS_BETA=beta is not None,
            num_warps=1,
        )
    return output


def gated_norm(x: Tensor, gate: Tensor, norm: Norm | None, groups: int, order: GateOrder) -> Tensor:
    """Compute ReferenceOps.gated_norm for groups of at most MAX_GROUP_SIZE elements."""
    num_tokens, width = x.shape
    size = width // groups
    weight = None if norm is None else norm.weight
    output = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    if num_tokens:
        gated_norm_kernel[(num_tokens * groups,)](
            x,
            gate,
            x if weight is None else weight,
            output,
            x.stride(0),
            gate.stride(0),
            size if weight is not None and weight.numel() > size else 0,
            0.0 if norm is None else norm.eps,
            NUM_GROUPS=groups,
            SIZE=size,
            SIZE_PAD=next_power_of_2(size),
            HAS_NORM=norm is not None,
            HAS_WEIGHT=weight is not None,
            GATES_FIRST=order == "silu_then_norm",
            num_warps=1 if size <= 512 else 4,
        )
    return output
