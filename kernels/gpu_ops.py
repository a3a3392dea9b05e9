"""Whether this GPU gets the Triton kernels: the choice, a line in the log when it does not, and what is in the way."""

from __future__ import annotations

import importlib.util
import logging
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from .triton_ops import TritonOps

logger = logging.getLogger("tokenloom.kernels")

MIN_CAPABILITY = (8, 0)  # bfloat16 products and asynchronous copies


def load_gpu_ops(device: torch.device, is_deterministic: bool = False) -> TritonOps | None:
    """The Triton kernels for `device`; None where they cannot run."""
    capability = torch.cuda.get_device_capability(device)
    if capability < MIN_CAPABILITY:
        logger.warning("%s has compute capability %d.%d, the kernels need 8.0: plain torch", device, *capability)
        return None
    if importlib.util.find_spec("triton") is None:
        logger.warning("triton is not installed: plain torch. `pip install triton` for the kernels")
        return None
    architecture = 10 * capability[0] + capability[1]
    if is_deterministic:
        from .triton_deterministic import DeterministicTritonOps

        return DeterministicTritonOps(architecture)
    from .triton_ops import TritonOps

    return TritonOps(architecture)


def launch_obstacle() -> str | None:
    """What keeps Triton from launching anything here: it has a C compiler make a module when it begins."""
    from triton import knobs
    from triton.runtime import driver

    if knobs.runtime.interpret:
        return None
    try:
        _ = driver.active.utils
    except Exception as error:  # whatever the compiler's ways to fail are
        return f"{type(error).__name__}: {error}"
    return None
