"""SparseMLP: the mixture-of-experts block. Every rank holds a shard of every expert, as of a dense block."""

from __future__ import annotations

import msgspec
import torch
from torch import Tensor

from ...ipc.config.model_config import ExpertsConfig, TensorNames
from ...kernels.contract import PackedExperts, Routing
from ..weights.checkpoint import TensorSlice
from ..weights.experts import load_expert_biases, load_experts
from ..weights.loader import LayerLoader
from .mlp import MLP, activation_of


class SparseMLP:
    """Block x [T, hidden_size] → [T, hidden_size]: a router selects each token's experts and mixes their outputs; a
    shared expert, if any, is added."""

    def __init__(
        self, loader: LayerLoader, prefix: str, names: TensorNames, hidden_size: int, config: ExpertsConfig
    ) -> None:
        """`prefix`: of the layer's tensors, with the dot."""
        self._ops, self._group = loader.ops, loader.group
        checkpoint = loader.checkpoint
        block = f"{prefix}{names.experts}."
        if f"{block}{names.router}.weight" not in checkpoint:
            block = f"{prefix}mlp."
        router = f"{block}{names.router}"
        weight = checkpoint.load(TensorSlice(f"{router}.weight", (config.num_experts, hidden_size)))
        bias = checkpoint.load(TensorSlice(f"{router}.bias", (config.num_experts,))) if config.has_bias else None
        self._router = loader.pack(weight, bias)
        choice_bias = None
        if config.has_choice_bias:
            shape = (1, config.num_experts) if names.is_choice_bias_row else (config.num_experts,)
            choice_bias = loader.vector(f"{block}{names.choice_bias}", shape).flatten()
        self._routing = routing_of(config, choice_bias)
        self._experts = _load_packed(loader, f"{block}experts", names, hidden_size, config)
        self._shared = _load_shared(loader, block, names, hidden_size, config)
        self._shared_gate = None
        if config.has_shared_gate:
            gate = checkpoint.load(TensorSlice(f"{block}{names.shared_gate}.weight", (1, hidden_size)))
            self._shared_gate = loader.pack(gate)

    def __call__(self, x: Tensor) -> Tensor:
        # a bias for the choice is as small as the differences between scores: rounded scores would change the choice
        is_exact = self._routing.choice_bias is not None
        scores = self._ops.logits(x, self._router) if is_exact else self._ops.linear(x, self._router)
        mixed = self._ops.fused_moe(x, scores, self._experts, self._routing)
        if self._shared is not None:
            shared = self._shared.partial(x)
            if self._shared_gate is not None:
                shared = shared * torch.sigmoid(self._ops.linear(x, self._shared_gate))
            mixed = mixed + shared
        return self._group.all_reduce(mixed)


def routing_of(config: ExpertsConfig, choice_bias: Tensor | None) -> Routing:
    return Routing(
        config.top_k,
        config.score,
        choice_bias,
        config.num_groups,
        config.top_groups,
        config.group_score,
        config.is_normalized,
        config.scale,
    )


def _load_packed(
    loader: LayerLoader, experts: str, names: TensorNames, hidden_size: int, config: ExpertsConfig
) -> PackedExperts:
    shard = loader.group.shard(config.intermediate_size, "elements of an expert's intermediate size")
    arguments = (loader.checkpoint, experts, hidden_size, config, names, shard)
    biases = load_expert_biases(*arguments) if config.has_bias else None
    if biases is not None and loader.group.rank > 0:  # added once to the sum over ranks
        biases = (biases[0], torch.zeros_like(biases[1]))
    return loader.pack_experts(*load_experts(*arguments), biases, activation_of(config.activation))


def _load_shared(
    loader: LayerLoader, block: str, names: TensorNames, hidden_size: int, config: ExpertsConfig
) -> MLP | None:
    """Load the expert that every token passes, if the layer has one."""
    if not config.shared_size:
        return None
    matrices = zip(("gate", "up", "down"), names.expert_matrices, strict=True)
    moved = {matrix: f"{names.shared_expert}.{name}" for matrix, name in matrices}
    own_names = msgspec.structs.replace(names, gate_up="", is_transposed=False, **moved)
    has_bias = False
    return MLP(loader, block, own_names, hidden_size, config.shared_size, config.activation, has_bias)
