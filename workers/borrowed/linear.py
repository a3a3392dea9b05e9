"""PackedLayer: a linear layer of a borrowed model that multiplies with our kernels."""

from __future__ import annotations

import inspect

import torch
from torch import Tensor, nn

from ...kernels.select import Ops


class PackedLayer(nn.Module):
    """Block x [..., in] → [..., out]. `weight` and `bias` have shape and dtype but no data, for code that asks."""

    def __init__(self, ops: Ops, linear: nn.Linear) -> None:
        super().__init__()
        self._ops = ops
        self._packed = ops.pack_linear(linear.weight.detach(), None if linear.bias is None else linear.bias.detach())
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.num_bytes = self._packed.nbytes
        self.weight = nn.Parameter(torch.empty_like(linear.weight, device="meta"), requires_grad=False)
        self.bias = None
        if linear.bias is not None:
            self.bias = nn.Parameter(torch.empty_like(linear.bias, device="meta"), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, self.in_features)
        return self._ops.linear(flat, self._packed).view(*x.shape[:-1], self.out_features)


def pack_layers(model: nn.Module, ops: Ops) -> None:
    """Replace each plain nn.Linear of `model` by a PackedLayer, one by one, so that memory holds one weight twice. A
    module whose code reads the weight of a layer keeps that layer as it is."""
    replaced: dict[nn.Module, PackedLayer] = {}
    sources: dict[str, str] = {}
    for module in list(model.modules()):
        kind = str(type(module))
        if kind not in sources:
            sources[kind] = _source(type(module))
        for name, child in module.named_children():
            if type(child) is nn.Linear and f"self.{name}.weight" not in sources[kind]:
                if child not in replaced:
                    replaced[child] = PackedLayer(ops, child)
                setattr(module, name, replaced[child])


def _source(kind: type[nn.Module]) -> str:
    """Return the source of a class and of those that it inherits from, except torch's."""
    kinds = [each for each in kind.__mro__ if issubclass(each, nn.Module) and not each.__module__.startswith("torch.")]
    return "".join(inspect.getsource(each) for each in kinds)
