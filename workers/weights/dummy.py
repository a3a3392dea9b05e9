"""DummyCheckpoint: random weights of any shape, where no weight files are needed: to measure, and to try shapes.

A tensor's values depend on its name and the share of it alone, so that ranks that hold the same share hold the same.
"""

from __future__ import annotations

import zlib
from pathlib import Path

import torch
from torch import Tensor

from ...ipc.config.quantization_config import QuantizationConfig
from .checkpoint import Checkpoint, Piece

DEVIATION = 0.02  # of matrices, as models are initialized


class DummyCheckpoint(Checkpoint):
    """Holds every tensor that is asked for: norms of ones, biases of zeros, matrices of normal noise."""

    def __init__(
        self, folder: Path, dtype: torch.dtype, device: torch.device, quantization: QuantizationConfig | None = None
    ) -> None:
        super().__init__(folder, dtype, device, quantization, {})

    def _read(self, piece: Piece, target: Tensor) -> None:
        if target.device.type == "meta":
            return
        if len(piece.shape) == 1:
            target.fill_(0.0 if piece.name.endswith(".bias") else 1.0)
            return
        num_real = max(min(piece.range.stop, piece.shape[piece.axis]) - piece.range.start, 0)
        generator = torch.Generator(target.device)
        generator.manual_seed(zlib.crc32(f"{piece.name} {piece.axis} {piece.range}".encode()))
        target.normal_(0.0, DEVIATION, generator=generator)
        target.narrow(piece.axis, num_real, len(piece.range) - num_real).zero_()
