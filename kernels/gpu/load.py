"""Loading of the Triton kernels for a GPU, and the reason if it is not possible."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from .ops import TritonOps

MIN_CAPABILITY = (8, 0)  # bfloat16 products and asynchronous copies


def gpu_obstacle(device: torch.device) -> str:
    """Explain why the Triton kernels do not support `device`; "" if they do."""
    capability = torch.cuda.get_device_capability(device)
    if capability < MIN_CAPABILITY:
        return f"{device} has compute capability {capability[0]}.{capability[1]}, the kernels need 8.0"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed: pip install triton"
    return ""


def load_gpu_ops(device: torch.device, is_batch_invariant: bool = False) -> TritonOps | None:
    """Create the Triton operations for `device`; None if they do not support it."""
    if gpu_obstacle(device):
        return None
    capability = torch.cuda.get_device_capability(device)
    architecture = 10 * capability[0] + capability[1]
    if is_batch_invariant:
        from .batch_invariant import BatchInvariantTritonOps

        return BatchInvariantTritonOps(architecture)
    from .ops import TritonOps

    return TritonOps(architecture)


def launch_obstacle() -> str | None:
    """Explain why Triton cannot launch here, else None: its driver compiles a C module at first use."""
    from triton import knobs
    from triton.runtime import driver

    if knobs.runtime.interpret:
        return None
    try:
        _ = driver.active.utils
    except Exception as error:  # a missing compiler, header or folder raises various types
        return f"{type(error).__name__}: {error}"
    return None
