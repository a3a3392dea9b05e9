"""AdaptedLayers: the layers that adapters may update, each with its slots and the modules that its outputs come from.

The loader of weights records here how it has made a packed layer: from which outputs and inputs of which modules of the
checkpoint, in which order. So layers need not know adapters, and an adapter is sharded like the base model's weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from ...ipc.spec.models.model_config import ModelConfig, TensorNames
from ...kernels.contract import AdapterSpace, ExpertSlots, LinearSlots, PackedExperts, PackedLinear
from .checkpoint import TensorSlice
from .experts_shard import ExpertsShard

Outputs: TypeAlias = range | Tensor  # indices of outputs; a tensor: [n] int64


class Adaptable(NamedTuple):
    """The slots for a model's adapters, before the model is loaded, and the modules that may have them."""

    space: AdapterSpace
    modules: frozenset[str]  # paths of the modules that adapters may update; layers without such a module get no slots


@dataclass(frozen=True, eq=False)
class AdaptedPart:
    """Consecutive outputs of a packed layer that come from one module."""

    module: str  # the module's path, named as in `ipc.spec.adapters.targets`
    weight: TensorSlice  # the module's whole matrix in the checkpoint
    first_output: int  # index of the part's first output in the packed layer
    outputs: Outputs  # indices of the part's outputs in the module
    inputs: range  # indices of the part's inputs in the module; of a padded vocabulary they exceed the last id
    expert: int | None = None  # index of the expert, if the module holds all experts
    is_exact: bool = False  # whether the base weight is not quantized on load


@dataclass(frozen=True, eq=False)
class AdaptedLinear:
    """A packed linear layer or an embedding with slots."""

    parts: list[AdaptedPart]
    num_outputs: int  # number of outputs of the packed weight
    slots: LinearSlots


@dataclass(frozen=True, eq=False)
class AdaptedExperts:
    """The experts of a layer, with slots. `ups` and `downs`: the parts of each expert's two packed layers.

    The same outputs have parts from modules of a single expert and from modules that hold all experts: an adapter
    updates only one of these kinds."""

    ups: list[list[AdaptedPart]]
    downs: list[list[AdaptedPart]]
    num_up_outputs: int
    num_down_outputs: int
    slots: ExpertSlots


class AdaptedLayers:
    """The layers of one model on this rank that adapters may update. Owns their slots."""

    def __init__(self, space: AdapterSpace, modules: frozenset[str], names: TensorNames, stored: TensorNames) -> None:
        """`space`, `modules`: see Adaptable. `names`: the model's tensor names; `stored`: the same names with the
        prefix that they have in the checkpoint."""
        self.space = space
        self.linears: list[AdaptedLinear] = []
        self.experts: list[AdaptedExperts] = []
        self._modules = modules
        self._roots: list[tuple[str, str]] = [
            (getattr(stored, field), getattr(names, field)) for field in ("embedding", "head", "layers")
        ]
        self._experts_block = names.experts

    def add(self, packed: PackedLinear, num_outputs: int, parts: Sequence[AdaptedPart]) -> None:
        """Add slots to a packed layer that consists of `parts`, if adapters may update one of them."""
        chosen = self._chosen(parts)
        if chosen:
            self.linears.append(AdaptedLinear(chosen, num_outputs, self.space.attach(packed, len(chosen))))

    def add_vocabulary(
        self, table: Tensor | PackedLinear, head: PackedLinear, config: ModelConfig, shard: range
    ) -> None:
        """Add slots to the embedding and the head if adapters may update them. shard: this rank's token ids, padded at
        the end. An update of one of the two does not change the other, even if they share a weight."""
        names, size = config.names, config.hidden_size
        weight = TensorSlice(f"{names.embedding}.weight", (config.vocab_size, size))
        embedding = self._chosen([AdaptedPart(names.embedding, weight, 0, range(size), shard)])
        if embedding:
            slots = self.space.attach_embedding(table, shard.start)
            self.linears.append(AdaptedLinear(embedding, size, slots))
        if not config.tie_word_embeddings:
            weight = TensorSlice(f"{names.head}.weight", weight.shape)
        ids = range(shard.start, min(shard.stop, config.vocab_size))
        self.add(head, len(shard), [AdaptedPart(names.head, weight, 0, ids, range(size), is_exact=True)])

    def add_experts(self, packed: PackedExperts, shard: ExpertsShard) -> None:
        """Add slots to a layer's experts if adapters may update them. shard: this rank's shard of the experts."""
        ups, downs = [], []
        for expert in range(shard.config.num_experts):
            up, down = _expert_parts(shard, expert)
            ups.append(self._chosen(up))
            downs.append(self._chosen(down))
        if any(ups) or any(downs):
            slots = self.space.attach_experts(packed, 2)
            self.experts.append(AdaptedExperts(ups, downs, 2 * len(shard.inner), shard.hidden_size, slots))

    def _chosen(self, parts: Sequence[AdaptedPart]) -> list[AdaptedPart]:
        """Return the parts that adapters may update, with their modules named as in `ipc.spec.adapters.targets`."""
        named = [replace(part, module=self._path(part.module)) for part in parts if len(part.outputs)]
        return [part for part in named if part.module in self._modules]

    def _path(self, module: str) -> str:
        stored, root = next(each for each in self._roots if f"{module}.".startswith(f"{each[0]}."))
        path = root + module.removeprefix(stored)
        if path in self._modules or self._experts_block in ("", "mlp"):
            return path
        return path.replace(".mlp.", f".{self._experts_block}.", 1)  # the block's name in files saved by transformers


