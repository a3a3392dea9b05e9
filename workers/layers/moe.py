"""SparseMLP: the mixture-of-experts block. Every rank holds a shard of every expert, as of a dense block.

Checkpoints store experts in three ways: one by one with Qwen's or Mixtral's names, or stacked, two tensors per layer.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...ipc.config.model_config import ExpertsConfig
from ...kernels.contract import Routing
from ...kernels.quantized import Weight
from ..weights.checkpoint import Checkpoint, TensorSlice
from ..weights.loader import LayerLoader
from ..weights.quantized_weights import load_matrix, quantize_on_load

QWEN = ("mlp", "gate_proj", "up_proj", "down_proj")  # the block with router and experts, and an expert's matrices
MIXTRAL = ("block_sparse_moe", "w1", "w3", "w2")


class SparseMLP:
    """Block x [T, hidden_size] → [T, hidden_size]: a router selects each token's experts and mixes their outputs."""

    def __init__(self, loader: LayerLoader, name: str, hidden_size: int, config: ExpertsConfig) -> None:
        """`name`: of the layer in the checkpoint."""
        self._ops, self._group = loader.ops, loader.group
        self._routing = Routing(config.top_k, is_normalized=config.is_normalized)
        checkpoint = loader.checkpoint
        block, *matrices = MIXTRAL if f"{name}.{MIXTRAL[0]}.gate.weight" in checkpoint else QWEN
        router = checkpoint.load(TensorSlice(f"{name}.{block}.gate.weight", (config.num_experts, hidden_size)))
        shard = loader.group.shard(config.intermediate_size, "elements of an expert's intermediate size")
        experts = f"{name}.{block}.experts"
        if f"{experts}.gate_up_proj" in checkpoint:
            gate_up, down = _load_stacked(checkpoint, experts, hidden_size, config, shard)
        else:
            gate_up, down = _load_each(checkpoint, experts, matrices, hidden_size, config, shard)
        self._router = loader.pack(router)
        self._experts = loader.pack_experts(gate_up, down)

    def __call__(self, x: Tensor) -> Tensor:
        scores = self._ops.linear(x, self._router)
        return self._group.all_reduce(self._ops.fused_moe(x, scores, self._experts, self._routing))


def _load_each(
    checkpoint: Checkpoint, experts: str, matrices: list[str], hidden_size: int, config: ExpertsConfig, shard: range
) -> tuple[list[Weight], list[Weight]]:
    gate, up, down = matrices
    size, numbers = config.intermediate_size, range(config.num_experts)

    def load(expert: int, axis: int, shape: tuple[int, int], *matrices: str) -> Weight:
        names = (f"{experts}.{expert}.{matrix}.weight" for matrix in matrices)
        return load_matrix(checkpoint, *(TensorSlice(name, shape, axis, shard) for name in names))

    gate_up = [load(expert, 0, (size, hidden_size), gate, up) for expert in numbers]
    return gate_up, [load(expert, 1, (hidden_size, size), down) for expert in numbers]


def _load_stacked(
    checkpoint: Checkpoint, experts: str, hidden_size: int, config: ExpertsConfig, shard: range
) -> tuple[list[Weight], list[Weight]]:
    """Read experts from `experts`.gate_up_proj [E, gates | ups, hidden_size] and .down_proj [E, hidden_size, size]."""
    num_experts, size = config.num_experts, config.intermediate_size
    gate_up_shape = (num_experts, 2 * size, hidden_size)
    gate = checkpoint.load(TensorSlice(f"{experts}.gate_up_proj", gate_up_shape, 1, shard))
    ups = range(size + shard.start, size + shard.stop)
    up = checkpoint.load(TensorSlice(f"{experts}.gate_up_proj", gate_up_shape, 1, ups))
    down = checkpoint.load(TensorSlice(f"{experts}.down_proj", (num_experts, hidden_size, size), 2, shard))
    gate_up = torch.cat((gate, up), dim=1)
    return [quantize_on_load(checkpoint, w) for w in gate_up], [quantize_on_load(checkpoint, w) for w in down]
