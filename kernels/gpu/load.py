"""Loading of the Triton kernels for a GPU, or the reason why they cannot be used."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from .ops import TritonOps

MIN_CAPABILITY = (8, 0)  # the first with bfloat16 products and asynchronous copies


def load_gpu_ops(device: torch.device, is_batch_invariant: bool = False) -> TritonOps | str:
    """Return the Triton operations for `device`, or the reason why there are none: an old device, or no Triton."""
    capability = torch.cuda.get_device_capability(device)
    if capability < MIN_CAPABILITY:
        return f"{device} has compute capability {capability[0]}.{capability[1]}, the kernels need 8.0"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed: pip install triton"
    from .batch_invariant import BatchInvariantTritonOps
    from .ops import TritonOps

    kind = BatchInvariantTritonOps if is_batch_invariant else TritonOps
    return kind(10 * capability[0] + capability[1])


def launch_obstacle() -> str | None:
    """Return the reason why Triton cannot launch kernels, or None. To find out, it compiles the C module of Triton's
    driver."""
    from triton import knobs
    from triton.runtime import driver

    if knobs.runtime.interpret:
        return None
    try:
        _ = driver.active.utils
    except Exception as error:  # a missing compiler, header or folder raises various types
        return f"{type(error).__name__}: {error}"
    return None
