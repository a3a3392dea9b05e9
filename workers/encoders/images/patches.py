"""PackedPatches: the convolution that embeds patches, as a matrix product.

Patches do not overlap, so each is a row of the product. Its bits do not depend on the other patches.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ....kernels.select import Ops
from ...borrowed.linear import PackedModule


class PackedPatches(PackedModule):
    """Convolution whose stride equals its kernel size, [n, channels, *sizes] → [n, hidden, *counts].

    `weight` is one element expanded to the convolution's shape, for code that reads its shape, dtype or device.
    """

    def __init__(self, ops: Ops, convolution: nn.Conv2d | nn.Conv3d) -> None:
        super().__init__()
        self._ops, self._sizes = ops, convolution.kernel_size
        bias = None if convolution.bias is None else convolution.bias.detach()
        self._packed = ops.pack_linear(convolution.weight.detach().flatten(1), bias)
        self.num_bytes = self._packed.nbytes
        nothing = convolution.weight.new_zeros(()).expand(convolution.weight.shape)
        self.weight = nn.Parameter(nothing, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        num_axes = len(self._sizes)
        counts = [whole // size for whole, size in zip(x.shape[2:], self._sizes, strict=True)]
        pairs = list(zip(counts, self._sizes, strict=True))
        for axis, (count, size) in enumerate(pairs):
            x = x.narrow(2 + axis, 0, count * size)
        x = x.reshape(*x.shape[:2], *(number for pair in pairs for number in pair))
        places = [2 + 2 * axis for axis in range(num_axes)]
        rows = x.permute(0, *places, 1, *(place + 1 for place in places)).flatten(1 + num_axes)
        found = self._ops.linear(rows.flatten(0, -2), self._packed).view(*rows.shape[:-1], -1)
        return found.movedim(-1, 1)


def pack_patches(model: nn.Module, ops: Ops, dtype: torch.dtype) -> None:
    """Replace each convolution that embeds patches in `dtype` by PackedPatches."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.Conv2d | nn.Conv3d) and _is_of_patches(child, dtype):
                setattr(module, name, PackedPatches(ops, child))


def _is_of_patches(convolution: nn.Conv2d | nn.Conv3d, dtype: torch.dtype) -> bool:
    sizes = convolution.kernel_size
    is_plain = convolution.groups == 1 and set(convolution.dilation) == {1}
    has_padding = convolution.padding != "valid" and set(convolution.padding) != {0}
    return is_plain and not has_padding and convolution.stride == sizes and convolution.weight.dtype == dtype
