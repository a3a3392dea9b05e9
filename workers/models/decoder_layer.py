"""DecoderLayer: what mixes the tokens, and the MLP, with the norms before and behind them.

Knows the order in which they run; knows no other layer, no family and no kernels.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ...ipc.spec.models.model_config import ModelConfig
from ...kernels.contract import LayerWeights, Norm, Rotary
from ..layers.attention import Attention
from ..layers.cross_attention import CrossAttention
from ..layers.mlp import MLP
from ..layers.moe import MixedMLP, SparseMLP
from ..step.kv_cache import CachePlace
from ..step.model_step import StepContext
from ..weights.checkpoint import TensorSlice
from ..weights.loader import LayerLoader


class DecoderLayer:
    """One layer. The residual stream is passed separately from the hidden states, which the norms add to it."""

    def __init__(
        self, loader: LayerLoader, config: ModelConfig, layer: int, rotaries: Sequence[Rotary], place: CachePlace
    ) -> None:
        names, prefix = config.names, f"{config.names.layers}.{layer}."
        self._ops = loader.ops
        self._scale, self._is_parallel = config.residual_scale, config.is_parallel
        self._attention = Attention(loader, prefix, config, layer, rotaries, place)
        self.cross = None if config.cross is None else CrossAttention(loader, prefix, config, layer)
        own, config = config.layers[layer], config.at_layer(layer)
        self._mlp: MLP | SparseMLP | MixedMLP
        if config.experts is None or not own.has_experts:
            self._mlp = MLP(
                loader,
                prefix,
                names,
                config.hidden_size,
                config.intermediate_size,
                config.activation,
                config.has_mlp_bias,
            )
        elif config.experts.is_beside_mlp:
            self._mlp = MixedMLP(loader, prefix, config, config.experts)
        else:
            self._mlp = SparseMLP(loader, prefix, names, config.hidden_size, config.experts)
        self._layer_scale: Tensor | None = None
        if config.has_layer_scale:
            self._layer_scale = loader.checkpoint.load(TensorSlice(f"{prefix}{names.layer_scale}", (1,)))
        self._is_fusible = self._layer_scale is None and config.value_norm is None and own.kv_layer is None

        def norm(name: str) -> Norm | None:
            return loader.norm(f"{prefix}{name}", config.hidden_size, config.norm) if name else None

        self._input_norm, self._attention_output_norm = norm(names.input_norm), norm(names.attention_output_norm)
        self._mlp_norm, self._mlp_output_norm = norm(names.mlp_norm), norm(names.mlp_output_norm)

    @property
    def weights(self) -> LayerWeights | None:
        """The layer's weights for a fused decoder; None if LayerWeights cannot describe the layer."""
        if isinstance(self._mlp, MixedMLP) or not self._is_fusible:
            return None
        return LayerWeights(
            input_norm=self._input_norm,
            qkv=self._attention.qkv,
            head_norms=self._attention.norms,
            rotary=self._attention.rotary,
            attention=self._attention.spec,
            output=self._attention.output,
            attention_output_norm=self._attention_output_norm,
            mlp_norm=self._mlp_norm,
            mlp=self._mlp.weights,
            mlp_output_norm=self._mlp_output_norm,
            is_parallel=self._is_parallel,
            cross=None if self.cross is None else self.cross.weights,
            group=self._attention.place.group,
            cache_layer=self._attention.place.layer,
        )

    @property
    def cache_shape(self) -> tuple[int, int]:
        """The number of this rank's KV heads, and head_dim."""
        return self._attention.cache_shape

    def __call__(self, hidden: Tensor | None, residual: Tensor, context: StepContext) -> Tensor | None:
        """Run the layer. Return the output [T, hidden_size] that the next layer must add to `residual`; None if it is
        added already. hidden: the previous layer's output, which is added to `residual` in place; None: nothing."""
        normed = self._normalize(hidden, residual, self._input_norm)
        # `normed` is reused, so that attention's input and output are freed before the wider MLP runs.
        if self._is_parallel:
            mlp_input = normed if self._mlp_norm is None else self._ops.norm(residual, self._mlp_norm)
            assert not isinstance(self._mlp, MixedMLP)
            return self._scaled(self._attention(normed, context) + self._mlp(mlp_input))
        attended = self._attention(normed, context)
        if self._attention_output_norm is not None:
            attended = self._ops.norm(attended, self._attention_output_norm)
        if self.cross is not None and context.cross is not None:
            normed = self._normalize(self._scaled(attended), residual, self.cross.weights.norm)
            attended = self.cross(normed, context.cross, context)
        normed = self._normalize(self._scaled(attended), residual, self._mlp_norm)
        output = self._mlp(normed, residual) if isinstance(self._mlp, MixedMLP) else self._mlp(normed)
        if self._mlp_output_norm is not None:
            output = self._ops.norm(output, self._mlp_output_norm)
        if self._layer_scale is None:
            return self._scaled(output)
        residual.add_(self._scaled(output)).mul_(self._layer_scale)
        return None

    def _normalize(self, hidden: Tensor | None, residual: Tensor, norm: Norm | None) -> Tensor:
        """Add `hidden`, if any, to `residual` in place; return the norm of `residual`, or a copy if `norm` is None."""
        if norm is None:
            return residual.add_(hidden).clone() if hidden is not None else residual.clone()
        if hidden is None:
            return self._ops.norm(residual, norm)
        return self._ops.add_norm(hidden, residual, norm)

    def _scaled(self, output: Tensor) -> Tensor:
        return output if self._scale == 1.0 else output * self._scale
