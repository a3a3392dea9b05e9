"""Blocks of a KV group of states: the state of all its layers after some token of a row, on one rank.

A block has, for each layer in order, the state of the scan and then the last inputs of the convolution:

    scan [num_heads, key_dim, value_dim] float32 | conv [num_inputs, num_channels] of the model's dtype | to 64 bytes
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ...kernels.contract import StateViews

ALIGNMENT = 64  # bytes of a cache line


@dataclass(frozen=True)
class StateShape:
    """What a layer keeps of a row on one rank: the scan's state, empty if key_dim is 0, and the convolution's last
    inputs."""

    num_heads: int
    key_dim: int
    value_dim: int
    num_inputs: int
    num_channels: int


@dataclass(frozen=True)
class StateSpec:
    """Shape of the blocks of a group of layers with a state, on one rank. `dtype`: the model's."""

    num_layers: int
    shape: StateShape
    dtype: torch.dtype

    @property
    def scan_bytes(self) -> int:
        return self.shape.num_heads * self.shape.key_dim * self.shape.value_dim * torch.float32.itemsize

    @property
    def layer_bytes(self) -> int:
        conv_bytes = self.shape.num_inputs * self.shape.num_channels * self.dtype.itemsize
        return -(-(self.scan_bytes + conv_bytes) // ALIGNMENT) * ALIGNMENT

    @property
    def block_bytes(self) -> int:
        return self.num_layers * self.layer_bytes

    def view(self, buffer: Tensor) -> StateViews:
        """Return as many blocks as there are in a buffer [num_bytes] of uint8, from its first byte on."""
        num_blocks, shape = len(buffer) // self.block_bytes, self.shape
        whole = buffer[: num_blocks * self.block_bytes]

        def views(dtype: torch.dtype, start: int, sizes: tuple[int, ...]) -> list[Tensor]:
            typed, strides = whole.view(dtype), [math.prod(sizes[axis + 1 :]) for axis in range(len(sizes))]
            block = self.block_bytes // dtype.itemsize
            starts = [(start + layer * self.layer_bytes) // dtype.itemsize for layer in range(self.num_layers)]
            first = typed.storage_offset()
            return [typed.as_strided((num_blocks, *sizes), (block, *strides), first + each) for each in starts]

        scan = views(torch.float32, 0, (shape.num_heads, shape.key_dim, shape.value_dim))
        return StateViews(scan, views(self.dtype, self.scan_bytes, (shape.num_inputs, shape.num_channels)))
