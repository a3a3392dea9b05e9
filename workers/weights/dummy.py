"""DummyCheckpoint: random weights of any shape without weight files, for measurements.

A tensor's values depend only on its name and shard, so that ranks with the same shard have equal values.
"""

from __future__ import annotations

import zlib
from pathlib import Path

import torch
from torch import Tensor

from ...ipc.config.quantization_config import QuantizationConfig
from .checkpoint import Checkpoint, TensorSlice

DEVIATION = 0.02  # of matrices, as models are initialized


class DummyCheckpoint(Checkpoint):
    """Holds every tensor: norms of ones, biases of zeros, matrices of normal noise."""

    def __init__(
        self, folder: Path, dtype: torch.dtype, device: torch.device, quantization: QuantizationConfig | None = None
    ) -> None:
        super().__init__(folder, dtype, device, quantization, {})

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