def column_parts(
    projections: Sequence[tuple[TensorSlice, Sequence[range]]], row_order: Tensor | None
) -> Iterator[AdaptedPart]:
    """Yield the parts of a layer that packs shards of the outputs of several matrices. row_order: [out] int64, the
    index of the loaded row that becomes each output; None: the order is not changed."""
    owners, outputs = [], []
    for index, (_, shards) in enumerate(projections):
        rows = torch.cat([torch.arange(shard.start, shard.stop) for shard in shards])
        owners.append(torch.full((len(rows),), index))
        outputs.append(rows)
    owner, output = torch.cat(owners), torch.cat(outputs)
    if row_order is not None:
        owner, output = owner[row_order], output[row_order]
    for index, (weight, _) in enumerate(projections):
        places = torch.where(owner == index)[0]
        first = int(places[0])
        assert len(places) == int(places[-1]) - first + 1, "the outputs of a module are not consecutive"
        module = weight.name.removesuffix(".weight")
        yield AdaptedPart(module, weight, first, _run(output[places]), range(weight.shape[1]))


def whole_part(weight: TensorSlice, inputs: range | None = None, *, is_exact: bool = False) -> AdaptedPart:
    """Return the AdaptedPart of a layer that has all outputs of one matrix. inputs: this rank's inputs; None: all."""
    num_outputs, num_inputs = weight.shape
    inputs = range(num_inputs) if inputs is None else inputs
    module = weight.name.removesuffix(".weight")
    return AdaptedPart(module, weight, 0, range(num_outputs), inputs, is_exact=is_exact)


def _expert_parts(shard: ExpertsShard, expert: int) -> tuple[list[AdaptedPart], list[AdaptedPart]]:
    """Return the parts of an expert's two layers, both from modules of its own and from modules that hold all
    experts."""
    gate, up, down = shard.names.expert_matrices
    num_experts, size, hidden_size = shard.config.num_experts, shard.config.intermediate_size, shard.hidden_size
    inner = shard.inner
    gates = torch.arange(inner.start, inner.stop)
    alternating = torch.cat((2 * gates, 2 * gates + 1))
    both = alternating if shard.names.are_experts_interleaved else torch.cat((gates, size + gates))

    def part(name: str, shape: tuple[int, ...], first_output: int, outputs: Outputs, inputs: range) -> AdaptedPart:
        is_single = len(shape) == 2
        module = f"{shard.path}.{expert}.{name}" if is_single else f"{shard.path}.{name}"
        weight = TensorSlice(f"{module}.weight" if is_single else module, shape)
        return AdaptedPart(module, weight, first_output, outputs, inputs, None if is_single else expert)

    hidden, all_gates = range(hidden_size), (num_experts, 2 * size, hidden_size)
    if shard.config.activation.is_gated:
        ups = [
            part(gate, (size, hidden_size), 0, inner, hidden),
            part(up, (size, hidden_size), len(inner), inner, hidden),
            part("gate_up_proj", all_gates, 0, both, hidden),
        ]
    else:
        ups = [
            part(up, (size, hidden_size), 0, inner, hidden),
            part(up, (num_experts, size, hidden_size), 0, inner, hidden),
        ]
    downs = [
        part(down, (hidden_size, size), 0, hidden, inner),
        part("down_proj", (num_experts, hidden_size, size), 0, hidden, inner),
    ]
    return ups, downs


def _run(places: Tensor) -> Outputs:
    """Return `places`, as a range if they are consecutive."""
    first = int(places[0])
    run = range(first, first + len(places))
    return run if torch.equal(places, torch.arange(run.start, run.stop)) else places
