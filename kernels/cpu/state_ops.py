"""The operations on states in C (conv.c, scan.c, gated_norm.c); shapes without a kernel are computed in plain torch."""

from __future__ import annotations

from ctypes import Structure, byref

import torch
from torch import Tensor

from ..contract import ConvActivation, GateOrder, Norm, StateMetadata
from ..reference import ReferenceOps
from . import library as c
from .layer_structs import norm_struct

MAX_TAPS, MAX_KEY_DIM = 8, 256  # as in state.h


class CpuStateOps(ReferenceOps):
    """The operations of layers with a state."""

    def __init__(self, functions: c.KernelLibrary) -> None:
        self.functions = functions

    def causal_conv(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        activation: ConvActivation,
        states: Tensor,
        metadata: StateMetadata,
    ) -> Tensor:
        num_channels, num_taps = weight.shape
        if num_taps > MAX_TAPS:
            return super().causal_conv(x, weight, bias, activation, states, metadata)
        factors = weight.t().float().contiguous()
        wide_bias = None if bias is None else bias.float().contiguous()
        output = _output_of(x, metadata)
        conv = c.Conv(
            x=x.data_ptr(),
            x_stride=x.stride(0),
            num_channels=num_channels,
            num_taps=num_taps,
            factors=factors.data_ptr(),
            bias=None if wide_bias is None else wide_bias.data_ptr(),
            has_silu=activation == "silu",
            states=states.data_ptr(),
            block_stride=states.stride(0),
            out=output.data_ptr(),
        )
        self.functions.op_convolve(byref(conv), byref(_segments(metadata)), torch.get_num_threads())
        return output

    def state_scan(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        decay: Tensor,
        beta: Tensor | None,
        states: Tensor,
        metadata: StateMetadata,
    ) -> Tensor:
        _, key_heads, key_dim = k.shape
        _, value_heads, value_dim = v.shape
        if key_dim > MAX_KEY_DIM or value_dim % 16:
            return super().state_scan(q, k, v, decay, beta, states, metadata)
        decay = decay.contiguous()
        if beta is not None:
            beta = beta.contiguous()
        output = _output_of(v, metadata)
        scan = c.Scan(
            q=q.data_ptr(),
            k=k.data_ptr(),
            v=v.data_ptr(),
            q_stride=q.stride(0),
            k_stride=k.stride(0),
            v_stride=v.stride(0),
            decay=decay.data_ptr(),
            beta=None if beta is None else beta.data_ptr(),
            states=states.data_ptr(),
            block_stride=states.stride(0),
            key_heads=key_heads,
            value_heads=value_heads,
            key_dim=key_dim,
            value_dim=value_dim,
            out=output.data_ptr(),
            has_floats=v.dtype == torch.float32,
        )
        self.functions.op_scan_states(byref(scan), byref(_segments(metadata)), torch.get_num_threads())
        return output

    def gated_norm(self, x: Tensor, gate: Tensor, norm: Norm | None, groups: int, order: GateOrder) -> Tensor:
        num_tokens, width = x.shape
        output = torch.empty(gate.shape, dtype=gate.dtype)
        is_shared = norm is None or norm.weight is None or norm.weight.numel() == width // groups
        gated = c.GatedNorm(
            x=x.data_ptr(),
            gate=gate.data_ptr(),
            x_stride=x.stride(0),
            gate_stride=gate.stride(0),
            num_groups=groups,
            group_size=width // groups,
            norm=norm_struct(norm),
            weight_stride=0 if is_shared else width // groups,
            gates_first=order == "silu_then_norm",
            has_floats=x.dtype == torch.float32,
            out=output.data_ptr(),
        )
        self.functions.op_normalize_gated(byref(gated), num_tokens, torch.get_num_threads())
        return output


def _segments(metadata: StateMetadata) -> Structure:
    """Build the C struct of a step's segments; the caller must keep the metadata alive."""
    starts, reads, writes = metadata.segment_starts, metadata.reads, metadata.writes
    return c.Segments(starts.data_ptr(), reads.data_ptr(), writes.data_ptr(), len(reads))


def _output_of(x: Tensor, metadata: StateMetadata) -> Tensor:
    """Allocate a dense output like x [T, ...]; tokens behind the last segment have zeros."""
    is_padded = len(x) != int(metadata.segment_starts[-1])
    return (torch.zeros if is_padded else torch.empty)(x.shape, dtype=x.dtype)
