"""The gated delta net of a layer (arXiv 2412.06464): project, convolve, normalize, scan, gate, project back.

Of each head the state S [key_dim, value_dim] is a map from keys to values. It decays, and what it returns for a token's
key is moved towards the token's value.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from ...ipc.spec.models.model_config import StateConfig
from ...kernels.contract import Norm, Rates, StateWeights
from ..step.model_step import StepContext
from ..weights.loader import LayerLoader
from .elementwise import scaled
from .state_input import StateInput, as_heads, gate_order

KEY_EPS = 1e-6  # of the sum of squares in the norm of queries and keys, as in flash-linear-attention


class GatedDelta:
    """Mixer of a layer, x [T, hidden_size] → [T, hidden_size], summed over ranks."""

    def __init__(self, loader: LayerLoader, prefix: str, state: StateConfig, hidden_size: int, index: int) -> None:
        """`prefix`: the prefix of the layer's tensor names, with the dot. `index`: the layer's among those with a
        state."""
        assert state.norm is not None
        self._ops, self._group, self._index, self._state = loader.ops, loader.group, index, state
        self._input = StateInput(loader, prefix, state, hidden_size)
        self.shape = self._input.shape
        names, block, heads = state.names, f"{prefix}{state.names.block}.", self._input.heads.values
        rate = -loader.vector(f"{block}{names.decay}", (state.num_heads,), 0, heads).exp()
        self._rates = Rates(rate, loader.vector(f"{block}{names.dt_bias}", (state.num_heads,), 0, heads))
        self._norm = loader.norm(f"{block}{names.norm}", state.value_dim, state.norm)
        self._query_norm = _unit_norm(rate, state.key_dim, state.key_dim**-0.5)
        self._key_norm = _unit_norm(rate, state.key_dim, 1.0)
        num_values = state.part_size("v")
        shard = range(heads.start * state.value_dim, heads.stop * state.value_dim)
        self._output = loader.row_parallel(
            f"{block}{names.output}", (hidden_size, num_values), shard, state.has_output_bias
        )

    @property
    def weights(self) -> StateWeights:
        """The mixer's weights for a fused decoder."""
        scan = replace(
            self._input.scan_weights(self._rates, self._norm, self.shape.num_heads),
            query_norm=self._query_norm,
            key_norm=self._key_norm,
            beta_scale=self._state.beta_scale,
        )
        return self._input.weights(self._output, self._index, scan)

    def __call__(self, x: Tensor, context: StepContext) -> Tensor:
        assert context.states is not None
        (views, metadata), shape, state = context.states, self.shape, self._state
        parts = self._input.project(x)
        mixed = self._input.convolve(parts[state.conv_parts], views.conv[self._index], metadata)
        query = self._ops.norm(as_heads(mixed["q"], shape.key_dim), self._query_norm)
        key = self._ops.norm(as_heads(mixed["k"], shape.key_dim), self._key_norm)
        value = as_heads(mixed["v"], shape.value_dim)
        _, decay = self._ops.state_decay(parts["a"], self._rates)
        beta = self._ops.sigmoid(parts["b"].float()) * state.beta_scale
        read = self._ops.state_scan(query, key, value, decay, beta, views.scan[self._index], metadata)
        gated = self._ops.gated_norm(read.flatten(1), parts["z"], self._norm, shape.num_heads, gate_order(state))
        return scaled(self._group.all_reduce(self._ops.linear(gated, self._output)), state.output_scale)


def _unit_norm(like: Tensor, size: int, length: float) -> Norm:
    """Return the norm that scales vectors of `size` elements to a length."""
    return Norm("rms", like.new_full((size,), length * size**-0.5), None, KEY_EPS / size)
