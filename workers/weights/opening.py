"""Opening of the checkpoint in a folder, of whichever kind its files are."""

from __future__ import annotations

from pathlib import Path

import torch

from ...ipc.spec.config.gguf_index import GGUF_INDEX_NAME
from ...ipc.spec.models.quantization_config import QuantizationConfig
from .checkpoint import Checkpoint
from .dummy import DummyCheckpoint
from .gguf_checkpoint import GgufCheckpoint


def open_checkpoint(
    folder: Path,
    dtype: torch.dtype,
    device: torch.device,
    quantization: QuantizationConfig | None,
    *,
    is_dummy: bool = False,
) -> Checkpoint:
    """Open the safetensors files in `folder`, or GGUF files if there is an index of them. `is_dummy`: random weights,
    and nothing is read."""
    if is_dummy:
        return DummyCheckpoint(folder, dtype, device, quantization, {})
    kind = GgufCheckpoint if (folder / GGUF_INDEX_NAME).exists() else Checkpoint
    return kind(folder, dtype, device, quantization)
