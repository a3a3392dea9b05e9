"""The modules of a native model that an adapter may update, by their paths in the checkpoint.

Paths are made from ModelConfig.names. A checkpoint may have one of `names.roots` in place of their "model.".
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Literal

import msgspec

from ..models.model_config import ExpertsConfig, LayerConfig, ModelConfig

TargetKind = Literal["linear", "embedding", "head", "experts_up", "experts_down"]

WRAPPERS = ("model.language_model.", "language_model.model.", "language_model.", "")  # prefixes in larger models
MLP_BLOCK = re.compile(r"(\.\d+\.)mlp\.(?=gate$|experts(\.|$))")  # the module of experts in transformers 5


class AdapterTarget(msgspec.Struct, frozen=True, kw_only=True):
    """A module with a matrix [num_outputs, num_inputs]. The matrices of experts are targets in two forms: one module
    for each matrix of each expert (`expert` is set), and one for all experts of a layer (`num_experts` is set)."""

    module: str  # its path, e.g. "model.layers.0.self_attn.q_proj"
    layer: int | None = None
    kind: TargetKind = "linear"
    num_inputs: int  # for an embedding: the number of token ids
    num_outputs: int
    expert: int | None = None
    num_experts: int = 0
    first_output: int = 0  # for experts_up: offset of these outputs in the joined outputs gates | ups
    is_interleaved: bool = False  # for experts_up in one tensor: gates and ups alternate among the outputs
    is_transposed: bool = False  # the checkpoint has the matrix as [in, out], or [experts, in, out]


def targets_of(model: ModelConfig) -> dict[str, AdapterTarget]:
    """Return all modules of a model that an adapter may update, by path."""
    return {target.module: target for target in _targets(model)}


def is_chosen(target: AdapterTarget, target_modules: Sequence[str] | None) -> bool:
    """Return whether adapters may update `target`: its path ends with one of `target_modules`, or `target_modules` is
    None. For all experts of a layer, the path of their block counts as well."""
    if target_modules is None:
        return True
    paths = [target.module] if not target.num_experts else [target.module, target.module.rpartition(".")[0]]
    return any(path == name or path.endswith(f".{name}") for path in paths for name in target_modules)


class ModulePaths:
    """Translation of module paths in a PEFT file, which are transformers' paths, to paths in the checkpoint."""

    def __init__(self, model: ModelConfig) -> None:
        names = model.names
        self._root = names.layers.partition(".")[0] + "."
        self._prefixes = [*names.roots, *WRAPPERS]
        self._heads = {"lm_head", names.head}
        self._head, self._experts = names.head, names.experts

    def spellings(self, module: str) -> Iterator[str]:
        """Yield the paths that a module of a PEFT file may have in the checkpoint, the likeliest first."""
        yield from self._blocks(module)
        for prefix in self._prefixes:
            if module.startswith(prefix):
                inner = module.removeprefix(prefix)
                if inner in self._heads:
                    yield self._head
                yield from self._blocks(self._root + inner)

    def _blocks(self, module: str) -> Iterator[str]:
        yield module
        if self._experts not in ("", "mlp"):
            yield MLP_BLOCK.sub(rf"\1{self._experts}.", module)


def _targets(model: ModelConfig) -> Iterator[AdapterTarget]:
    names, hidden, size = model.names, model.hidden_size, model.vocab_size
    yield AdapterTarget(module=names.embedding, kind="embedding", num_inputs=size, num_outputs=hidden)
    yield AdapterTarget(module=names.head, kind="head", num_inputs=hidden, num_outputs=size)
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
            block = f"{prefix}{names.experts}." if names.experts else prefix
            for name, num_inputs, num_outputs in _matrices_beside_experts(own, own.experts):
                module = f"{block}{name}"
                yield AdapterTarget(module=module, layer=layer, num_inputs=num_inputs, num_outputs=num_outputs)
            if names.expert_list:  # stacks under other names have no targets
                yield from _expert_targets(own, own.experts, layer, f"{block}{names.expert_list}.")


