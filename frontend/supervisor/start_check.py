"""What makes a start hopeless and can be known before a process is started: no device, no room for the weights."""

from __future__ import annotations

import os
from pathlib import Path

from ...ipc.config.model_config import ModelConfig
from ...ipc.config.weight_files import stored_tensors
from ...ipc.errors import ConfigError
from ...ipc.process.machine_memory import available_bytes, gib, swap_bytes

GPU_NODES = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")  # of NVIDIA's driver, of WSL, of AMD's
_FLOATS = ("F64", "F32", "F16", "BF16")
_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def check_gpu() -> None:
    """ConfigError where no GPU can be reached; where there is one, its driver has the last word."""
    if not any(map(os.path.exists, GPU_NODES)):
        raise ConfigError(
            "--device cuda: there is no GPU here (none of " + ", ".join(GPU_NODES) + "): check the driver and, in a "
            "container, which devices it is given, or give --device cpu"
        )


def check_weights(folder: Path, model: ModelConfig, dtype: str, device: str) -> None:
    """ConfigError for weight files that are missing, not whole or unreadable, and for weights that the memory of this
    machine cannot hold by far."""
    tensors = stored_tensors(folder)
    if device != "cpu":
        return
    if model.tie_word_embeddings:
        tensors.pop("lm_head.weight", None)
    num_bytes = sum(
        each.num_elements * _ITEM_BYTES[dtype] if each.dtype in _FLOATS else each.num_bytes for each in tensors.values()
    )
    free_bytes = available_bytes() + swap_bytes()
    if num_bytes > free_bytes:
        raise ConfigError(
            f"the weights in {folder} take {gib(num_bytes)} as {dtype}, {gib(free_bytes)} of memory can be had here: "
            "free memory, raise the limit of its cgroup, or choose a smaller model"
        )
