"""The feed-forward block, gated: down(act(gate(x)) * up(x)), or plain: down(act(up(x))). Its inner size is divided
among the ranks."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from ...ipc.spec.models.model_config import ActivationConfig, TensorNames
from ...kernels.contract import NO_ACTIVATION, Activation, MLPWeights, ScaledGates
from ..weights.loader import LayerLoader, Projection, stacked
from .elementwise import scaled


class MLP:
    """Feed-forward block, x [T, hidden_size] → [T, hidden_size], summed over ranks."""

    def __init__(
        self,
        loader: LayerLoader,
        prefix: str,
        names: TensorNames,
        hidden_size: int,
        inner_size: int,
        activation: ActivationConfig,
        has_bias: bool,
        gate_scale: float = 1.0,
        output_scale: float = 1.0,
        *,
        has_up_bias: bool = True,
    ) -> None:
        """`prefix`: the prefix of the block's tensor names, with the dot. gate_scale: of a gated block's gates.
        has_up_bias: False if with has_bias only the last matrix has one."""
        self._ops, self._group = loader.ops, loader.group
        shard = loader.group.shard(inner_size, "elements of intermediate_size")
        # GGUF files may have gates and ups apart where the family's other files have them in one tensor.
        is_fused = bool(names.gate_up) and f"{prefix}{names.gate}.weight" not in loader.checkpoint
        if is_fused and activation.is_gated:
            (both,) = stacked(f"{prefix}{names.gate_up}", [inner_size] * 2, [shard] * 2)
            shards = both.shards[::-1] if names.are_ups_first else both.shards
            projections = [replace(both, shards=shards)]
        else:
            parts = (names.gate, names.up) if activation.is_gated else (names.up,)
            projections = [Projection(f"{prefix}{part}", inner_size, [shard]) for part in parts]
        kernel, scaled_gates = activation_of(activation), None
        if gate_scale != 1.0:
            assert activation.is_gated
            kernel, scaled_gates = NO_ACTIVATION, ScaledGates(gate_scale, kernel)
        up = loader.column_parallel(
            hidden_size, projections, has_bias and has_up_bias, kernel, is_transposed=names.is_transposed
        )
        shape = (hidden_size, inner_size)
        down = loader.row_parallel(f"{prefix}{names.down}", shape, shard, has_bias, is_transposed=names.is_transposed)
        self.weights = MLPWeights(up, down, scaled_gates, output_scale)

    def __call__(self, x: Tensor) -> Tensor:
        return self._group.all_reduce(self.partial(x))

    def partial(self, x: Tensor) -> Tensor:
        """Compute this rank's summand of the block's output."""
        weights = self.weights
        inner, gates = self._ops.linear(x, weights.up), weights.scaled_gates
        if gates is not None:
            inner[:, : inner.shape[1] // 2] *= gates.scale
            inner = self._ops.activate(inner, gates.activation)
        return scaled(self._ops.linear(inner, weights.down), weights.output_scale)


def activation_of(config: ActivationConfig) -> Activation:
    return Activation(config.kind, config.is_gated, config.limit)
