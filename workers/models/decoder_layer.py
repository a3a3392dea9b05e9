"""DecoderLayer: what mixes the tokens, and the MLP, with the norms before and behind them.

Knows the order in which they run; knows no other layer, no family and no kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import msgspec
from torch import Tensor

from ...ipc.spec.models.model_config import ModelConfig, StateConfig, TensorNames
from ...kernels.contract import LayerWeights, Norm, Rotary
from ..layers.attention import Attention
from ..layers.cross_attention import CrossAttention
from ..layers.elementwise import scaled
from ..layers.gated_delta import GatedDelta
from ..layers.mamba2 import Mamba2
from ..layers.mlp import MLP
from ..layers.moe import MixedMLP, SparseMLP
from ..layers.short_conv import ShortConv
from ..step.kv_cache import CachePlace
from ..step.model_step import StepContext
from ..weights.checkpoint import TensorSlice
from ..weights.loader import LayerLoader

StateMixer: TypeAlias = GatedDelta | Mamba2 | ShortConv
MIXERS: dict[str, type[StateMixer]] = {"gated_delta": GatedDelta, "mamba2": Mamba2, "conv": ShortConv}


class DecoderLayer:
    """One layer. The residual stream is passed separately from the hidden states, which the norms add to it."""

    def __init__(
        self,
        loader: LayerLoader,
        config: ModelConfig,
        layer: int,
        rotaries: Sequence[Rotary],
        position_bias: Tensor | None,
        place: CachePlace | None,
        state_index: int | None = None,
    ) -> None:
        """`place`: of its keys and values; None: it does not attend. state_index: its index among the layers with a
        state; None: it has none."""
        names, prefix = config.names, f"{config.names.layers}.{layer}."
        self._ops = loader.ops
        self._scale = config.residual_scale
        self._is_parallel = config.is_parallel
        self._is_post_norm = config.is_post_norm
        self._attention = (
            None if place is None else Attention(loader, prefix, config, layer, rotaries, place, position_bias)
        )
        self.state: StateMixer | None = None
        if state_index is not None and config.state is not None:
            self.state = MIXERS[config.state.kind](loader, prefix, config.state, config.hidden_size, state_index)
            names = with_state_norms(names, config.state) if place is None else names
        self.cross = None if config.cross is None else CrossAttention(loader, prefix, config, layer)
        own, config = config.layers[layer], config.at_layer(layer)
        self._mlp: MLP | SparseMLP | MixedMLP | None = None
        if not own.has_mlp:
            pass
        elif config.experts is None or not own.has_experts:
            self._mlp = MLP(
                loader,
                prefix,
                names,
                config.hidden_size,
                config.intermediate_size,
                config.activation,
                config.has_mlp_bias,
                config.gate_scale,
                config.mlp_output_scale,
                has_up_bias=config.has_up_bias,
            )
        elif config.experts.is_beside_mlp:
            self._mlp = MixedMLP(loader, prefix, config, config.experts)
        else:
            self._mlp = SparseMLP(loader, prefix, names, config.hidden_size, config.experts)
        self._layer_scale: Tensor | None = None
        if config.has_layer_scale:
            self._layer_scale = loader.checkpoint.load(TensorSlice(f"{prefix}{names.layer_scale}", (1,)))
        self._is_fusible = self._layer_scale is None and config.value_norm is None and own.kv_layer is None

        def norm(name: str, is_used: bool) -> Norm | None:
            if not name or not is_used:
                return None
            if f"{prefix}{name}.weight" not in loader.checkpoint:
                name = names.saved_norms.get(name, name)
            return loader.norm(f"{prefix}{name}", config.hidden_size, config.norm)

        self._is_mixing = own.mixer != "none"
        self._input_norm = norm(names.input_norm, self._is_mixing and own.has_input_norm)
        self._mixer_output_norm = norm(names.attention_output_norm, self._is_mixing)
        self._mlp_norm = norm(names.mlp_norm, own.has_mlp)
        self._mlp_output_norm = norm(names.mlp_output_norm, own.has_mlp)

    @property
    def weights(self) -> LayerWeights | None:
        """The layer's weights for a fused decoder; None if LayerWeights cannot describe the layer."""
        attention = None if self._attention is None else self._attention.weights
        state = None if self.state is None else self.state.weights
        if not self._is_fusible or isinstance(self._mlp, MixedMLP):
            return None
        scales = [each.output_scale for each in (attention, state) if each is not None]
        if self._mixer_output_norm is not None and set(scales) != {1.0}:
            return None
        if self._mlp_output_norm is not None and isinstance(self._mlp, MLP) and self._mlp.weights.output_scale != 1.0:
            return None
        return LayerWeights(
            input_norm=self._input_norm,
            attention=attention,
            mixer_output_norm=self._mixer_output_norm,
            mlp_norm=self._mlp_norm,
            mlp=None if self._mlp is None else self._mlp.weights,
            mlp_output_norm=self._mlp_output_norm,
            is_parallel=self._is_parallel,
            is_post_norm=self._is_post_norm,
            cross=None if self.cross is None else self.cross.weights,
            state=state,
        )

    @property
    def cache_shape(self) -> tuple[int, int]:
        """The number of this rank's KV heads, and head_dim, of a layer with attention."""
        assert self._attention is not None
        return self._attention.cache_shape

    def __call__(self, hidden: Tensor | None, residual: Tensor, context: StepContext) -> Tensor | None:
        """Run the layer. Return the output [T, hidden_size] that the next layer must add to `residual`; None if it is
        added already. hidden: the previous layer's output, which is added to `residual` in place; None: nothing."""
        if self._is_parallel:
            return self._run_parallel(hidden, residual, context)
        if self._is_post_norm:
            self._run_post_norm(residual, context)
            return None
        if self._is_mixing:
            hidden = self._mix(hidden, residual, context)
        if self._mlp is None:
            return hidden
        normed = self._normalize(hidden, residual, self._mlp_norm)
        output = self._mlp(normed, residual) if isinstance(self._mlp, MixedMLP) else self._mlp(normed)
        if self._mlp_output_norm is not None:
            output = self._ops.norm(output, self._mlp_output_norm)
        if self._layer_scale is None:
            return self._scaled(output)
        residual.add_(self._scaled(output)).mul_(self._layer_scale)
        return None

    def _run_parallel(self, hidden: Tensor | None, residual: Tensor, context: StepContext) -> Tensor:
        """Run attention and MLP on the same stream."""
        normed = self._normalize(hidden, residual, self._input_norm)
        mlp_input = normed if self._mlp_norm is None else self._ops.norm(residual, self._mlp_norm)
        assert self._attention is not None and self._mlp is not None and not isinstance(self._mlp, MixedMLP)
        return self._scaled(self._attention(normed, context) + self._mlp(mlp_input))

    def _run_post_norm(self, residual: Tensor, context: StepContext) -> None:
        """Run attention and MLP, and after each normalize the sum in `residual`, which has all earlier outputs."""
        assert self._attention is not None and isinstance(self._mlp, MLP)
        assert self._mixer_output_norm is not None and self._mlp_output_norm is not None
        attended = self._scaled(self._attention(residual, context))
        residual.copy_(self._ops.add_norm(attended, residual, self._mixer_output_norm))
        output = self._scaled(self._mlp(residual))
        residual.copy_(self._ops.add_norm(output, residual, self._mlp_output_norm))

    def _mix(self, hidden: Tensor | None, residual: Tensor, context: StepContext) -> Tensor:
        """Run what mixes the tokens. Return its output [T, hidden_size], which must be added to `residual`."""
        normed = self._normalize(hidden, residual, self._input_norm)
        # `normed` and `mixed` are reused, so that they are freed before the wider MLP runs
        mixed = normed
        if self.state is not None:
            mixed = self.state(normed, context)
        if self._attention is not None:
            attended = self._attention(normed, context)
            mixed = attended if self.state is None else mixed + attended
        if self._mixer_output_norm is not None:
            mixed = self._ops.norm(mixed, self._mixer_output_norm)
        if self.cross is not None and context.cross is not None:
            normed = self._normalize(self._scaled(mixed), residual, self.cross.weights.norm)
            mixed = self.cross(normed, context.cross, context)
        return self._scaled(mixed)

    def _normalize(self, hidden: Tensor | None, residual: Tensor, norm: Norm | None) -> Tensor:
        """Add `hidden`, if any, to `residual` in place; return the norm of `residual`, or a copy if `norm` is None."""
        if norm is None:
            return residual.add_(hidden).clone() if hidden is not None else residual.clone()
        if hidden is None:
            return self._ops.norm(residual, norm)
        return self._ops.add_norm(hidden, residual, norm)

    def _scaled(self, output: Tensor) -> Tensor:
        return scaled(output, self._scale)


def with_state_norms(names: TensorNames, state: StateConfig) -> TensorNames:
    """Return the names with those of the norms of layers that have a state and no attention."""
    if state.names.layer_norms is None:
        return names
    fields = ("input_norm", "attention_output_norm", "mlp_norm", "mlp_output_norm")
    return msgspec.structs.replace(names, **dict(zip(fields, state.names.layer_norms, strict=True)))
