"""DummyCheckpoint: random weights of any shape without weight files, for measurements.

A tensor's values depend only on its name, shard, dtype and kind of device, so that ranks with the same shard have equal
values.
"""

from __future__ import annotations

import zlib

import torch
from torch import Tensor

from .checkpoint import Checkpoint, TensorSlice

DEVIATION = 0.02  # standard deviation of matrices, a common value in the initialization of models


class DummyCheckpoint(Checkpoint):
    """Checkpoint that generates each tensor that is read, as floats: a vector is all ones, or zeros if its name ends in
    .bias; any other tensor is normal noise, with zeros in the padding."""

    def _read(self, wanted: TensorSlice, target: Tensor) -> None:
        if target.device.type == "meta":
            return
        if len(wanted.shape) == 1:
            target.fill_(0.0 if wanted.name.endswith(".bias") else 1.0)
            return
        num_real = max(min(wanted.range.stop, wanted.shape[wanted.axis]) - wanted.range.start, 0)
        generator = torch.Generator(target.device)
        generator.manual_seed(zlib.crc32(f"{wanted.name} {wanted.axis} {wanted.range}".encode()))
        target.normal_(0.0, DEVIATION, generator=generator)
        target.narrow(wanted.axis, num_real, len(wanted.range) - num_real).zero_()
