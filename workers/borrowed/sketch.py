"""Sketches: copies of modules in which each linear layer is a cheap random map that records its last call.

Classes of transformers differ in names and layout but agree in their computations. So a module is recognized by the
numbers that it computes: its sketch runs on random inputs, and the numbers between its linear layers are compared with
those of our operations.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

RANK = 4  # of the random maps
SCALES = (1.0, 1e3)  # scales of the random inputs; large inputs reveal whether a module clips numbers
TOLERANCE = 1e-5  # relative to the largest number
MAX_PARAMETERS = 1 << 17  # of a child that is not a linear layer, such as a norm


class LinearSketch(nn.Module):
    """Random linear map of low rank, [..., in] → [..., out], with a bias if `linear` has one. Records its last call."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self._inner = torch.randn(linear.in_features, RANK) * linear.in_features**-0.5
        self._outer = torch.randn(RANK, linear.out_features) * RANK**-0.5
        self._offset = torch.zeros(()) if linear.bias is None else torch.randn(linear.out_features)
        self.given: Tensor | None = None  # given and returned are copies: a module may change its tensors in place
        self.returned = torch.empty(0)

    def forward(self, x: Tensor) -> Tensor:
        self.given = x.clone()
        self.returned = x @ self._inner @ self._outer + self._offset
        return self.returned.clone()


def sketch(module: nn.Module) -> tuple[nn.Module, dict[str, LinearSketch]]:
    """Return a float32 copy of `module` on the host, with random weights, and the sketches of its linear layers by
    name.

    ValueError if another child has more than MAX_PARAMETERS parameters.
    """
    children = dict(module.named_children())
    linears = {name: LinearSketch(child) for name, child in children.items() if isinstance(child, nn.Linear)}
    others = {name: randomized(child) for name, child in children.items() if name not in linears}
    twin = copy.copy(module)
    twin.__dict__.pop("forward", None)
    twin.__dict__["_modules"] = {**dict.fromkeys(module._modules), **others, **linears}
    return twin, linears


def is_close(actual: Tensor, expected: Tensor) -> bool:
    if actual.shape != expected.shape:
        return False
    bound = TOLERANCE * float(expected.abs().max())
    return torch.allclose(actual, expected, rtol=TOLERANCE, atol=bound)


def randomized(module: nn.Module) -> nn.Module:
    if sum(each.numel() for each in module.parameters()) > MAX_PARAMETERS:
        raise ValueError(f"{type(module).__name__} is too large")
    copied = copy.deepcopy(module).float().cpu()
    for parameter in copied.parameters():
        parameter.data = torch.randn(parameter.shape)
    return copied
