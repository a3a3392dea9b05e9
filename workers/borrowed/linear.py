"""PackedLayer: a linear layer of a borrowed model that multiplies with our kernels; it may serve as embedding as well.

PackedModule is the base of all parts that hold packed weights, which torch does not count as parameters.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from ...kernels.select import Ops
from .shards import ShardedLinear


class PackedModule(nn.Module):
    """A part of a model that holds packed weights."""

    num_bytes = 0  # bytes of its packed weights, without those of its children


class PackedLayer(PackedModule):
    """Linear layer, x [..., in] → [..., out]. `weight` and `bias` are on the meta device: shape and dtype without data,
    for code that reads these."""

    is_head = False  # whether outputs are logits, in float32

    def __init__(self, ops: Ops, linear: nn.Linear) -> None:
        super().__init__()
        self._ops = ops
        self.split = linear.split if isinstance(linear, ShardedLinear) else None
        self.packed = ops.pack_linear(linear.weight.detach(), None if linear.bias is None else linear.bias.detach())
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.num_bytes = self.packed.nbytes
        self.weight = nn.Parameter(torch.empty_like(linear.weight, device="meta"), requires_grad=False)
        self.bias = None
        if linear.bias is not None:
            self.bias = nn.Parameter(torch.empty_like(linear.bias, device="meta"), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        multiply = self._ops.logits if self.is_head else self._ops.linear
        if self.split is None:
            flat = x.reshape(-1, self.in_features).to(self.weight.dtype)
            return multiply(flat, self.packed).view(*x.shape[:-1], self.out_features)
        flat = self.split.enter(x).reshape(-1, self.in_features).to(self.weight.dtype)
        return self.split.leave(multiply(flat, self.packed)).view(*x.shape[:-1], -1)


class TiedEmbedding(nn.Module):
    """An embedding that shares the matrix of a PackedLayer: ids [...] → [..., out]. It holds no matrix of its own."""

    def __init__(self, ops: Ops, layer: PackedLayer) -> None:
        super().__init__()
        self._ops, self._layer = ops, layer
        self.weight = layer.weight

    def forward(self, token_ids: Tensor) -> Tensor:
        split, packed = self._layer.split, self._layer.packed
        if split is None:
            embedded = self._ops.embedding(token_ids.flatten(), packed, 0)
        else:  # each token id is in the part of one rank
            first_id = split.group.rank * self._layer.out_features
            embedded = split.group.all_reduce(self._ops.embedding(token_ids.flatten(), packed, first_id))
        return embedded.view(*token_ids.shape, self._layer.in_features)


def is_packable(module: nn.Module, dtype: torch.dtype) -> bool:
    """Return whether `module` is a linear layer of `dtype` without code of its own."""
    return type(module) in (nn.Linear, ShardedLinear) and module.weight.dtype == dtype


def is_joinable(module: nn.Module, dtype: torch.dtype) -> bool:
    """Return whether `module` is packable and, if it is sharded, needs no other rank's elements (see
    Split.is_local)."""
    return is_packable(module, dtype) and (not isinstance(module, ShardedLinear) or module.split.is_local)


def joined(module: nn.Module, names: Sequence[str]) -> tuple[Tensor, Tensor | None]:
    """Return the concatenated weights [sum of out, in] and biases of linear layers of `module` that have the same
    input; the bias is None if no layer has one."""
    linears = [cast(nn.Linear, getattr(module, name)) for name in names]
    weight = torch.cat([each.weight.detach() for each in linears])
    if all(each.bias is None for each in linears):
        return weight, None
    biases = [each.weight.new_zeros(each.out_features) if each.bias is None else each.bias for each in linears]
    return weight, torch.cat([each.detach() for each in biases])


def take_over(module: nn.Module, packed: PackedModule, names: Sequence[str]) -> None:
    """Make `module` compute by `packed`, and remove its parts `names`, which `packed` replaces."""
    for name in names:
        delattr(module, name)
    module.packed = packed
    module.forward = packed.forward


def pack_layers(model: nn.Module, ops: Ops, dtype: torch.dtype) -> None:
    """Replace each plain nn.Linear of `dtype` by a PackedLayer, one at a time, so that at most one weight is in memory
    twice. Embeddings tied to such a layer without a bias use its packed weight. A layer stays as it is if the code of
    its parent module reads its weight."""
    places: dict[int, list[tuple[nn.Module, str]]] = {}  # by id() of the layer, which must not be kept alive here
    sources: dict[str, str] = {}
    for module in [each for each in model.modules() if not isinstance(each, nn.Linear)]:
        kind = str(type(module))
        if kind not in sources:
            sources[kind] = _source(type(module))
        for name, child in module.named_children():
            is_read = f"self.{name}.weight" in sources[kind]
            if is_packable(child, dtype) and not is_read:
                places.setdefault(id(child), []).append((module, name))
    for holders in places.values():
        linear = getattr(*holders[0])
        packed = PackedLayer(ops, linear)
        for module, name in holders:
            setattr(module, name, packed)
        if linear.bias is None:
            whole = linear.whole if isinstance(linear, ShardedLinear) else linear.weight
            _tie_embeddings(model, ops, whole, packed)
        del linear


def _tie_embeddings(model: nn.Module, ops: Ops, weight: Tensor | None, packed: PackedLayer) -> None:
    """Replace each plain embedding that has the matrix `weight` by one that looks up rows of the packed layer."""
    for module in [each for each in model.modules() if not isinstance(each, nn.Embedding)]:
        for name, child in module.named_children():
            if type(child) is nn.Embedding and child.weight is weight:
                setattr(module, name, TiedEmbedding(ops, packed))


def _source(kind: type[nn.Module]) -> str:
    """Return the source of a module's class and of its base classes, except torch's."""
    kinds = [each for each in kind.__mro__ if issubclass(each, nn.Module) and not each.__module__.startswith("torch.")]
    return "".join(inspect.getsource(each) for each in kinds)
