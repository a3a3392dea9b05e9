"""PackedNorm: an RMS norm of a borrowed model as one of our operations, instead of seven of torch.

Classes of such norms differ in name and in whether 1 is added to the weight, so a module is recognized by the numbers
that it computes.
"""

from __future__ import annotations

import copy
import inspect

import torch
from torch import Tensor, nn

from ...kernels.contract import Norm
from ...kernels.reference import ReferenceOps
from ...kernels.select import Ops

EPS_NAMES = ("variance_epsilon", "eps", "epsilon", "norm_eps")
TOLERANCE = 1e-5


class PackedNorm(nn.Module):
    """RMS norm over the last axis of x [..., n]. `weight` is the replaced module's, for code that reads it."""

    def __init__(self, ops: Ops, weight: nn.Parameter, norm: Norm) -> None:
        super().__init__()
        self.weight = weight
        self._ops = ops
        self._norm = norm

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype != self.weight.dtype:  # kernels take the model's dtype only
            return ReferenceOps.norm(self._ops, x, self._norm)
        return self._ops.norm(x.reshape(-1, x.shape[-1]), self._norm).view(x.shape)


def pack_norms(model: nn.Module, ops: Ops, dtype: torch.dtype) -> None:
    """Replace each module of `dtype` that turns out to be an RMS norm by a PackedNorm."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            norm = rms_norm_of(child)
            weight = getattr(child, "weight", None)
            if norm is not None and isinstance(weight, nn.Parameter) and weight.dtype == dtype:
                setattr(module, name, PackedNorm(ops, weight, norm))


def rms_norm_of(module: nn.Module) -> Norm | None:
    """Return the RMS norm that the module computes; None if it is not called a norm, has more than one weight vector
    and one input, or its results for random weights and inputs are not those of an RMS norm."""
    weight = getattr(module, "weight", None)
    eps = next((getattr(module, name) for name in EPS_NAMES if hasattr(module, name)), None)
    has_only_weight = len(list(module.parameters())) == 1 and not list(module.buffers()) and not list(module.children())
    if "Norm" not in type(module).__name__ or not isinstance(weight, nn.Parameter) or not has_only_weight:
        return None
    if len(inspect.signature(module.forward).parameters) > 1:  # such as a gate
        return None
    if weight.dim() != 1 or not isinstance(eps, float):
        return None
    tried = copy.deepcopy(module).float()
    draw = torch.Generator().manual_seed(len(weight))
    x, drawn = (torch.randn(size, generator=draw).to(weight.device) for size in ((3, len(weight)), (len(weight),)))
    tried.weight = nn.Parameter(drawn, requires_grad=False)
    with torch.inference_mode():
        try:
            found = tried(x)
        except (TypeError, RuntimeError):  # a norm that needs more inputs
            return None
    for offset in (0.0, 1.0):
        expected = nn.functional.rms_norm(x, weight.shape, drawn + offset, eps)
        if isinstance(found, Tensor) and torch.allclose(found, expected, rtol=TOLERANCE, atol=TOLERANCE):
            return Norm("rms", weight.detach().float() + offset, None, eps)
    return None
