"""FrameConvolutions: an encoder's convolutions over a window of frames, for any range of their outputs.

Each convolution pads the window with zeros at both ends. A range is computed with the inputs that it needs on each
side, so that its numbers do not depend on how the window is cut into ranges, except for rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from ....kernels.select import Ops
from ...borrowed.linear import PackedModule

REACH = 1  # inputs that an output needs on each side of the one in its middle


class FrameConvolutions:
    """The convolutions `names` of a module, one after the other, each with GELU. Their last axis is time; if there are
    two axes, the first is that of mel bins."""

    def __init__(self, owner: nn.Module, names: Sequence[str], num_frames: int) -> None:
        """num_frames: frames of a window. Sets the padding in time of the owner's convolutions to 0, because `outputs`
        pads instead."""
        self._owner, self._names, self._lengths = owner, names, [num_frames]
        self._spans_bins = len(getattr(owner, names[0]).kernel_size) == 2
        for name in names:
            layer = getattr(owner, name)
            assert layer.kernel_size[-1] == 1 + 2 * REACH, "kernels of encoders have three frames"
            layer.padding = (*layer.padding[:-1], 0)  # `_outputs` pads
            self._lengths.append((self._lengths[-1] - 1) // layer.stride[-1] + 1)

    def outputs(self, frames: Callable[[int, int], Tensor], first: int, last: int) -> Tensor:
        """Return the outputs [first, last) of the last convolution: [n, channels, …, last − first]. frames: function
        that returns a range of the frames of n windows, [n, mel bins, frames]."""
        return self._outputs(len(self._names), frames, first, last)

    def _outputs(self, depth: int, frames: Callable[[int, int], Tensor], first: int, last: int) -> Tensor:
        if not depth:
            found = frames(first, last).to(getattr(self._owner, self._names[0]).weight.dtype)
            return found.unsqueeze(1) if self._spans_bins else found
        layer, length = getattr(self._owner, self._names[depth - 1]), self._lengths[depth - 1]
        low, high = layer.stride[-1] * first - REACH, layer.stride[-1] * (last - 1) + REACH + 1
        inputs = self._outputs(depth - 1, frames, max(low, 0), min(high, length))
        inputs = nn.functional.pad(inputs, (max(-low, 0), max(high - length, 0)))
        return nn.functional.gelu(layer(inputs))


class PackedConvolution(PackedModule):
    """Convolution, [n, channels, *sizes] → [n, channels, *counts], as one matrix product. It is fast if channels are
    the innermost axis in memory, as they are in its results."""

    def __init__(self, ops: Ops, convolution: nn.Conv1d | nn.Conv2d) -> None:
        super().__init__()
        self._ops = ops
        self.kernel_size, self.stride = convolution.kernel_size, convolution.stride
        self.padding = tuple(int(each) for each in convolution.padding)
        bias = None if convolution.bias is None else convolution.bias.detach()
        self._packed = ops.pack_linear(convolution.weight.detach().movedim(1, -1).flatten(1), bias)
        self.num_bytes = self._packed.nbytes
        nothing = convolution.weight.new_zeros(()).expand(convolution.weight.shape)
        self.weight = nn.Parameter(nothing, requires_grad=False)  # for code that reads its shape, dtype or device

    def forward(self, x: Tensor) -> Tensor:
        num_axes = len(self.kernel_size)
        x = nn.functional.pad(x, [each for size in reversed(self.padding) for each in (size, size)])
        for axis, (size, stride) in enumerate(zip(self.kernel_size, self.stride, strict=True)):
            x = x.unfold(2 + axis, size, stride)
        rows = x.movedim(1, -1).flatten(1 + num_axes)  # [n, *counts, sizes and channels]
        found = self._ops.linear(rows.flatten(0, -2), self._packed)
        return found.view(*rows.shape[:-1], -1).movedim(-1, 1)


def pack_convolutions(model: nn.Module, ops: Ops, dtype: torch.dtype) -> None:
    """Replace each plain convolution of `dtype` by a PackedConvolution."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.Conv1d | nn.Conv2d) and child.weight.dtype == dtype and _is_plain(child):
                setattr(module, name, PackedConvolution(ops, child))


def _is_plain(convolution: nn.Conv1d | nn.Conv2d) -> bool:
    has_zeros = convolution.padding_mode == "zeros" and not isinstance(convolution.padding, str)
    return has_zeros and convolution.groups == 1 and set(convolution.dilation) == {1}
