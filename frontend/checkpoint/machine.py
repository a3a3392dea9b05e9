"""Machine: the memory that a model could have here, and what of it a model needs. A rule of thumb before a start.

An engine measures for itself; see workers/machine/memory.py.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from typing import NamedTuple

from ...ipc.errors import ConfigError
from ...ipc.process.machine_memory import available_bytes, gib
from ...ipc.spec.config.engine_config import EngineConfig
from .memory_check import ENGINE_BYTES as ENGINE_BYTES
from .memory_check import NUM_TOKENS as NUM_TOKENS
from .resolve import device_of

GPU_RESERVE_BYTES = 1 << 30  # of a GPU, for activations, kernels and the allocator
QUERY = ("nvidia-smi", "--query-gpu=memory.total,memory.free", "--format=csv,noheader,nounits")
QUERY_TIMEOUT_S = 10.0


class Need(NamedTuple):
    """Memory that a model takes with the options `options` ("": the defaults): weights and a least KV cache."""

    options: str
    num_bytes: int
    num_heads: int = 0  # 0: unknown; a divisor of it may share the model


class Gpu(NamedTuple):
    total_bytes: int
    free_bytes: int

    @property
    def usable_bytes(self) -> int:
        """Bytes for weights and KV cache at the default --gpu-memory-utilization."""
        share = int(self.total_bytes * EngineConfig().gpu_memory_utilization)
        return max(share - (self.total_bytes - self.free_bytes) - GPU_RESERVE_BYTES, 0)


class Fit(NamedTuple):
    """Whether a model fits: with `options`, in `usable_bytes` of memory."""

    is_fit: bool
    options: str
    num_bytes: int
    usable_bytes: int

    def __str__(self) -> str:
        numbers = f"{gib(self.num_bytes)} of {gib(self.usable_bytes)}"
        if not self.is_fit:
            return f"no, {numbers}"
        return f"with {self.options}, {numbers}" if self.options else f"yes, {numbers}"


class Machine(NamedTuple):
    """The memory of this machine. `gpus` is empty if an engine would run on the CPU."""

    cpu_bytes: int
    gpus: Sequence[Gpu] = ()

    def fit(self, needs: Sequence[Need]) -> Fit:
        """Return how a model fits: by the first of its `needs` that does, else shared by several GPUs, else not at all.
        The options of all needs but the first are for a CPU."""
        if not self.gpus:
            usable = max(self.cpu_bytes - ENGINE_BYTES, 0)
            fitting = next((need for need in needs if need.num_bytes <= usable), None)
            need = fitting or needs[0]
            return Fit(fitting is not None, need.options, need.num_bytes, usable)
        need, usable = needs[0], min(gpu.usable_bytes for gpu in self.gpus)
        for size in range(1, len(self.gpus) + 1):
            if need.num_bytes <= usable * size and (size == 1 or (need.num_heads and need.num_heads % size == 0)):
                return Fit(True, "" if size == 1 else f"--tp {size}", need.num_bytes, usable * size)
        return Fit(False, "", need.num_bytes, usable * len(self.gpus))

    def __str__(self) -> str:
        if not self.gpus:
            return f"this machine: {gib(self.cpu_bytes)} of memory can be had, no GPU"
        free = ", ".join(gib(gpu.free_bytes) for gpu in self.gpus)
        return f"this machine: {len(self.gpus)} GPU{'s' * (len(self.gpus) > 1)} with {free} free"


def this_machine() -> Machine:
    """Return the memory of this machine. ConfigError if there is a GPU whose memory cannot be asked for."""
    is_gpu = device_of(EngineConfig()) == "cuda"
    return Machine(available_bytes(), visible_gpus() if is_gpu else ())


def visible_gpus() -> list[Gpu]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES leaves to this process, by NVIDIA's command."""
    command = shutil.which(QUERY[0])
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None and not chosen.strip():
        return []
    if command is None:
        raise ConfigError("there is a GPU here, but nvidia-smi is not on the PATH, which tells its memory")
    only = [] if chosen is None else [f"--id={chosen}"]
    try:
        done = subprocess.run(
            [command, *QUERY[1:], *only], capture_output=True, encoding="utf-8", timeout=QUERY_TIMEOUT_S, check=True
        )
        rows = [line.split(",") for line in done.stdout.splitlines() if line.strip()]
        return [Gpu(int(total) << 20, int(free) << 20) for total, free in rows]
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise ConfigError(f"nvidia-smi does not tell the memory of the GPUs: {error}") from None
