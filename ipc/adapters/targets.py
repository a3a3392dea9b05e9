"""The modules of a native model that an adapter may update, by their paths in the checkpoint.

Paths follow ModelConfig.names. A checkpoint may have one of `names.roots` in place of their "model.".
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import msgspec

from ..config.model_config import ExpertsConfig, ModelConfig, TensorNames

TargetKind = Literal["linear", "embedding", "head", "experts_up", "experts_down"]


class AdapterTarget(msgspec.Struct, frozen=True, kw_only=True):
    """A module with a matrix [num_outputs, num_inputs]. The matrices of experts are targets in two forms: a module for
    each matrix of each expert (`expert`), and one for all experts of a layer (`num_experts`)."""

    module: str  # its path, e.g. "model.layers.0.self_attn.q_proj"
    layer: int | None = None
    kind: TargetKind = "linear"
    num_inputs: int  # of an embedding, the ids
    num_outputs: int
    expert: int | None = None
    num_experts: int = 0
    first_output: int = 0  # of experts_up: the place of the outputs in gates | ups
    is_interleaved: bool = False  # of experts_up in one tensor: gates and ups alternate among the outputs
    is_transposed: bool = False  # the checkpoint has the matrix as [in, out]


def targets_of(model: ModelConfig) -> dict[str, AdapterTarget]:
    """Return all modules of a model that an adapter may update, by path."""
    return {target.module: target for target in _targets(model)}


def _targets(model: ModelConfig) -> Iterator[AdapterTarget]:
    names, hidden = model.names, model.hidden_size
    yield AdapterTarget(module=names.embedding, kind="embedding", num_inputs=model.vocab_size, num_outputs=hidden)
    yield AdapterTarget(module=names.head, kind="head", num_inputs=hidden, num_outputs=model.vocab_size)
    for layer in range(model.num_layers):
        own, prefix = model.at_layer(layer), f"{names.layers}.{layer}."
        for name, num_inputs, num_outputs in _dense_matrices(own, layer):
            yield AdapterTarget(
                module=f"{prefix}{name}",
                layer=layer,
                num_inputs=num_inputs,
                num_outputs=num_outputs,
                is_transposed=names.is_transposed,
            )
        if own.experts is not None and own.layers[layer].has_experts:
            yield from _expert_targets(names, own.experts, hidden, layer)


def _dense_matrices(model: ModelConfig, layer: int) -> Iterator[tuple[str, int, int]]:
    """Yield name, inputs and outputs of the matrices of attention and of the dense MLP, if the layer has one."""
    names, own, hidden = model.names, model.layers[layer], model.hidden_size
    num_queries, num_keys = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    if names.qkv:
        yield names.qkv, hidden, num_queries + 2 * num_keys
    else:
        yield names.query, hidden, num_queries
        if own.kv_layer is None:
            yield names.key, hidden, num_keys
            if not own.are_values_keys:
                yield names.value, hidden, num_keys
    yield names.output, num_queries, hidden
    if model.experts is None or not own.has_experts or model.experts.is_beside_mlp:
        yield from _mlp_matrices(model, hidden)


def _mlp_matrices(model: ModelConfig, hidden: int) -> Iterator[tuple[str, int, int]]:
    names, inner = model.names, model.intermediate_size
    if names.gate_up and model.activation.is_gated:
        yield names.gate_up, hidden, 2 * inner
    else:
        if model.activation.is_gated:
            yield names.gate, hidden, inner
        yield names.up, hidden, inner
    yield names.down, inner, hidden


def _expert_targets(names: TensorNames, experts: ExpertsConfig, hidden: int, layer: int) -> Iterator[AdapterTarget]:
    block = f"{names.layers}.{layer}." + (f"{names.experts}." if names.experts else "")
    size, (gate, up, down) = experts.intermediate_size, names.expert_matrices

    def linear(name: str, num_inputs: int, num_outputs: int) -> AdapterTarget:
        return AdapterTarget(module=f"{block}{name}", layer=layer, num_inputs=num_inputs, num_outputs=num_outputs)

    yield linear(names.router, hidden, experts.num_experts)
    if experts.shared_size:
        yield linear(f"{names.shared_expert}.{gate}", hidden, experts.shared_size)
        yield linear(f"{names.shared_expert}.{up}", hidden, experts.shared_size)
        yield linear(f"{names.shared_expert}.{down}", experts.shared_size, hidden)
    if experts.has_shared_gate:
        yield linear(names.shared_gate, hidden, 1)
    replace = msgspec.structs.replace
    for expert in range(experts.num_experts):
        for first, name in ((0, gate), (size, up)):
            target = linear(f"experts.{expert}.{name}", hidden, size)
            yield replace(target, kind="experts_up", expert=expert, first_output=first)
        yield replace(linear(f"experts.{expert}.{down}", size, hidden), kind="experts_down", expert=expert)
    num_experts = experts.num_experts
    target = replace(linear("experts.gate_up_proj", hidden, 2 * size), kind="experts_up", num_experts=num_experts)
    yield replace(target, is_interleaved=names.are_experts_interleaved)
    yield replace(linear("experts.down_proj", size, hidden), kind="experts_down", num_experts=num_experts)
