"""The short convolution of a layer (LFM2): project, gate, convolve, gate, project back. A row's state is the inputs of
its last tokens."""

from __future__ import annotations

from torch import Tensor

from ...ipc.spec.models.model_config import StateConfig
from ...kernels.contract import StateWeights
from ..step.model_step import StepContext
from ..weights.loader import LayerLoader
from .elementwise import scaled
from .state_input import StateInput


class ShortConv:
    """Mixer of a layer, x [T, hidden_size] → [T, hidden_size], summed over ranks."""

    def __init__(self, loader: LayerLoader, prefix: str, state: StateConfig, hidden_size: int, index: int) -> None:
        """`prefix`: the prefix of the layer's tensor names, with the dot. `index`: the layer's among those with a
        state."""
        self._ops, self._group, self._index = loader.ops, loader.group, index
        self._input = StateInput(loader, prefix, state, hidden_size)
        self.shape = self._input.shape
        self._output_scale = state.output_scale
        channels = self._input.heads.values
        name, num_values = f"{prefix}{state.names.block}.{state.names.output}", state.part_size("v")
        self._output = loader.row_parallel(name, (hidden_size, num_values), channels, state.has_output_bias)

    @property
    def weights(self) -> StateWeights:
        """The mixer's weights for a fused decoder."""
        return self._input.weights(self._output, self._index)

    def __call__(self, x: Tensor, context: StepContext) -> Tensor:
        assert context.states is not None
        views, metadata = context.states
        parts = self._input.project(x)
        mixed = self._input.convolve(parts["u"] * parts["v"], views.conv[self._index], metadata)["v"]
        output = self._group.all_reduce(self._ops.linear(parts["z"] * mixed, self._output))
        return scaled(output, self._output_scale)
