"""SparseMLP: the mixture-of-experts block; and MixedMLP: a dense block with experts in parallel. Every rank holds a
shard of every expert, as it does of a dense block."""

from __future__ import annotations

import msgspec
import torch
from torch import Tensor

from ...ipc.spec.models.model_config import ExpertsConfig, ModelConfig, TensorNames
from ...kernels.contract import ExpertsWeights, Norm, PackedExperts, Routing
from ..weights.experts import load_expert_biases, load_experts
from ..weights.experts_shard import ExpertsShard
from ..weights.loader import LayerLoader
from .mlp import MLP, activation_of


class SparseMLP:
    """Mixture of experts, x [T, hidden_size] → [T, hidden_size]: a router selects each token's experts and mixes their
    outputs; the output of a shared expert, if any, is added."""

    def __init__(
        self, loader: LayerLoader, prefix: str, names: TensorNames, hidden_size: int, config: ExpertsConfig
    ) -> None:
        """`prefix`: the prefix of the layer's tensor names, with the dot."""
        self._ops, self._group = loader.ops, loader.group
        block = f"{prefix}{names.experts}." if names.experts else prefix
        if f"{prefix}mlp.{names.router}.weight" in loader.checkpoint:
            block = f"{prefix}mlp."
        packed_router = loader.replicated(
            f"{block}{names.router}", (config.num_experts, hidden_size), has_bias=config.has_bias
        )
        choice_bias = None
        if config.has_choice_bias:
            shape = (1, config.num_experts) if names.is_choice_bias_row else (config.num_experts,)
            choice_bias = loader.vector(f"{block}{names.choice_bias}", shape).flatten()
        expert_scales = None
        if config.is_beside_mlp:
            expert_scales = loader.vector(f"{block}{names.expert_scales}", (config.num_experts,))
        experts = _load_packed(loader, f"{block}{names.expert_list}".removesuffix("."), names, hidden_size, config)
        shared_block = block if names.shared_expert else prefix
        self._shared = _load_shared(loader, shared_block, names, hidden_size, config)
        shared_gate = None
        if config.has_shared_gate:
            shared_gate = loader.replicated(f"{block}{names.shared_gate}", (1, hidden_size))
        self.weights = ExpertsWeights(
            packed_router,
            routing_of(config, choice_bias, expert_scales),
            experts,
            None if self._shared is None else self._shared.weights,
            shared_gate,
        )

    def __call__(self, x: Tensor, router_input: Tensor | None = None) -> Tensor:
        """Compute the block for x [T, hidden_size]. router_input: input of the router, [T, hidden_size]; None: x."""
        weights, asked = self.weights, x if router_input is None else router_input
        # a bias for the choice is as small as the differences between scores: rounded scores would change the choice
        is_exact = weights.routing.choice_bias is not None
        scores = self._ops.logits(asked, weights.router) if is_exact else self._ops.linear(asked, weights.router)
        mixed = self._ops.fused_moe(x, scores, weights.experts, weights.routing)
        if self._shared is not None:
            shared = self._shared.partial(x)
            if weights.shared_gate is not None:
                shared *= self._ops.sigmoid(self._ops.linear(x, weights.shared_gate))
            mixed = mixed + shared
        return self._group.all_reduce(mixed)


class MixedMLP:
    """A dense MLP and experts in parallel. Both, and the router, read the residual stream through norms of their own;
    the normalized outputs of MLP and experts are added."""

    def __init__(self, loader: LayerLoader, prefix: str, config: ModelConfig, experts: ExpertsConfig) -> None:
        """`prefix`: the prefix of the layer's tensor names, with the dot."""
        self._ops, names, size = loader.ops, config.names, config.hidden_size
        inner = config.intermediate_size
        self._mlp = MLP(loader, prefix, names, size, inner, config.activation, config.has_mlp_bias)
        self._experts = SparseMLP(loader, prefix, names, size, experts)
        norms = [loader.norm(f"{prefix}{name}", size, config.norm) for name in names.beside_mlp_norms]
        self._input_norm, self._mlp_norm, self._experts_norm = norms
        scale = loader.vector(f"{prefix}{names.router_scale}", (size,)) * size**-0.5
        self._router_norm = Norm("rms", scale, None, config.norm.eps)

    def __call__(self, x: Tensor, residual: Tensor) -> Tensor:
        """Compute the block [T, hidden_size]. x: input of the dense MLP, already normalized; residual: the residual
        stream. Both [T, hidden_size]."""
        dense = self._ops.norm(self._mlp(x), self._mlp_norm)
        asked = self._ops.norm(residual, self._router_norm)
        mixed = self._experts(self._ops.norm(residual, self._input_norm), asked)
        return dense + self._ops.norm(mixed, self._experts_norm)


def routing_of(config: ExpertsConfig, choice_bias: Tensor | None, expert_scales: Tensor | None) -> Routing:
    return Routing(
        config.top_k,
        config.score,
        choice_bias,
        config.num_groups,
        config.top_groups,
        config.group_score,
        config.is_normalized,
        config.scale,
        expert_scales,
    )


def _load_packed(
    loader: LayerLoader, experts: str, names: TensorNames, hidden_size: int, config: ExpertsConfig
) -> PackedExperts:
    inner = loader.group.shard(config.intermediate_size, "elements of an expert's intermediate size")
    shard = ExpertsShard(experts, hidden_size, config, names, inner)
    biases = load_expert_biases(loader.checkpoint, shard) if config.has_bias else None
    if biases is not None and loader.group.rank > 0:  # the bias must be added to the sum over ranks only once
        biases = (biases[0], torch.zeros_like(biases[1]))
    matrices = load_experts(loader.checkpoint, shard, keeps_mxfp4=loader.ops.has_integer_products)
    packed = loader.pack_experts(*matrices, biases, activation_of(config.activation))
    if loader.adapted is not None:
        loader.adapted.add_experts(packed, shard)
    return packed


def _load_shared(
    loader: LayerLoader, block: str, names: TensorNames, hidden_size: int, config: ExpertsConfig
) -> MLP | None:
    """Load the shared expert, which computes every token; None if the layer has none."""
    if not config.shared_size:
        return None
    own_names, has_bias = names, False
    if names.shared_expert:
        matrices = zip(("gate", "up", "down"), names.expert_matrices, strict=True)
        moved = {matrix: f"{names.shared_expert}.{name}" for matrix, name in matrices}
        own_names = msgspec.structs.replace(names, gate_up="", is_transposed=False, **moved)
    return MLP(loader, block, own_names, hidden_size, config.shared_size, config.activation, has_bias)
