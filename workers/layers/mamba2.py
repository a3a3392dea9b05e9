"""The Mamba2 mixer of a layer (arXiv 2405.21060): project, convolve, scan, gate, normalize, project back.

Of each head the state S [key_dim, value_dim] decays by exp(dt · A) at each token, which adds B · dt · x to it and reads
it with C. The names of the parts are those of attention: C is q, B is k, x is v, dt is a.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ...ipc.spec.models.model_config import StateConfig
from ...kernels.contract import GateOrder, Norm, Rates, StateWeights
from ..step.model_step import StepContext
from ..weights.loader import LayerLoader
from .elementwise import scaled
from .state_input import StateInput, as_heads, gate_order


class Mamba2:
    """Mixer of a layer, x [T, hidden_size] → [T, hidden_size], summed over ranks."""

    def __init__(self, loader: LayerLoader, prefix: str, state: StateConfig, hidden_size: int, index: int) -> None:
        """`prefix`: the prefix of the layer's tensor names, with the dot. `index`: the layer's among those with a
        state."""
        self._ops, self._group, self._index, self._state = loader.ops, loader.group, index, state
        self._input = StateInput(loader, prefix, state, hidden_size)
        self.shape = self._input.shape
        names, block, heads = state.names, f"{prefix}{state.names.block}.", self._input.heads.values

        def of_heads(name: str) -> Tensor:
            return loader.vector(f"{block}{name}", (state.num_heads,), 0, heads)

        self._rates = Rates(-of_heads(names.decay).exp(), of_heads(names.dt_bias), state.min_dt, state.max_dt)
        self._skip = of_heads(names.skip) if state.has_skip else None
        channels = range(heads.start * state.value_dim, heads.stop * state.value_dim)
        num_values = state.part_size("v")
        self._norm: Norm | None = None
        if state.norm is not None:
            weight = loader.vector(f"{block}{names.norm}.weight", (num_values,), 0, channels)
            self._norm = Norm("rms", weight, None, state.norm.eps)
        self._group_size = num_values // max(state.norm_groups, 1)
        self._group_of_channel = torch.tensor(channels, device=loader.checkpoint.device) // self._group_size
        self._output = loader.row_parallel(
            f"{block}{names.output}", (hidden_size, num_values), channels, state.has_output_bias
        )

    @property
    def weights(self) -> StateWeights:
        """The mixer's weights for a fused decoder of one rank."""
        scan = self._input.scan_weights(self._rates, self._norm, max(self._state.norm_groups, 1))
        return self._input.weights(self._output, self._index, replace(scan, skip=self._skip))

    def __call__(self, x: Tensor, context: StepContext) -> Tensor:
        assert context.states is not None
        (views, metadata), shape, state = context.states, self.shape, self._state
        parts = self._input.project(x)
        mixed = self._input.convolve(parts[state.conv_parts], views.conv[self._index], metadata)
        query, key = (as_heads(mixed[part].float(), shape.key_dim) for part in "qk")
        value = as_heads(mixed["v"].float(), shape.value_dim)
        dt, decay = self._ops.state_decay(parts["a"], self._rates)
        read = self._ops.state_scan(query, key, value * dt[..., None], decay, None, views.scan[self._index], metadata)
        if self._skip is not None:
            read = read + self._skip[:, None] * value
        output = self._ops.linear(self._gated(read.flatten(1), parts["z"]), self._output)
        return scaled(self._group.all_reduce(output), state.output_scale)

    def _gated(self, read: Tensor, gate: Tensor) -> Tensor:
        """Multiply what was read [T, n] by silu(gate), and normalize it: before, after or not at all."""
        norm, state = self._norm, self._state
        order = gate_order(state)
        num_groups = state.norm_groups // self._group.size
        if norm is None or num_groups * self._group.size == state.norm_groups:
            return self._ops.gated_norm(read, gate, norm, max(num_groups, 1), order)
        return self._gated_over_ranks(read, gate, norm, order)

    def _gated_over_ranks(self, read: Tensor, gate: Tensor, norm: Norm, order: GateOrder) -> Tensor:
        """Do the same with groups of channels that several ranks share."""
        assert norm.weight is not None
        factor = gate.float() * self._ops.sigmoid(gate.float())
        if order == "silu_then_norm":
            read = read * factor
        squares = read.new_zeros(len(read), self._state.norm_groups)
        squares.index_add_(1, self._group_of_channel, read.square())
        means = self._group.all_reduce(squares) / self._group_size
        normed = read * torch.rsqrt(means + norm.eps)[:, self._group_of_channel] * norm.weight
        return (normed * factor if order == "norm_then_silu" else normed).to(gate.dtype)
