"""Find torch's fastest form of a linear layer's matmul, from which limits are computed.

Forms: torch's own and oneDNN's with the weight packed for the number of rows, in the requested dtype and in float32;
processors without bfloat16 instructions multiply far faster in float32.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch

MIN_REPEATS, MIN_SECONDS = 5, 0.2  # of each measurement: small models need many repeats on a shared machine


def fastest_linear(
    shape: tuple[int, int], num_rows: int, dtype: torch.dtype, device: torch.device
) -> Callable[[], object]:
    """Time each form of a linear with a weight of `shape` (out, in) on `num_rows` rows; return the fastest's call."""
    forms: list[Callable[[], object]] = []
    for form_dtype in {dtype, torch.float32} if device.type == "cpu" else {dtype}:
        x = torch.randn(num_rows, shape[1], device=device).to(form_dtype)
        weight = torch.randn(shape, device=device).to(form_dtype)
        forms.append(partial(torch.nn.functional.linear, x, weight))
        if device.type == "cpu" and torch.backends.mkldnn.is_available():
            try:
                packed = torch.ops.mkldnn._reorder_linear_weight(weight, num_rows)
                packed_form = partial(torch.ops.mkldnn._linear_pointwise, x, packed, None, "none", [], "")
                packed_form()
                forms.append(packed_form)
            except (RuntimeError, AttributeError):  # this torch has no packed linears for the dtype
                pass
    return min(forms, key=lambda form: shortest(form, device, min_repeats=1))  # some forms take seconds a call


def shortest(function: Callable[[], object], device: torch.device, min_repeats: int = MIN_REPEATS) -> float:
    """Return the seconds of the fastest of many calls, after one warm-up call."""
    function()
    seconds: list[float] = []
    while len(seconds) < min_repeats or sum(seconds) < MIN_SECONDS:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        begun = time.perf_counter()
        function()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - begun)
    return min(seconds)
