"""The operations on states in C (conv.c, scan.c, gated_norm.c); shapes without a kernel are computed in plain torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from ctypes import Structure, addressof, byref, c_void_p
from math import inf
from weakref import ref

import torch
from torch import Tensor

from ..contract import (
    ConvActivation,
    GateOrder,
    Norm,
    Rates,
    ScanWeights,
    StateGroup,
    StateMetadata,
    StatePart,
    StateViews,
    StateWeights,
)
from ..reference import ReferenceOps
from . import library as c
from .layer_structs import linear_struct, norm_struct

MAX_TAPS, MAX_KEY_DIM = 8, 256  # as in state.h


class CpuStateOps(ReferenceOps):
    """The operations of layers with a state."""

    def __init__(self, functions: c.KernelLibrary) -> None:
        self.functions = functions

    def sigmoid(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        output, has_floats = torch.empty_like(x), x.dtype == torch.float32
        self.functions.op_sigmoid(x.data_ptr(), output.data_ptr(), x.numel(), has_floats, torch.get_num_threads())
        return output

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

    def state_decay(self, a: Tensor, rates: Rates) -> tuple[Tensor, Tensor]:
        dt, decay = torch.empty((2, *a.shape))
        self.functions.op_find_decay(
            byref(_rates(rates)),
            a.data_ptr(),
            a.stride(0),
            len(a),
            dt.data_ptr(),
            decay.data_ptr(),
            torch.get_num_threads(),
        )
        return dt, decay

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
            has_float_out=v.dtype == torch.float32,
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
            out=c.Rows(output.data_ptr(), width, 0),
        )
        self.functions.op_normalize_gated(byref(gated), num_tokens, torch.get_num_threads())
        return output


def has_kernels(weights: StateWeights) -> bool:
    """Return whether a mixer can be computed in C."""
    scan = weights.scan
    if weights.conv_weight.shape[1] > MAX_TAPS or any(scales is not None for scales in weights.input_scales[1:]):
        return False
    return scan is None or (scan.key_dim <= MAX_KEY_DIM and scan.value_dim % 16 == 0)


class MixerStruct:
    """The C struct of a mixer, and the tensors that it points to."""

    def __init__(self, weights: StateWeights) -> None:
        first, *others = weights.inputs
        scales, bias = weights.input_scales[0], weights.conv_bias
        factors = weights.conv_weight.t().float().contiguous()
        wide_bias = None if bias is None else bias.float().contiguous()
        self._kept = (weights, factors, wide_bias)
        parts, channels = weights.parts, weights.conv
        conv = c.Conv(
            num_channels=factors.shape[1],
            num_taps=factors.shape[0],
            factors=factors.data_ptr(),
            bias=None if wide_bias is None else wide_bias.data_ptr(),
            has_silu=weights.conv_activation == "silu",
        )
        self.struct = c.Mixer(
            kind=c.MIXERS[weights.kind],
            input=linear_struct(first),
            output=linear_struct(weights.output),
            input_scales=None if scales is None else scales.data_ptr(),
            input_scale=weights.input_scale,
            output_scale=weights.output_scale,
            index=weights.index,
            gate_start=parts["z"].start,
            conv=conv,
        )
        if others:
            self.struct.numbers = linear_struct(others[0])
        if weights.scan is None:
            self.struct.factor_start = parts["u"].start
        else:
            self._add_scan(weights.scan, parts, channels)

    def _add_scan(self, scan: ScanWeights, parts: Mapping[str, StatePart], channels: Mapping[str, int]) -> None:
        struct, width = self.struct, scan.num_heads * scan.value_dim
        is_delta = struct.kind == c.MIXERS["gated_delta"]
        struct.query_start, struct.key_start, struct.value_start = (channels[part] for part in "qkv")
        struct.decay_start = parts["a"].start
        struct.beta_start = parts["b"].start if is_delta else 0
        struct.scan = c.Scan(
            key_heads=scan.key_heads,
            value_heads=scan.num_heads,
            first_key=scan.first_key or 0,
            are_keys_tiled=scan.first_key is not None,
            key_dim=scan.key_dim,
            value_dim=scan.value_dim,
            skip=None if scan.skip is None else scan.skip.data_ptr(),
            has_float_out=not is_delta,
        )
        is_shared = (
            scan.norm is None or scan.norm.weight is None or scan.norm.weight.numel() == width // scan.num_groups
        )
        struct.gated = c.GatedNorm(
            num_groups=scan.num_groups,
            group_size=width // scan.num_groups,
            norm=norm_struct(scan.norm),
            weight_stride=0 if is_shared else width // scan.num_groups,
            gates_first=scan.order == "silu_then_norm",
            has_floats=not is_delta,
        )
        struct.query_norm, struct.key_norm = norm_struct(scan.query_norm), norm_struct(scan.key_norm)
        struct.rates, struct.beta_scale = _rates(scan.rates), scan.beta_scale


class StepStates:
    """The C struct of a step's states. The addresses of the same blocks are used again."""

    def __init__(self) -> None:
        self._first: Callable[[], Tensor | None] = lambda: None  # of the views that are described
        self._struct = c.States()

    def of(self, group: StateGroup, num_tokens: int) -> int:
        """Return the address of the struct, which the next call overwrites; the caller must keep the group alive."""
        if self._first() is not group.views.conv[0]:
            self._describe(group.views)
        assert group.metadata.segment_starts[-1] == num_tokens, "each token of the step is in a segment"
        self._struct.segments = _segments(group.metadata)
        return addressof(self._struct)

    def _describe(self, views: StateViews) -> None:
        self._first = ref(views.conv[0])
        self._scans = (c_void_p * len(views.scan))(*(each.data_ptr() for each in views.scan))
        self._inputs = (c_void_p * len(views.conv))(*(each.data_ptr() for each in views.conv))
        self._struct.scans, self._struct.inputs = addressof(self._scans), addressof(self._inputs)
        self._struct.block_bytes = views.conv[0].stride(0) * views.conv[0].element_size()


def _rates(rates: Rates) -> Structure:
    """Build the C struct of rates, which the caller must keep alive."""
    max_dt = inf if rates.max_dt is None else rates.max_dt
    return c.Rates(rates.rate.data_ptr(), rates.dt_bias.data_ptr(), rates.min_dt, max_dt, len(rates.rate))


def _segments(metadata: StateMetadata) -> Structure:
    """Build the C struct of a step's segments; the caller must keep the metadata alive."""
    starts, reads, writes = metadata.segment_starts, metadata.reads, metadata.writes
    return c.Segments(starts.data_ptr(), reads.data_ptr(), writes.data_ptr(), len(reads))


def _output_of(x: Tensor, metadata: StateMetadata) -> Tensor:
    """Allocate a dense output like x [T, ...]; tokens behind the last segment have zeros."""
    is_padded = len(x) != int(metadata.segment_starts[-1])
    return (torch.zeros if is_padded else torch.empty)(x.shape, dtype=x.dtype)
