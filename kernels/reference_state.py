"""The operations of layers with a state, in plain torch: causal convolutions, scans of gated delta nets and Mamba2, and
gated norms.

A step's tokens come in segments (StateMetadata), which read and write blocks of states. Each token is computed by
itself, in order, from the state that its row has at this place. So its bits depend neither on how the row is cut into
segments and steps, nor on other rows. Axes: T tokens, N blocks, C channels, K taps; Hk heads of queries and keys, Hv of
values, Dk and Dv their dimensions.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from .contract import ConvActivation, GateOrder, Norm, Rates, StateMetadata


def one_by_one(x: Tensor) -> Tensor:
    """Return a strided copy of x, of whose elements functions are computed with bits that do not depend on the others.

    On a CPU torch computes dense elements as vectors, but the last ones one by one, which rounds differently; it
    computes strided elements all one by one.
    """
    return torch.stack((x, x), -1)[..., 0]


def sigmoid(x: Tensor) -> Tensor:
    """Compute sigmoid(x). The bits of an element do not depend on the others."""
    return one_by_one(x).sigmoid()


def causal_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: ConvActivation,
    states: Tensor,
    metadata: StateMetadata,
) -> Tensor:
    """Convolve each channel over the last K tokens of its row, add the bias and activate: [T, C].

    x: [T, C]; the last stride is 1. weight: [C, K] of any float dtype, the newest token's factor last; kernels are
    fastest if it is float32 and the transpose of a dense tensor. bias: [C]. states: [N, K - 1, C] of x's dtype, the
    inputs of a row's last K - 1 tokens, oldest first; the last two axes are dense. Computed in float32 with the taps
    in their order and rounded once. Tokens behind the last segment get zeros.
    """
    num_before = states.shape[1]
    factors = weight.t().to(torch.promote_types(x.dtype, torch.float32))  # [K, C]
    output = torch.zeros_like(x, memory_format=torch.contiguous_format)
    for start, stop, read, write in _segments(metadata):
        inputs = torch.cat((_state_before(states, read), x[start:stop]))  # [K - 1 + n, C]
        sums = inputs[: stop - start] * factors[0]
        for tap in range(1, num_before + 1):
            sums += inputs[tap : tap + stop - start] * factors[tap]
        if bias is not None:
            sums += bias
        output[start:stop] = sums * sigmoid(sums) if activation == "silu" else sums
        if write >= 0:
            states[write] = inputs[stop - start :]
    return output


def state_decay(a: Tensor, rates: Rates) -> tuple[Tensor, Tensor]:
    """Compute dt and the decay of each head: both [T, Hv] float32. a: [T, Hv] of the model's dtype, the last axis is
    dense. The bits of an element do not depend on the others."""
    dt = F.softplus(one_by_one(a.float() + rates.dt_bias)).clamp(rates.min_dt, rates.max_dt)
    return dt, one_by_one(rates.rate * dt).exp()


def state_scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    beta: Tensor | None,
    states: Tensor,
    metadata: StateMetadata,
) -> Tensor:
    """Update each row's state S [Hv, Dk, Dv] by its tokens, in order, and read it: [T, Hv, Dv] of v's dtype.

        S = decay S;  S += k d^T;  out = S^T q    with d = v, or with `beta` d = beta (v - S^T k), the delta rule

    q, k: [T, Hk, Dk], v: [T, Hv, Dv], all of the model's dtype or all float32; the last two axes are dense. Head h of v
    has the head h // (Hv / Hk) of q and k. For Mamba2 q is C, k is B, and v is dt x. decay, beta: [T, Hv] float32.
    states: [N, Hv, Dk, Dv] float32, in which all is computed; the last three axes are dense. Tokens behind the last
    segment get zeros.
    """
    wide, num_sharing = states.dtype, v.shape[1] // k.shape[1]
    queries, keys = (each.to(wide).repeat_interleave(num_sharing, dim=1)[..., None] for each in (q, k))
    output = torch.zeros_like(v, memory_format=torch.contiguous_format)
    for start, stop, read, write in _segments(metadata):
        state = _state_before(states, read)
        for token in range(start, stop):
            state = state * decay[token, :, None, None]
            change = v[token].to(wide)
            if beta is not None:
                change = beta[token, :, None] * (change - (state * keys[token]).sum(1))
            state += keys[token] * change[:, None]
            output[token] = (state * queries[token]).sum(1)
        if write >= 0:
            states[write] = state
    return output


def gated_norm(x: Tensor, gate: Tensor, norm: Norm | None, groups: int, order: GateOrder) -> Tensor:
    """Normalize x [T, n] and multiply it by silu(gate) [T, n], in this order or in the other: [T, n] of gate's dtype.

    x: of the model's dtype or float32. norm: an RMS norm of each of `groups` equal parts of a token's elements, whose
    weight is [n], or [n / groups] for all groups; None: x is only multiplied. Computed in float32 and rounded once.
    """
    wide, factor = x.float(), gate.float() * sigmoid(gate.float())
    if order == "silu_then_norm" or norm is None:
        wide = wide * factor
    if norm is not None:
        width = x.shape[1] // groups
        parts = F.rms_norm(wide.reshape(len(x), groups, width), [width], eps=norm.eps)
        if norm.weight is not None:
            parts = parts * norm.weight.view(-1, width)
        wide = parts.flatten(1)
        if order == "norm_then_silu":
            wide = wide * factor
    return wide.to(gate.dtype)


def _segments(metadata: StateMetadata) -> Iterator[tuple[int, int, int, int]]:
    """Yield the first token of each segment, the one after its last, and the blocks that it reads and writes."""
    starts = metadata.segment_starts.tolist()
    yield from zip(starts, starts[1:], metadata.reads.tolist(), metadata.writes.tolist(), strict=False)


def _state_before(states: Tensor, block: int) -> Tensor:
    """Return the state in a block, zeros for block -1."""
    return states[block] if block >= 0 else torch.zeros_like(states[0], memory_format=torch.contiguous_format)
