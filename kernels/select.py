"""Selection of the operations' implementation: plain torch, the C kernels or the Triton kernels.

Layers call an `Ops` and know neither device nor kernel; `select_ops` chooses once per process.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TypeAlias

import torch

from .batch_invariant import BatchInvariantOps
from .cpu.processor import levels_up_to as levels_up_to
from .reference import ReferenceOps

logger = logging.getLogger("tokenloom.kernels")

Ops: TypeAlias = ReferenceOps  # the other implementations are its subclasses


def select_ops(
    device: torch.device,
    dtype: torch.dtype,
    enforce_reference: bool = False,
    is_batch_invariant: bool = False,
    spare_folder: Path | None = None,
    cpu_isa: str = "auto",
    has_integer_products: bool = False,
) -> Ops:
    """Choose the implementation for models of `dtype` on `device` and log it, with a warning if it is plain torch;
    `enforce_reference` chooses plain torch and logs nothing.

    `spare_folder`: folder for compiled C kernels if the user's cache folder cannot be used; created on demand.
    `cpu_isa`: the highest instruction level of the C kernels.
    `has_integer_products`: the C kernels multiply int8 and int4 weights as integers. Raises ValueError if
    the C kernels are tried and the processor lacks `cpu_isa`.
    """
    plain = BatchInvariantOps() if is_batch_invariant else ReferenceOps()
    if enforce_reference:
        plain.kernels = f"{plain.kernels}: --enforce-reference"
        return plain
    ops = _fast_ops(device, dtype, is_batch_invariant, spare_folder, cpu_isa, has_integer_products)
    if isinstance(ops, str):
        plain.kernels = f"{plain.kernels}: {ops}"
        logger.warning("using plain torch, at half the speed of the kernels or less: %s", ops)
        return plain
    logger.info("using %s for %s on %s", ops.kernels, dtype, device)
    return ops


def _fast_ops(
    device: torch.device,
    dtype: torch.dtype,
    is_batch_invariant: bool,
    spare_folder: Path | None,
    cpu_isa: str,
    has_integer_products: bool,
) -> Ops | str:
    """Load the kernels for `device`, or return the reason why there are none. Raises ValueError if the processor lacks
    `cpu_isa`."""
    if device.type == "cuda":
        from .gpu.load import load_gpu_ops

        return load_gpu_ops(device, is_batch_invariant)
    from .cpu.compiler import Unavailable
    from .cpu.cpu_ops import load_cpu_ops

    try:
        return load_cpu_ops(dtype, is_batch_invariant, spare_folder, cpu_isa, has_integer_products)
    except Unavailable as error:
        return str(error)
