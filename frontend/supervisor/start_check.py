"""Checks before a process is started that the device exists and that the weights are whole and fit in memory."""

from __future__ import annotations

import os
from pathlib import Path

from ...ipc.config.model_config import ModelConfig
from ...ipc.config.weight_files import stored_tensors
from ...ipc.errors import ConfigError
from ...ipc.process.machine_memory import available_bytes, gib, swap_bytes

GPU_NODES = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")  # NVIDIA's driver, WSL, AMD's driver
_FLOATS = ("F64", "F32", "F16", "BF16")
_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def check_gpu() -> None:
    """Raise ConfigError if no device node of a GPU exists. A node does not prove that the driver works."""
    if not any(map(os.path.exists, GPU_NODES)):
        raise ConfigError(
            "--device cuda: there is no GPU here (none of " + ", ".join(GPU_NODES) + "): check the driver and, in a "
            "container, which devices it is given, or give --device cpu"
        )


def check_weights(folder: Path, model: ModelConfig, dtype: str, device: str) -> None:
    """Raise ConfigError if a weight file is missing, truncated or unreadable, or if the weights of a CPU model need
    more than the free memory and swap of this machine."""
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