def _dense_matrices(model: ModelConfig, layer: int) -> Iterator[tuple[str, int, int]]:
    """Yield name, inputs and outputs of the matrices of attention and of the dense MLP, if the layer has these."""
    own = model.layers[layer]
    if own.has_attention:
        yield from _attention_matrices(model, own)
    has_named_shared = model.experts is not None and model.experts.shared_size and not model.names.shared_expert
    has_dense = model.experts is None or not own.has_experts or model.experts.is_beside_mlp or has_named_shared
    if own.has_mlp and has_dense:
        yield from _mlp_matrices(model)


def _attention_matrices(model: ModelConfig, own: LayerConfig) -> Iterator[tuple[str, int, int]]:
    names, hidden = model.names, model.hidden_size
    num_queries, num_keys = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    if names.qkv:
        yield names.qkv, hidden, num_queries + 2 * num_keys
    else:
        yield names.query, hidden, num_queries * (1 + model.has_output_gate)
        if own.kv_layer is None:
            yield names.key, hidden, num_keys
            if not own.are_values_keys:
                yield names.value, hidden, num_keys
    yield names.output, num_queries, hidden


def _mlp_matrices(model: ModelConfig) -> Iterator[tuple[str, int, int]]:
    names, hidden, inner = model.names, model.hidden_size, model.intermediate_size
    if names.gate_up and model.activation.is_gated:
        yield names.gate_up, hidden, 2 * inner
    else:
        if model.activation.is_gated:
            yield names.gate, hidden, inner
        yield names.up, hidden, inner
    yield names.down, inner, hidden


def _matrices_beside_experts(model: ModelConfig, experts: ExpertsConfig) -> Iterator[tuple[str, int, int]]:
    names, hidden, size = model.names, model.hidden_size, experts.shared_size
    yield names.router, hidden, experts.num_experts
    if size and names.shared_expert:
        gate, up, down = names.expert_matrices
        if experts.activation.is_gated:
            yield f"{names.shared_expert}.{gate}", hidden, size
        yield f"{names.shared_expert}.{up}", hidden, size
        yield f"{names.shared_expert}.{down}", size, hidden
    if experts.has_shared_gate:
        yield names.shared_gate, hidden, 1


def _expert_targets(model: ModelConfig, experts: ExpertsConfig, layer: int, block: str) -> Iterator[AdapterTarget]:
    """Yield the targets of a layer's experts, in both forms. `block`: the path of the experts, with a dot at the
    end."""
    names, hidden, size = model.names, model.hidden_size, experts.intermediate_size
    gate, up, down = names.expert_matrices
    are_interleaved = names.are_experts_interleaved
    is_gated = experts.activation.is_gated
    kinds: list[tuple[str, TargetKind, int, int, int]] = [
        (up, "experts_up", hidden, size, size if is_gated else 0),
        (down, "experts_down", size, hidden, 0),
    ]
    if is_gated:
        kinds.insert(0, (gate, "experts_up", hidden, size, 0))
    for expert in range(experts.num_experts):
        for name, kind, num_inputs, num_outputs, first in kinds:
            yield AdapterTarget(
                module=f"{block}{expert}.{name}",
                layer=layer,
                kind=kind,
                num_inputs=num_inputs,
                num_outputs=num_outputs,
                expert=expert,
                first_output=first,
            )
    yield AdapterTarget(
        module=f"{block}gate_up_proj" if is_gated else f"{block}{up}",
        layer=layer,
        kind="experts_up",
        num_inputs=hidden,
        num_outputs=(1 + is_gated) * size,
        num_experts=experts.num_experts,
        is_interleaved=are_interleaved,
        is_transposed=are_interleaved,
    )
    yield AdapterTarget(
        module=f"{block}down_proj",
        layer=layer,
        kind="experts_down",
        num_inputs=size,
        num_outputs=hidden,
        num_experts=experts.num_experts,
        is_transposed=are_interleaved,
    )
